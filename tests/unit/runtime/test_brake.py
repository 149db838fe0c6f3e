"""A micro-batch takes as long as is asked for, and what it took is what is told."""

from __future__ import annotations

import pytest

from runtime.brake import Brake


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def micro_batch(self, brake: Brake, seconds: float) -> float:
        begun = self.now
        self.now += seconds
        told = brake.end(begun)
        assert told == pytest.approx(self.now - begun)
        return told


def make(shortest_seconds: float = 0.0) -> tuple[Clock, Brake]:
    clock = Clock()
    return clock, Brake(shortest_seconds, clock.time, clock.sleep)


def test_it_takes_what_it_takes() -> None:
    clock, brake = make()
    assert clock.micro_batch(brake, 0.05) == pytest.approx(0.05)


def test_a_short_one_is_padded_and_a_long_one_is_not() -> None:
    clock, brake = make(0.2)
    assert clock.micro_batch(brake, 0.05) == pytest.approx(0.2)
    assert clock.micro_batch(brake, 0.3) == pytest.approx(0.3)


def test_slow_for_a_while_also_padded_ones() -> None:
    clock, brake = make(0.2)
    brake.slow(3.0, 1.0)
    assert clock.micro_batch(brake, 0.05) == pytest.approx(0.6)
    assert clock.micro_batch(brake, 0.3) == pytest.approx(0.9)
    assert clock.micro_batch(brake, 0.05) == pytest.approx(0.2)


def test_slow_for_good_until_told_otherwise() -> None:
    clock, brake = make()
    brake.slow(4.0, None)
    clock.now += 1e6
    assert clock.micro_batch(brake, 0.1) == pytest.approx(0.4)
    brake.slow(1.0, None)
    assert clock.micro_batch(brake, 0.1) == pytest.approx(0.1)
