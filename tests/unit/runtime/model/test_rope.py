"""Rotary tables: as precise as fp32 can be, and made without a function that rounds as it likes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from runtime.model.rope import rope_tables, rotate


@pytest.mark.parametrize(("head_size", "length", "theta"), [(2, 1, 10000.0), (32, 100, 10000.0), (64, 3000, 5e5)])
def test_tables_are_the_angles_rounded_to_fp32(head_size: int, length: int, theta: float) -> None:
    cosines, sines = rope_tables(head_size, length, theta)
    half = head_size // 2
    angles = np.arange(length)[:, None] * theta ** (-np.arange(half) * 2.0 / head_size)
    assert cosines.shape == sines.shape == (length, 1, head_size)
    for table, want in (
        (cosines[:, 0, :half], np.cos(angles)),
        (cosines[:, 0, half:], np.cos(angles)),
        (sines[:, 0, half:], np.sin(angles)),
        (sines[:, 0, :half], -np.sin(angles)),
    ):
        assert float(np.abs(table.numpy() - want).max()) < 6.1e-8  # half a unit in the last place below 1


def test_tables_have_the_same_bits_on_every_host() -> None:
    cosines, sines = rope_tables(32, 256, 10000.0)
    digest = xxhash.xxh3_64_hexdigest(cosines.numpy().tobytes() + sines.numpy().tobytes())
    assert digest == "da1892ba61092df5"


def test_a_longer_table_begins_as_a_shorter_one() -> None:
    long, short = rope_tables(16, 200, 10000.0), rope_tables(16, 37, 10000.0)
    assert all(torch.equal(a[:37], b) for a, b in zip(long, short, strict=True))


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cosines, sines = rope_tables(32, 64, 100.0)
    x, y = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    turned = [rotate(v.expand(1, 64, 1, 32), cosines, sines)[0, :, 0] for v in (x, y)]
    torch.testing.assert_close(turned[0].norm(dim=-1), x.norm().expand(64))
    products = turned[0] @ turned[1].T
    torch.testing.assert_close(products[10, 3], products[40, 33], rtol=1e-4, atol=1e-4)
