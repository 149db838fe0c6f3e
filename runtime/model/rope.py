"""Rotary positions: tables that are the same bits on every host, and their use.

The frequencies and the powers-of-two rotations come from decimal arithmetic, the rest from plain float64 products
and sums; no call to a sine, cosine or power that rounds as it likes.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import torch
from torch import Tensor

from runtime.exact import DIGITS, cosine_and_sine, power


def rope_tables(head_size: int, length: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cosines, signed sines), fp32 [length, 1, head_size], for ``rotate``.

    Position p turns the pair (i, i + head_size/2) by p * theta ** (-2i / head_size). The sines of the first half
    carry a minus sign, so that one product and one fused multiply-add do the rotation.
    """
    half = head_size // 2
    cosines, sines = np.ones((1, half)), np.zeros((1, half))
    turns = [cosine_and_sine(power(Decimal(theta), Decimal(-2 * i) / head_size)) for i in range(half)]
    while len(cosines) < length:  # `turns` is the rotation by len(cosines) positions
        c = np.array([float(cosine) for cosine, _ in turns])
        s = np.array([float(sine) for _, sine in turns])
        cosines, sines = (
            np.concatenate((cosines, cosines * c - sines * s)),
            np.concatenate((sines, sines * c + cosines * s)),
        )
        turns = [_doubled(cosine, sine) for cosine, sine in turns]
    cosines, sines = cosines[:length], sines[:length]
    table = np.concatenate((cosines, cosines), axis=1), np.concatenate((-sines, sines), axis=1)
    first, second = (torch.from_numpy(t.astype(np.float32)).unsqueeze(1) for t in table)
    return first, second


def rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Turn every head of x [batch, seq_len, heads, head_size] by its position."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), signed_sines)


def _doubled(cosine: Decimal, sine: Decimal) -> tuple[Decimal, Decimal]:
    with localcontext() as context:
        context.prec = DIGITS
        return cosine * cosine - sine * sine, 2 * sine * cosine
