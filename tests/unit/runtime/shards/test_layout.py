"""The flat parameter space: alignment, cuts, and that both are a function of the model alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.errors import ConfigError, RecipeError
from runtime.shards.layout import flat_layout, views

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
groups = st.lists(st.lists(shapes, max_size=6), min_size=1, max_size=4)


def named(group_shapes):
    return [[(f"p{g}.{i}", shape) for i, shape in enumerate(group)] for g, group in enumerate(group_shapes)]


@given(groups, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_slots_are_aligned_and_pieces_tile_every_shard(group_shapes, shards):
    try:
        layout = flat_layout(named(group_shapes), shards)
    except (ConfigError, RecipeError):
        return
    at = 0
    for slot in layout.slots:  # in order of group, then definition; nothing but padding in between
        assert slot.start == at
        assert slot.start % 16 == 0
        at += -(-slot.numel // 16) * 16
    assert layout.total == at
    assert layout.bounds == tuple(16 * (at // 16 * i // shards) for i in range(shards + 1))
    place = {index: slot.group for slot in layout.slots for index in range(slot.start, slot.stop, 16)}
    covered = []
    for shard in range(shards):
        low, high = layout.shard_range(shard)
        assert high > low
        for piece in layout.pieces(shard):
            assert low <= piece.start < piece.stop <= high
            assert {place[i] for i in range(piece.start, piece.stop, 16)} == {piece.group}
            covered += range(piece.start, piece.stop, 16)
        assert len({piece.group for piece in layout.pieces(shard)}) == len(layout.pieces(shard))
    assert covered == list(range(0, at, 16))


def test_views_share_the_flat_tensor():
    layout = flat_layout([[("w", (3, 5)), ("v", (16,))], [("b", ()), ("e", (0, 4))]], 2)
    flat = torch.arange(float(layout.total))
    seen = views(flat, layout)
    assert {name: tuple(tensor.shape) for name, tensor in seen.items()} == {
        "w": (3, 5),
        "v": (16,),
        "b": (),
        "e": (0, 4),
    }
    assert seen["w"][2, 4] == 14
    assert seen["v"][0] == 16
    assert seen["b"] == 32
    seen["b"].fill_(-1.0)
    assert flat[32] == -1.0
    with pytest.raises(ValueError, match="the layout wants"):
        views(flat[1:], layout)


def test_the_fingerprint_tells_layouts_apart_and_stays():
    plain = [[("w", (4, 8))], [("b", (8,))]]
    assert flat_layout(plain, 2).fingerprint() == flat_layout(plain, 2).fingerprint()
    assert (
        flat_layout(plain, 2).fingerprint() == "9d1d84bcd26817b2e59d41d91190fa5d"
    )  # written into checkpoints: must not change
    others = [
        flat_layout(plain, 1),
        flat_layout([[("w", (8, 4))], [("b", (8,))]], 2),
        flat_layout([[("x", (4, 8))], [("b", (8,))]], 2),
        flat_layout([[("w", (4, 8)), ("b", (8,))]], 2),
    ]
    assert len({layout.fingerprint() for layout in [*others, flat_layout(plain, 2)]}) == 5


def test_what_cannot_be_laid_out_is_refused_in_one_line():
    with pytest.raises(RecipeError, match="'w' appears twice"):
        flat_layout([[("w", (4,))], [("w", (4,))]], 1)
    with pytest.raises(RecipeError, match="no parameters"):
        flat_layout([[]], 1)
    with pytest.raises(RecipeError, match="no parameters"):
        flat_layout([[("e", (0,))]], 1)
    for shards in (0, 4):
        with pytest.raises(ConfigError, match=r"train\.shards: \d shards.*1 to 3"):
            flat_layout([[("w", (48,))]], shards)
