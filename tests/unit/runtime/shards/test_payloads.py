"""A job whose messages would be too large is refused before it starts, with the number of shards that it takes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from dataloader.errors import ConfigError
from runtime.comm.order import cover
from runtime.guard import Verdict
from runtime.shards.holding import Holding
from runtime.shards.layout import UNIT, flat_layout
from runtime.shards.payloads import check_payloads, fewest_shards, unit_bytes


def fits(units: int, shards: int, bytes_each: int, limit: int) -> bool:
    bounds = [units * i // shards for i in range(shards + 1)]
    return max(high - low for low, high in pairwise(bounds)) * bytes_each <= limit


def test_the_fewest_shards_are_those_that_fit_when_all_are_tried() -> None:
    for units in range(1, 40):
        for most in (1, 2, 3, 7, 39, 100):
            limit = 64 * most + 5
            first = next(shards for shards in range(1, units + 1) if fits(units, shards, 64, limit))
            assert fewest_shards(units, 64, limit) == first


@pytest.mark.parametrize("ranks", range(1, 13))
def test_a_contribution_is_as_large_as_the_most_subtrees_that_ranks_can_make(ranks: int) -> None:
    sets = ([r for r in range(ranks) if chosen >> r & 1] for chosen in range(1 << ranks))
    subtrees = max(len(cover(held, ranks)) for held in sets)
    assert unit_bytes(ranks, state_bytes=0.0) == 4 * UNIT * subtrees


def test_a_snapshot_is_as_large_as_what_is_packed() -> None:
    layout = flat_layout([[("w", (1000, 16))]], 1)
    made = Holding(layout, 0, lambda g: torch.optim.AdamW(g, fused=True), [{}], torch.zeros(layout.total))
    made.apply(0, torch.ones(layout.total), Verdict("commit", 1.0, 1.0, 0.0, 1.0, 1.0, 1))
    _, payload = made.state().pack()
    assert 0 <= payload.nbytes - layout.total // UNIT * unit_bytes(1, state_bytes=8.0) <= 4  # the count of steps


def test_too_few_shards_are_refused_with_the_fewest_that_fit() -> None:
    limit = 100_000
    for ranks, state_bytes in ((2, 8.0), (16, 8.0), (1, 0.0)):
        with pytest.raises(ConfigError) as caught:
            check_payloads(flat_layout([[("w", (4000, 16))]], 1), ranks, state_bytes, limit)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith("train.shards: 1 for 64,000 parameters makes messages of ")
        fewest = int(re.findall(r"set it to (\d+) or more", message)[0])
        check_payloads(flat_layout([[("w", (4000, 16))]], fewest), ranks, state_bytes, limit)
        with pytest.raises(ConfigError, match=f"set it to {fewest} or more"):
            check_payloads(flat_layout([[("w", (4000, 16))]], fewest - 1), ranks, state_bytes, limit)
