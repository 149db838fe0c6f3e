"""Work moves away from slow workers, and back: where it pays, and neither for noise nor to and fro."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
from test_controller_patience import Play, info

from elastic import messages as m
from elastic.balance import EVIDENCE, STEADY_STEPS, Balance, Counts, Terms, makespan, share, spread_by_speed
from elastic.placement import spread
from elastic.tally import Tally
from elastic.view import event_line
from runtime.protocol import Ballot, Certificate, Member, Plan, StepRecord, WorkerId

RANKS, STEPS = 12, 1000
TERMS = Terms(threshold=0.15, every=20, patience_seconds=5.0)
Speed = Callable[[WorkerId, int], float]  # seconds of a micro-batch at a step


class Course:
    """A job's steps, each as long as its slowest member, and what the balance makes of them."""

    def __init__(self, speed: Speed, terms: Terms = TERMS, ids: tuple[WorkerId, ...] = (0, 1, 2, 3)) -> None:
        self.speed, self.ids, self.now = speed, ids, 0.0
        self.balance = Balance(terms, RANKS, 1, STEPS)
        self.plans: list[Plan] = []
        self.told: list[tuple[int, dict[str, Any]]] = []  # changes of the map, and their gains
        self.seconds: list[float] = []
        self.step = 0
        self.other_seconds = 0.0  # of a step, beside the computing
        self.make_plan()

    def make_plan(self) -> None:
        ranks = spread_by_speed(RANKS, self.ids, self.balance.slowness)
        members = tuple(Member(worker, 0) for worker in self.ids)
        ballot = Ballot(1, len(self.plans) + 1)
        self.plans.append(
            Plan(ballot, members, self.step, Certificate(self.step - 1, ()), None, (), ranks, ranks, STEPS)
        )
        if (change := self.balance.planned(self.plans[-1])) is not None:
            self.told.append((self.step, change))

    def run(self, steps: int) -> Course:
        for _ in range(steps):
            took = {worker: self.speed(worker, self.step) for worker in self.ids}
            for worker in self.ids:
                if self.counts()[worker] or self.step % 4 == 0:  # who has nothing to do is measured now and then
                    self.balance.measured(worker, self.step, took[worker])
            self.seconds.append(makespan(self.counts(), took) + self.other_seconds)
            self.now += self.seconds[-1]
            gain = self.balance.decided(self.step, self.seconds[-1], self.now)
            if gain is not None:
                self.told.append((self.step, gain))
            self.step += 1
            if self.balance.due(self.step, self.now):
                self.balance.adopt()
                self.make_plan()
        return self

    def counts(self) -> Counts:
        given = Counter(self.plans[-1].ranks_next)
        return {worker: given[worker] for worker in self.ids}

    def changes(self) -> list[int]:
        return [step for step, told in self.told if "to" in told]


def slow(worker: WorkerId, factor: float, first: int = 0, last: int = STEPS) -> Speed:
    return lambda w, step: 0.2 * (factor if w == worker and first <= step < last else 1.0)


# --- maps -------------------------------------------------------------------------------------------------------------


def test_no_map_is_done_earlier() -> None:
    """By all maps there are."""
    chance = random.Random(1)
    for _ in range(30):
        workers = tuple(range(chance.randint(1, 4)))
        slowness = {w: chance.choice((1.0, 1.0, 1.5, 3.0, 40.0)) for w in workers}
        ranks = chance.randint(1, 6)
        best = min(
            makespan({w: Counter(choice)[w] for w in workers}, slowness)
            for choice in combinations_with_replacement(workers, ranks)
        )
        counts = share(ranks, workers, slowness)
        assert sum(counts.values()) == ranks
        assert makespan(counts, slowness) == pytest.approx(best)


def test_one_may_get_nothing_and_everyone_gets_one_block() -> None:
    assert share(4, (0, 1, 2, 3), {3: 3.0}) == {0: 2, 1: 1, 2: 1, 3: 0}
    ranks = spread_by_speed(12, (0, 1, 2, 3), {1: 3.0})
    assert ranks == (0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3)
    assert spread_by_speed(7, (2, 5, 9), {}) == spread_by_speed(7, (2, 5, 9), {77: 3.0}) == spread(7, (2, 5, 9))


# --- when to change ---------------------------------------------------------------------------------------------------


def test_work_moves_from_a_slow_worker_and_the_gain_is_told() -> None:
    course = Course(slow(3, 3.0, first=30)).run(100)
    (moved, change), (measured, gain) = course.told
    assert 30 < moved < 60
    assert change["from"] == {"0": 3, "1": 3, "2": 3, "3": 3}
    assert change["to"] == {"0": 4, "1": 4, "2": 3, "3": 1}
    assert change["slowness"] == {"3": 3.0}
    assert (change["step_seconds"], change["predicted_seconds"]) == pytest.approx((1.8, 0.8))
    assert measured - moved <= 8
    assert (gain["before_seconds"], gain["after_seconds"], gain["gain"]) == pytest.approx((1.8, 0.8, 0.5556))


def test_work_comes_back_once_a_worker_has_recovered() -> None:
    course = Course(slow(3, 3.0, 30, 100)).run(200)
    assert len(course.changes()) == 2
    assert set(course.counts().values()) == {3}
    assert not course.balance.slowness


def test_who_was_given_nothing_gets_work_again() -> None:
    course = Course(slow(3, 30.0, 30, 100)).run(99)
    assert course.counts()[3] == 0
    course.run(100)
    assert course.counts()[3] == 3


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.3])
def test_what_pays_too_little_moves_nothing(factor: float) -> None:
    assert not Course(slow(2, factor)).run(300).told


def test_it_is_the_whole_step_that_has_to_become_shorter() -> None:
    """A second less computing is a third of some steps and a twelfth of others."""
    for other_seconds, moves in ((1.0, 1), (10.0, 0)):
        course = Course(slow(3, 3.0))
        course.other_seconds = other_seconds
        assert len(course.run(200).changes()) == moves


def test_short_spells_do_not_add_up() -> None:
    course = Course(lambda worker, step: 0.2 * (3.0 if worker == 1 and step % 30 < 9 else 1.0)).run(300)
    assert len(course.plans) == 1  # no ballot, either


def test_after_another_plan_evidence_is_gathered_anew() -> None:
    course = Course(slow(3, 3.0)).run(19)
    course.make_plan()
    assert course.run(100).changes()[0] >= 19 + EVIDENCE + STEADY_STEPS


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_nothing(seed: int) -> None:
    """Of a busy machine: now and then a micro-batch takes five times as long, and somebody is slow for some steps."""
    chance = random.Random(seed)
    stumbles = {at + chance.randrange(20): chance.randrange(4) for at in range(0, 300, 30)}

    def speed(worker: WorkerId, step: int) -> float:
        lame = any(stumbles.get(at) == worker for at in range(step - 3, step + 1))
        return 0.2 * chance.uniform(0.8, 1.25) * (5.0 if chance.random() < 0.1 else 1.0) * (3.0 if lame else 1.0)

    assert not Course(speed).run(300).told


def test_fast_steps_need_time_to_be_believed() -> None:
    """Fifty steps of a millisecond are but a moment on a busy machine."""
    course = Course(lambda worker, step: 0.001 * (3.0 if worker == 1 else 1.0)).run(300)
    assert not course.told
    assert Course(lambda worker, step: 0.1 * (3.0 if worker == 1 else 1.0)).run(300).told


def test_nothing_goes_to_and_fro() -> None:
    """Somebody is slow by turns: two changes are `every` steps apart at least."""
    course = Course(lambda worker, step: 0.2 * (3.0 if worker == 3 and step // 20 % 2 else 1.0)).run(400)
    steps = course.changes()
    assert all(b - a >= TERMS.every for a, b in pairwise(steps))


def test_a_change_that_brings_nothing_makes_patient() -> None:
    """Whoever has the most work is slow (a machine that all of them share): no map helps."""

    class Shared(Course):
        def run(self, steps: int) -> Course:
            self.speed = lambda worker, step: 0.2 * (3.0 if worker == max(self.ids, key=self.load) else 1.0)
            return super().run(steps)

        def load(self, worker: WorkerId) -> tuple[int, int]:
            return self.counts()[worker], worker

    steps = Shared(slow(0, 1.0)).run(400).changes()
    gaps = [b - a for a, b in pairwise(steps)]
    assert gaps == sorted(gaps)
    assert len(steps) <= 6


def test_too_few_steps_left_or_switched_off() -> None:
    assert not Course(slow(3, 3.0), Terms(enabled=False)).run(200).told
    late = Course(slow(3, 3.0, first=STEPS - 25))
    late.step = STEPS - 200
    late.make_plan()
    assert not late.run(200).told


def test_other_plans_go_by_what_is_believed() -> None:
    course = Course(slow(3, 3.0)).run(60)
    assert course.balance.slowness == {3: 3.0}
    course.ids = (0, 1, 3, 7)  # 2 died, 7 joins
    course.make_plan()
    assert course.counts() == {0: 4, 1: 4, 3: 1, 7: 3}
    told = len(course.told)
    assert len(course.run(100).told) == told  # and nothing moves again


def test_a_new_controller_believes_the_same() -> None:
    course = Course(slow(3, 3.0)).run(60)
    course.balance, before = Balance(TERMS, RANKS, 1, STEPS), course.balance
    course.balance.restore(before.durable())
    course.make_plan()
    assert course.counts()[3] == 1
    assert len(course.run(100).changes()) == 1


# --- the controller ---------------------------------------------------------------------------------------------------


def rebalanced() -> Play:
    """Four workers and four logical ranks; worker 3 takes 3 s where the others take 1 s."""
    play = Play()
    play.controller.balance = Balance(Terms(every=2, patience_seconds=0.0), 4, 1, 100)
    play.begun()
    before = play.plan()
    for step in range(6):
        play.say(*(m.Progress(w, step, 1, step + 1, 0, 3.0 if w == 3 else 1.0) for w in range(4)))
        play.say(m.StepsDecided(0, (record(step, 3.0),)))
        if play.controller.ballots.asking is not None:
            break
    else:
        raise AssertionError("no ballot")
    play.report(0, 1, 2, 3, plan=before)
    play.resume()
    return play


def record(step: int, seconds: float) -> StepRecord:
    return StepRecord(step, 1, 4, 2, (step, step + 1), 1, 0.0, 0.0, 0.0, "commit", "d", "d", seconds=seconds)


def test_a_ballot_changes_the_map_from_the_next_step_on() -> None:
    play = rebalanced()
    plan = play.plan()
    assert plan.ranks_now == (0, 1, 2, 3)
    assert plan.ranks_next == (0, 0, 1, 2)
    told = [e for e in play.of(m.AppendEvent) if e.kind in ("plan", "rebalance")][-2:]
    assert told[0].fields["reason"] == "rebalance"
    assert told[1].fields["to"] == {"0": 2, "1": 1, "2": 1, "3": 0}
    tally = Tally.of([{"kind": e.kind, **e.fields} for e in told])
    assert tally.plain()["rebalances"] == 1
    assert "worker 3 (3 x slower) 1 -> 0; a step 3 -> 2 s expected" in event_line(
        {"kind": told[1].kind, **told[1].fields}
    )
    seconds = {member["id"]: member["micro_batch_seconds"] for member in play.controller.status()["members"]}
    assert seconds == {0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0}


def test_a_death_and_a_new_controller_keep_the_map() -> None:
    play = rebalanced()
    before = play.plan()
    play.say(m.WorkerExited(2, "SIGKILL", 1.0))
    play.report(0, 1, 3, plan=before)
    assert Counter(play.plan().ranks_next) == {0: 2, 1: 2}
    second = Play(durable=dict(play.of(m.Persist)[-1].state))
    second.say(m.CheckpointWritten(0), m.AgentUp(0, "a", "here", (info(0), info(1))))
    second.say(m.AgentUp(1, "b", "there", (info(3),)))
    second.say(m.Tick(), after=6.0)
    second.report(0, 1, 3, plan=play.plan())
    assert second.plan().ranks_next == play.plan().ranks_next
