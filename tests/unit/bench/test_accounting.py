"""bench/peers/accounting.py: which steps count, which samples are lost or repeated, what is a pause."""

from __future__ import annotations

from typing import Any

import pytest

from bench.peers.accounting import (
    Step,
    deviation,
    kept_steps,
    lost_and_repeated,
    pauses,
    rate,
    uneven_steps,
)


def attempt(time: float, rank: int, step: int, group: int, samples: list[int], counts: bool = True) -> dict[str, Any]:
    return {
        "time": time,
        "kind": "attempt",
        "rank": rank,
        "step": step,
        "group": group,
        "samples": samples,
        "counts": counts,
        "loss": float(rank),
    }


def commit(time: float, rank: int, step: int, group: int, digest: str = "d") -> dict[str, Any]:
    return {"time": time, "kind": "commit", "rank": rank, "step": step, "group": group, "digest": digest}


def start(time: float, rank: int, resume: int | None) -> dict[str, Any]:
    return {"time": time, "kind": "start", "rank": rank, "pid": 1, "ticks": 1, "resume": resume}


def whole_step(time: float, step: int, group: int) -> list[dict[str, Any]]:
    """Of two workers, two samples each, in one order."""
    first = step * 4
    return [
        attempt(time, 0, step, group, [first, first + 1]),
        attempt(time, 1, step, group, [first + 2, first + 3]),
        commit(time + 0.1, 0, step, group),
        commit(time + 0.2, 1, step, group),
    ]


def step(number: int, samples: tuple[int, ...], loss: float = 1.0, digest: str = "d") -> Step:
    return Step(number, float(number), samples, loss, digest)


def test_a_step_is_what_all_of_its_group_reduced_and_is_committed_once() -> None:
    [only] = kept_steps(whole_step(1.0, 0, 7))
    assert only == Step(0, 1.1, (0, 1, 2, 3), 0.5, "d")


def test_samples_of_one_who_was_killed_after_the_reduction_are_in_the_model() -> None:
    lines = [line for line in whole_step(1.0, 0, 7) if (line["kind"], line["rank"]) != ("commit", 1)]
    assert kept_steps(lines)[0].samples == (0, 1, 2, 3)


def test_a_step_that_nobody_committed_does_not_count() -> None:
    assert kept_steps([line for line in whole_step(1.0, 0, 7) if line["kind"] == "attempt"]) == []


def test_one_who_came_late_computes_but_does_not_count() -> None:
    lines = [attempt(1.0, 0, 3, 9, [0, 1]), attempt(1.0, 1, 3, 9, [2, 3], counts=False), commit(1.1, 0, 3, 9)]
    assert kept_steps(lines)[0].samples == (0, 1)


def test_a_return_to_a_checkpoint_undoes_the_steps_after_it() -> None:
    lines = [line for number in range(4) for line in whole_step(float(number), number, 0)]
    lines += [start(5.0, 0, 2), start(5.1, 1, 2)]
    assert [step.number for step in kept_steps(lines)] == [0, 1]
    lines += whole_step(6.0, 2, 1)
    assert [(step.number, step.time) for step in kept_steps(lines)] == [(0, 0.1), (1, 1.1), (2, 6.1)]
    assert lost_and_repeated(kept_steps(lines)) == (0, 0)


def test_a_worker_that_joins_the_others_undoes_nothing() -> None:
    lines = [*whole_step(0.0, 0, 0), start(1.0, 1, None), *whole_step(2.0, 1, 1)]
    assert [step.number for step in kept_steps(lines)] == [0, 1]


def test_another_groups_step_of_the_same_number_replaces_it_and_what_followed() -> None:
    lines = [*whole_step(0.0, 5, 0), *whole_step(1.0, 6, 0), *whole_step(2.0, 5, 1)]
    assert [(step.number, step.time) for step in kept_steps(lines)] == [(5, 2.1)]


def test_lost_samples_are_those_passed_over() -> None:
    assert lost_and_repeated([step(0, (0, 1)), step(1, (4, 5))]) == (2, 0)
    assert lost_and_repeated([step(0, (0, 1)), step(1, (1, 2))]) == (0, 1)
    assert lost_and_repeated([]) == (0, 0)


def test_a_stream_that_lags_behind_has_lost_nothing() -> None:
    lagging = [step(0, (0, 1, 2, 3)), step(1, (4, 6)), step(2, (8, 10))]  # of two streams, even and odd, odd is down
    assert lost_and_repeated(lagging, streams=2) == (0, 0)
    assert lost_and_repeated([*lagging, step(3, (12, 9))], streams=2) == (2, 0)  # now 5 and 7 are passed over


def test_rate_counts_samples_of_the_window() -> None:
    steps = [step(0, (0, 1)), step(1, (2, 3)), step(2, (4, 5))]
    assert rate(steps, 1.0, 2.0) == 2.0
    assert rate(steps, 0.0, 4.0) == 1.5


def test_uneven_steps() -> None:
    assert uneven_steps([step(0, (0, 1)), step(1, (2,)), step(2, (3, 4, 5))], 2) == 2


def test_a_pause_is_what_a_gap_is_longer_than_usual() -> None:
    assert pauses([0.0, 1.0, 2.0, 5.0, 6.0], [2.5], 6.0, 1.0) == [pytest.approx(2.0)]


def test_gaps_add_up_until_the_next_kill() -> None:
    commits = [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 19.0]
    assert pauses(commits, [1.5, 10.0], 19.0, 1.0) == [pytest.approx(4.0), pytest.approx(9.0)]


def test_steps_that_are_slower_after_a_kill_are_no_pause_but_the_one_it_fell_into_is() -> None:
    assert pauses([0.0, 1.0, 2.2, 3.7, 5.2], [1.1], 5.2, 1.0) == [pytest.approx(0.2)]


def test_a_step_that_is_faster_than_usual_pays_nothing_back() -> None:
    assert pauses([0.0, 1.0, 1.5, 4.5], [1.1], 4.5, 1.0) == [pytest.approx(2.0)]


def test_a_gap_before_any_kill_is_nobodys() -> None:
    assert pauses([0.0, 5.0, 6.0], [5.5], 6.5, 1.0) == [0.0]


def test_who_never_comes_back_pauses_to_the_end() -> None:
    assert pauses([0.0, 1.0], [1.5], 31.0, 1.0) == [pytest.approx(29.0)]


def test_the_same_run_does_not_deviate() -> None:
    run = [step(number, (number,)) for number in range(30)]
    off = deviation(run[:20], run)
    assert (off.steps, off.loss, off.first_step) == (20, 0.0, None)


def test_deviation_is_of_the_last_common_steps() -> None:
    run = [step(number, (number,)) for number in range(30)]
    other = [step(number, (number,), 1.0 if number < 15 else 1.5, "d" if number < 12 else "e") for number in range(20)]
    off = deviation(other, run)
    assert (off.steps, off.loss, off.first_step) == (20, pytest.approx(0.25), 12)
