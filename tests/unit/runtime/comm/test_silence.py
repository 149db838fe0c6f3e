"""When silence is too long: only with an answer due, and only in time that was spent looking."""

from __future__ import annotations

from runtime.comm.silence import Silence

LIMIT, LOOK = 1.5, 0.25


def looks(silence: Silence, count: int, *, heard: int, asked: bool, seconds: float = LOOK) -> None:
    for _ in range(count):
        silence.look(seconds, heard, asked)


def begun() -> Silence:
    silence = Silence(LIMIT)
    silence.look(LOOK, 7, False)
    return silence


def test_a_host_that_answers_nothing_is_gone_after_the_limit() -> None:
    silence = begun()
    looks(silence, 5, heard=7, asked=True)
    assert not silence.too_long
    looks(silence, 1, heard=7, asked=True)
    assert silence.too_long
    assert silence.seconds == LIMIT


def test_any_segment_is_a_sign_of_life() -> None:
    silence = begun()
    for number in range(100):
        looks(silence, 5, heard=number, asked=True)
        assert not silence.too_long


def test_who_was_asked_nothing_owes_nothing() -> None:
    """As between two probes of a closed window: the longer it is closed, the further apart they are."""
    silence = begun()
    looks(silence, 100, heard=7, asked=False)
    assert not silence.too_long
    looks(silence, 2, heard=7, asked=True)
    assert not silence.too_long
    looks(silence, 1, heard=7, asked=True)
    assert silence.too_long


def test_time_in_which_nobody_looked_is_not_the_peer_s() -> None:
    silence = begun()
    looks(silence, 1, heard=7, asked=True, seconds=3600.0)
    assert not silence.too_long
    looks(silence, 2, heard=7, asked=True, seconds=3600.0)
    assert silence.too_long  # somebody who always looks late still sees it
