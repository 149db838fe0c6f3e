"""Random streams: the written formula, and all generators a model may draw from."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from runtime.rng import set_build_streams, set_streams, stream_seed


def draws() -> tuple[list[float], list[float], list[float]]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def test_seed_is_the_documented_hash() -> None:
    digest = hashlib.blake2b(b"17/3/5/torch", digest_size=4).digest()
    assert stream_seed(17, 3, 5, "torch") == int.from_bytes(digest, "little")


def test_seeds_hold_what_torch_keeps() -> None:
    """torch's CPU generator takes 32 bits of a seed, so a wider one would lose some of its streams' difference."""
    seeds = {stream_seed(s, t, m, "torch") for s in range(4) for t in range(20) for m in range(20)}
    assert len(seeds) == 1600
    assert max(seeds) < 2**32


def test_streams_do_not_depend_on_what_was_drawn_before() -> None:
    set_streams(1, 2, 3)
    first = draws()
    torch.rand(5)
    random.random()
    set_streams(1, 2, 3)
    assert draws() == first


def test_every_generator_moves_with_each_coordinate() -> None:
    places = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]
    seen = []
    for place in places:
        set_streams(*place)
        seen.append(draws())
    for one in zip(*seen, strict=True):
        assert len({tuple(values) for values in one}) == len(places)


def test_the_stream_is_that_of_manual_seed() -> None:
    set_streams(7, 0, 0)
    got = torch.rand(4)
    torch.manual_seed(stream_seed(7, 0, 0, "torch"))
    assert torch.equal(got, torch.rand(4))


def test_building_a_model_has_streams_of_its_own() -> None:
    set_build_streams(1)
    built = draws()
    set_streams(1, 0, 0)
    assert draws() != built
    set_build_streams(1)
    assert draws() == built
