"""The controller must not wait for what won't come: each case here was a run that stood still in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic import messages as m
from elastic.controller import RESEND_SECONDS, Controller
from elastic.controller_state import ControllerFacts
from runtime.protocol import NO_BALLOT, Ballot, HoldingReport, Plan, Report, WorkerId, plan_from_plain


@dataclass
class Entry:
    at_step: int
    fault: str
    wait: bool = True


class Play:
    """A controller of two nodes with two workers each, and what is said to it and by it."""

    def __init__(self, *faults: Entry, standbys: int = 0, durable: dict[str, Any] | None = None) -> None:
        facts = ControllerFacts(2, 2, standbys, 1, 4, 2, 10, 1, faults)
        self.now = 0.0
        self.controller = Controller(facts, durable, 1 if durable is None else 2, 0, lambda step: None, None)
        self.actions = self.controller.start(self.now)

    def say(self, *events: m.Event, after: float = 0.0) -> list[m.Action]:
        self.now += after
        said: list[m.Action] = []
        for event in events:
            said += self.controller.handle(event, self.now)
        self.actions += said
        return said

    def told(self, kind: str) -> list[tuple[WorkerId, Any]]:
        return [(a.worker, a.message) for a in self.actions if isinstance(a, m.ToWorker) and a.message["kind"] == kind]

    def of(self, kind: type[Any]) -> list[Any]:
        return [a for a in self.actions if isinstance(a, kind)]

    def up(self, *workers: WorkerId) -> None:
        for worker in workers:
            self.say(m.WorkerUp(info(worker)), m.WorkerLinked(worker))

    def report(self, *workers: WorkerId, plan: Plan | None = None) -> list[m.Action]:
        asking = self.controller.ballots.asking
        assert asking is not None
        return self.say(*(m.Reported(report(asking.ballot, worker, plan)) for worker in workers))

    def plan(self) -> Plan:
        plan = plan_from_plain(self.told("plan")[-1][1]["plan"])
        assert plan is not None
        return plan

    def resume(self) -> None:
        plan = self.plan()
        self.say(*(m.Resumed(worker, plan.ballot, 0.0) for worker in plan.ids()))

    def begun(self) -> Play:
        self.say(m.AgentUp(0, "a", "here"), m.AgentUp(1, "b", "there"))
        first = len(self.of(m.StartWorker))
        self.up(*range(first))
        self.say(m.CheckpointWritten(0))
        self.say(m.Tick(), after=1.0)
        asking = self.controller.ballots.asking
        assert asking is not None
        self.report(*sorted(asking.asked))
        self.resume()
        return self


def info(worker: WorkerId) -> m.WorkerInfo:
    return m.WorkerInfo(worker, 100 + worker, ("here", 4000 + worker), {}, "", linked=True)


def report(ballot: Ballot, worker: WorkerId, plan: Plan | None) -> Report:
    """Of a worker that holds nothing, or all that the plan gave it, in the plan's first step."""
    holdings: tuple[Any, ...] = ()
    if plan is not None:
        holdings = tuple(
            HoldingReport(shard, True, plan.version, ())
            for shard, where in enumerate(plan.shards)
            if worker in (where.owner, *where.backups)
        )
    step = -1 if plan is None else plan.version
    previous = None if plan is None else plan.certificate
    return Report(ballot, worker, plan, step, False, None, previous, holdings, ())


def test_a_skipped_fault_lets_go_of_those_who_wait_at_its_gate() -> None:
    play = Play(Entry(0, "kill-worker=77")).begun()
    play.say(m.WaitingAtGate(0, 0))
    assert play.of(m.AppendEvent)[-1].kind == "fault_skipped"
    assert {worker for worker, _ in play.told("release")} == {0, 1, 2, 3}


def test_a_gate_opens_although_a_recovery_waits_for_what_is_computed_behind_it() -> None:
    play = Play(Entry(0, "kill-node=1")).begun()
    play.say(*(m.WaitingAtGate(worker, 0) for worker in range(4)))
    before = play.plan()
    play.say(m.AgentDown(1, "b", 1.0))
    play.report(0, 1, plan=before)
    play.resume()
    play.say(*(m.WaitingAtGate(worker, 0) for worker in (0, 1)))
    filled = play.plan()
    fills = [(w, s) for s, where in enumerate(filled.shards) for w in where.fill]
    play.say(*(m.ShardFilled(worker, filled.ballot, shard) for worker, shard in fills))
    assert {worker for worker, _ in play.told("release")} == {0, 1}


def test_a_standby_steps_in_for_a_member_that_died_after_it_was_asked() -> None:
    play = Play(standbys=2).begun()
    before = play.plan()
    play.say(m.WorkerExited(2, "SIGKILL", 1.0))  # a ballot opens, with standby 4 in place of 2
    play.say(m.WorkerExited(3, "SIGKILL", 1.0))
    play.report(0, 1, plan=before)
    play.report(4)
    assert play.plan().ids() == (0, 1, 4)
    play.resume()
    asking = play.controller.ballots.asking
    assert asking is not None
    assert 5 in asking.asked


def test_a_new_controller_starts_the_workers_that_died_while_none_looked() -> None:
    first = Play().begun()
    state = first.of(m.Persist)[-1].state
    second = Play(durable=dict(state))
    second.say(m.AgentUp(0, "a", "here", (info(0), info(1))))
    assert not second.of(m.StartWorker)
    second.say(m.AgentUp(1, "b", "there", (info(2),)))
    assert second.of(m.StartWorker) == [m.StartWorker(1, 4)]


def test_a_tick_that_comes_early_asks_for_another() -> None:
    play = Play().begun()
    play.say(m.LinkLost(0, 1, 1.0))
    assert play.controller.ballots.asking is not None
    said = play.say(m.Tick(), after=RESEND_SECONDS * 0.999)
    wakes = [action.after_seconds for action in said if isinstance(action, m.Wake)]
    assert len(wakes) == 1
    asked = len(play.told("ask"))
    play.say(m.Tick(), after=wakes[0])
    assert len(play.told("ask")) > asked


def test_one_tick_may_stand_for_several_wakes() -> None:
    """The shell keeps the earliest only."""
    play = Play().begun()
    before = play.plan()
    play.say(m.LinkLost(0, 1, 1.0))
    while play.controller.ballots.asking is not None and 1 in play.controller.ballots.asking.asked:
        wakes = [a.after_seconds for a in play.say(m.Tick(), after=0.1) if isinstance(a, m.Wake)]
        assert wakes, "it would never be woken again"
        play.now += min(wakes)
        if play.now > 60.0:
            break
        for worker in (0, 2, 3):
            if (asking := play.controller.ballots.asking) is not None and worker not in asking.reports:
                play.report(worker, plan=before)
    assert m.KillWorker(0, 1) in play.actions  # it never reported
    assert play.now < 20.0


def test_no_checkpoint_is_pruned_while_a_rollback_may_read_it() -> None:
    play = Play()
    play.begun()
    play.say(m.CheckpointWritten(4))
    assert len(play.of(m.PruneCheckpoints)) == 2
    before = play.plan()
    play.say(m.WorkerExited(3, "SIGKILL", 1.0))
    play.report(0, 1, 2)  # empty-handed: nobody has anything left
    rollback = play.plan()
    assert rollback.checkpoint == 4
    assert rollback.ballot > before.ballot > NO_BALLOT
    play.say(m.CheckpointWritten(8))
    assert len(play.of(m.PruneCheckpoints)) == 2
    play.resume()
    assert len(play.of(m.PruneCheckpoints)) == 3


def test_a_run_that_is_stopped_ends_although_nobody_computes_what_the_dead_owed() -> None:
    play = Play().begun()
    before = play.plan()
    play.say(m.WorkerExited(3, "SIGKILL", 1.0))
    play.report(0, 1, 2, plan=before)
    play.resume()
    before = play.plan()
    play.say(m.FaultRequested("stop"))
    play.report(0, 1, 2, plan=before)
    assert play.plan().stop_at == 0
    play.resume()
    play.say(m.WeightsWritten(0, 0))
    assert [end.state for end in play.of(m.End)] == ["stopped"]


def test_a_new_controller_does_not_count_on_a_node_that_was_sent_away() -> None:
    first = Play().begun()
    first.say(m.FaultRequested("kill-node=1"))
    assert first.of(m.KillAgent) == [m.KillAgent(1, False)]
    second = Play(durable=dict(first.of(m.Persist)[-1].state))
    assert second.controller.returning == {0, 1}
    second.say(m.AgentUp(0, "a", "here", (info(0), info(1))), m.AgentDown(1, "", 1.0))
    assert not second.of(m.StartAgent)
    assert not second.of(m.StartWorker)
    assert second.controller.roster.wanted() == 2


def test_the_late_words_of_a_dead_agent_bring_no_workers_back() -> None:
    first = Play().begun()
    second = Play(durable=dict(first.of(m.Persist)[-1].state))
    second.say(m.AgentUp(0, "a", "here", (info(0), info(1))), m.AgentUp(1, "c", "there"))
    second.say(m.AgentUp(1, "b", "there", (info(2), info(3))))
    assert [node.instance for node in second.controller.roster.nodes.values() if node.alive] == ["a", "c"]
    assert not second.controller.roster.lives(2)
