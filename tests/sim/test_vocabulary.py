"""The vocabulary of faults as the simulator plays it, and double faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.faults import FORMS, FaultKind, parse_fault
from tests.scenarios.script import Script, job_of
from tests.sim.bugs import BELIEVED, BUGS, CLASSES, HALF, planted
from tests.sim.classes import CAUGHT, caught_by
from tests.sim.doubles import CASES, PAIRS, double_world, pair_of
from tests.sim.job import FaultEntry
from tests.sim.runs import run_seed
from tests.sim.vocabulary import hooks
from tests.sim.world import Outcome, World

SIZES = {"workers": 4, "nodes": 2, "logical_ranks": 8, "shards": 4, "steps": 6, "save_every": 2}
PLAYED = [
    "kill-worker=3",
    "kill-agent=1",
    "kill-node=1",
    "kill-controller",
    "kill-driver",
    "freeze-worker=3,seconds=0.1",
    "freeze-worker=3",
    "freeze-agent=1,seconds=1",
    "freeze-node=1",
    "freeze-controller,seconds=0.5",
    "slow-worker=3,factor=5,seconds=1",
    "slow-node=1,factor=5",
    "partition-worker=3,seconds=0.5",
    "partition-worker=3,peer=0,way=out,seconds=0.5",
    "partition-node=1,way=in,seconds=1",
    "delay-worker=3,peer=0,seconds=0.1",
    "clock-jump=1,seconds=3600",
    "corrupt-worker=3,what=link",
    "corrupt-worker=3,what=gradient",
    "corrupt-worker=3,what=parameter",
    "poison,what=nan",
    "poison,what=spike",
    "disk-full,seconds=1",
    "store-down,seconds=1",
    "add-node",
    "preempt-node=1,seconds=30",
    "stop",
]


def played(*faults: str, steps: int = 6, wait: bool = False) -> tuple[World, Outcome]:
    entries = [FaultEntry(2, fault, wait) for fault in faults]
    script = Script((), replace(job_of(SIZES, entries), steps=steps), tuple(entries))
    world = World(7, setting=script.setting())
    return world, world.run()


@pytest.mark.parametrize("fault", PLAYED)
def test_a_fault_is_played_and_no_promise_is_broken(fault: str) -> None:
    world, outcome = played(fault)
    assert outcome.violation is None
    assert [str(known) for known, _ in world.vocabulary.happened] == [fault]


def test_every_kind_is_played() -> None:
    thaws = {FaultKind.THAW_WORKER, FaultKind.THAW_AGENT, FaultKind.THAW_NODE}
    assert {parse_fault(fault).kind for fault in PLAYED} | thaws == set(FaultKind)


@pytest.mark.parametrize("frozen", ["worker=3", "agent=1", "node=1"])
def test_whoever_is_thawed_goes_on(frozen: str) -> None:
    world, outcome = played(f"freeze-{frozen}", f"thaw-{frozen}")
    assert outcome.violation is None
    assert world.workers[3].alive
    assert world.checks.members == {0, 1, 2, 3}


def events_of(world: World, kind: str) -> list[dict[str, object]]:
    return [dict(facts) for _, known, facts in world.disk.events if known == kind]


@pytest.mark.parametrize("wait", [False, True])
def test_a_poisoned_batch_is_skipped_and_nobody_leaves_for_it(wait: bool) -> None:
    world, outcome = played("poison,what=nan", steps=12, wait=wait)
    assert outcome.violation is None
    (step,) = world.reference.poison
    assert [record.step for record in world.disk.ledger if record.verdict == "skip"] == [step]
    assert not events_of(world, "member_left")


def test_who_computes_wrongly_once_is_found_and_the_step_is_the_right_one() -> None:
    world, outcome = played("corrupt-worker=3,what=gradient", steps=12)
    assert outcome.violation is None
    assert [event["worker"] for event in events_of(world, "member_left")] == [3]
    assert all(record.verdict == "commit" for record in world.disk.ledger)


def test_who_has_wrong_parameters_ends_before_anything_comes_of_them() -> None:
    world, outcome = played("corrupt-worker=3,what=parameter", steps=12)
    assert outcome.violation is None
    (left,) = events_of(world, "member_left")
    assert left["worker"] == 3
    assert not events_of(world, "bad_step")


def test_a_full_disk_is_waited_for() -> None:
    world, outcome = played("disk-full,seconds=2", wait=True)
    assert outcome.violation is None
    assert events_of(world, "save_failed")
    assert world.disk.newest() == 6


@pytest.mark.parametrize("kind", [k for k in FaultKind if FORMS[k].points])
def test_a_fault_waits_for_its_point(kind: FaultKind) -> None:
    for point in sorted(FORMS[kind].points - {"join", "handover", "plan"}):
        text = f"{kind}=" + ("3" if FORMS[kind].number == "ID" else "1") if FORMS[kind].number else str(kind)
        seconds = ",seconds=0.1" if "seconds" in FORMS[kind].options else ""
        world, outcome = played(f"{text},during={point}{seconds}")
        assert outcome.violation is None
        ((fault, hook),) = world.vocabulary.happened
        assert hook in hooks(fault)


def test_the_controller_does_what_holds_a_step() -> None:
    world, outcome = played("kill-worker=3", "freeze-worker=2", wait=True)
    assert outcome.violation is None
    told = [facts["fault"] for _, kind, facts in world.disk.events if kind == "fault_injected"]
    assert told == ["kill-worker=3", "freeze-worker=2"]
    assert not world.workers[3].alive
    assert not world.workers[2].alive


def test_no_decision_depends_on_a_wall_clock() -> None:
    def course(*faults: str) -> list[tuple[float, str]]:
        world, outcome = played("kill-worker=3,during=vote", *faults)
        assert outcome.violation is None
        return [(at, kind) for at, kind, _ in world.disk.events]

    assert course("clock-jump=1,seconds=3600", "clock-jump=0,seconds=-86400") == course("clock-jump=1,seconds=0")


def test_a_wrong_clock_costs_nothing_but_stamps() -> None:
    """A death on the node whose clock is wrong, and one elsewhere: what they cost is told as if it weren't."""

    def pauses(seconds: int) -> list[float]:
        course = {
            2: f"clock-jump=1,seconds={seconds}",
            100: "kill-worker=3,during=vote",
            120: "kill-worker=0,during=vote",
        }
        entries = tuple(FaultEntry(step, fault, False) for step, fault in course.items())
        script = Script((), replace(job_of(SIZES, entries), steps=140), entries)
        world = World(7, setting=script.setting())
        assert world.run().violation is None
        return [float(str(e["pause_ms"])) for e in events_of(world, "recovery")]

    right = pauses(0)
    assert len(right) == 2
    for ahead in (3600, -3600):
        assert pauses(ahead) == pytest.approx(right, abs=100.0)


def test_a_resumed_job_goes_on_from_the_newest_checkpoint() -> None:
    world, outcome = played("kill-driver")
    assert outcome.violation is None
    assert world.disk.incarnations == 2
    assert [record.step for record in world.disk.ledger] == list(range(6))


# --- double faults ------------------------------------------------------------------------------------------------


def test_the_pairs_take_turns_over_all_of_them() -> None:
    assert len({pair_of(seed) for seed in range(len(PAIRS))}) == len(PAIRS) == len(CASES) ** 2


@pytest.mark.timeout(300)
def test_double_faults_break_no_promise() -> None:
    """A slice; all: python -m tests.sim --double --seeds 0:5000."""
    outcomes = [run_seed(seed, double=True) for seed in range(20)]
    failing = [f"seed {o.seed}: {o.violation}" for o in outcomes if o.violation is not None]
    assert not failing, "\n".join([*failing, "replay one: python -m tests.sim --double --seed N --trace"])
    assert sum(o.reached == (True, True) for o in outcomes) > 13


def test_both_faults_of_a_seed_happen() -> None:
    world = double_world(0)
    world.run()
    kinds = [fault.kind for fault, _ in world.vocabulary.happened if fault.kind is not FaultKind.ADD_NODE]
    assert kinds == [kind for kind, _ in pair_of(0)]


def test_every_class_of_bugs_is_caught_by_double_faults() -> None:
    assert {BUGS[name].kind for name in CAUGHT} == set(CLASSES) - {HALF, BELIEVED}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CAUGHT)
def test_double_faults_catch_a_planted_bug(name: str) -> None:
    """Where the code has changed so that this seed no longer does: python -m tests.sim --double --plant NAME."""
    with planted(name):
        assert caught_by(name).run().violation is not None, BUGS[name].what
