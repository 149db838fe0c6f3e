"""When a step that came out bad is decided, whose gradient was wrong, and who computes it next."""

from __future__ import annotations

import math

import pytest

from runtime.guard import GuardRules
from runtime.protocol import Attempt, Header
from runtime.trial import Ruling, other_workers, outvoted, rule

GOOD, BAD, WORSE = b"good", b"bad", b"worse"


def attempt(bits: bytes, workers: tuple[int, ...], digests: tuple[bytes, ...] = (), bad: str | None = None) -> Attempt:
    norm = 1.0 if bits == GOOD else math.nan
    headers = (Header(0, norm, bits, 2.0, 10, b"data"),)
    told = digests or (b"",) * len(workers)
    return Attempt(headers, workers, told, ("" if bits == GOOD else "nan") if bad is None else bad)


def test_a_good_first_attempt_decides_and_a_bad_one_does_not():
    assert rule(attempt(GOOD, (1, 2)), (), alone=False) == Ruling("", True)
    assert rule(attempt(BAD, (1, 2)), (), alone=False) == Ruling("nan", False)


def test_the_same_bad_bits_from_others_are_the_data():
    ruling = rule(attempt(BAD, (2, 1)), (attempt(BAD, (1, 2)),), alone=False)
    assert ruling == Ruling("nan", True)
    assert ruling.decides(GuardRules("skip"))
    assert not ruling.decides(GuardRules("stop"))


def test_one_workers_word_is_not_enough_unless_it_is_alone():
    before = (attempt(BAD, (1, 2)),)
    assert not rule(attempt(BAD, (1, 1)), before, alone=False).data  # rank 0 rests on worker 1
    assert rule(attempt(BAD, (1, 1)), (attempt(BAD, (1, 1)),), alone=True).data


def test_a_good_second_attempt_is_doubted_and_a_third_decides():
    first, second = attempt(BAD, (1, 2), (b"x", b"q")), attempt(GOOD, (2, 1), (b"p", b"q"))
    assert not rule(second, (first,), alone=False).data
    ruling = rule(attempt(GOOD, (1, 2)), (first, second), alone=False)
    assert ruling == Ruling("", True, ((1, 0),))  # worker 1's gradient of rank 0, and nobody else's


def test_of_two_that_contradict_each_other_for_good_the_well_one_is_believed():
    first, second = attempt(BAD, (1, 2), (b"x", b"q")), attempt(GOOD, (2, 1), (b"p", b"q"))
    assert not rule(first, (first, second), alone=False).data
    assert rule(second, (first, second, first), alone=False) == Ruling("", True, ((1, 0),))


def test_four_bad_attempts_are_the_data_only_if_no_rank_was_contradicted():
    kinds = [attempt(bits, (n % 2, 1 - n % 2), (b"p", b"q")) for n, bits in enumerate((BAD, WORSE, b"c"))]
    assert rule(attempt(b"d", (1, 0)), kinds, alone=False).data
    other = attempt(b"c", (0, 1), (b"p", b"r"))
    assert not rule(attempt(b"d", (1, 0)), (*kinds[:2], other), alone=False).data


def test_who_is_contradicted_by_two_others_is_outvoted():
    attempts = [attempt(BAD, (w,), (d,)) for w, d in ((1, b"x"), (2, b"p"))]
    assert outvoted(attempts) == ()
    assert outvoted([*attempts, attempt(BAD, (3,), (b"p",))]) == ((1, 0),)
    assert outvoted([*attempts, attempt(BAD, (1,), (b"p",))]) == ((1, 0),)  # which contradicts itself
    assert outvoted([*attempts, attempt(BAD, (1,), (b"x",))]) == ()
    assert outvoted([*attempts, attempt(BAD, (3,), (b"",))]) == ()  # dead: its word is lost


@pytest.mark.parametrize("members", [(1, 2), (1, 2, 3), (1, 2, 3, 4)])
def test_each_rank_goes_to_another_worker_evenly(members):
    attempts = [attempt(BAD, tuple(members[r % len(members)] for r in range(8)))]
    for _ in range(3):
        chosen = other_workers(attempts, members)
        assert all(now != last for now, last in zip(chosen, attempts[-1].workers, strict=True))
        assert max(chosen.count(w) for w in members) - min(chosen.count(w) for w in members) <= 2
        attempts.append(attempt(BAD, chosen))
    if len(members) > 2:  # nobody twice while others haven't had it
        for rank in range(8):
            assert len({a.workers[rank] for a in attempts[:3]}) == 3


def test_a_lone_worker_does_it_again_itself():
    assert other_workers([attempt(BAD, (5, 6, 5))], (6,)) == (6, 6, 6)
