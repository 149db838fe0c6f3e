"""The learning rate's curves: their corners, their bounds, and bits that don't depend on a C library."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import ScheduleConfig
from runtime.exact import PI, cosine_and_sine, power
from runtime.schedule import lr_ratio


def curve(steps: int, **values: object) -> list[float]:
    config = ScheduleConfig.model_validate(values)
    return [lr_ratio(config, step, steps) for step in range(steps)]


def test_constant_is_one_after_the_warm_up() -> None:
    assert curve(6, kind="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_cosine_is_half_a_cosine() -> None:
    got = curve(40, kind="warmup_cosine", warmup_steps=4, final_ratio=0.1)
    assert got[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    want = [0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 36)) / 2 for step in range(4, 40)]
    assert got[4:] == pytest.approx(want, rel=1e-14)


def test_warmup_cosine_stays_at_its_end() -> None:
    got = curve(20, kind="warmup_cosine", decay_steps=10, final_ratio=0.25)
    assert got[10:] == [0.25] * 10
    assert got[5] == 0.625  # half-way


def test_wsd_falls_in_a_line_at_the_end() -> None:
    got = curve(12, kind="wsd", warmup_steps=2, decay_steps=4, final_ratio=0.0)
    assert got == [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert curve(40, kind="wsd", final_ratio=0.0)[-5:] == [1.0, 1.0, 0.75, 0.5, 0.25]  # by default a tenth


def test_cooldown_falls_as_one_minus_root() -> None:
    got = curve(16, kind="cooldown", final_ratio=0.0)
    assert got[:5] == [1.0, 0.75, 1 - math.sqrt(2 / 16), 1 - math.sqrt(3 / 16), 0.5]


@given(
    kind=st.sampled_from(["warmup_cosine", "wsd", "constant", "cooldown"]),
    warmup=st.integers(0, 30),
    decay=st.none() | st.integers(1, 60),
    final=st.floats(0, 1),
    steps=st.integers(1, 60),
)
def test_every_curve_rises_once_and_falls_once_within_its_bounds(
    kind: str, warmup: int, decay: int | None, final: float, steps: int
) -> None:
    warmup = 0 if kind == "cooldown" else warmup
    got = curve(steps, kind=kind, warmup_steps=warmup, decay_steps=decay, final_ratio=final)
    assert all(0.0 < ratio <= 1.0 or final == 0.0 for ratio in got)
    assert min(got) >= min(final, got[0])
    peak = got.index(max(got))
    assert got[: peak + 1] == sorted(got[: peak + 1])
    assert got[peak:] == sorted(got[peak:], reverse=True)


@given(st.floats(-4, 4))
def test_decimal_cosine_and_sine_agree_with_the_c_library(angle: float) -> None:
    cosine, sine = cosine_and_sine(Decimal(angle))
    assert float(cosine) == pytest.approx(math.cos(angle), abs=2e-16)
    assert float(sine) == pytest.approx(math.sin(angle), abs=2e-16)
    assert abs(cosine * cosine + sine * sine - 1) < Decimal("1e-25")


def test_decimal_corners() -> None:
    assert abs(cosine_and_sine(PI)[0] + 1) < Decimal("1e-45")
    assert abs(cosine_and_sine(PI / 2)[0]) < Decimal("1e-26")
    assert float(power(Decimal(10000), Decimal("-0.5"))) == 0.01
