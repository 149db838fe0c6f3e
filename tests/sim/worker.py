"""One simulated worker process: the production driver and step transaction over simulated links, threads and time.

What production does in other threads (computing, writing) is done here by calls that come later; what a signal does
to a process (killed, stopped, continued) is done to this object, between any two things that the driver does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic.faults import FORMS, Fault, FaultKind, Point
from runtime import actions as a
from runtime import change
from runtime.comm.link import ConnectFailed, LinkDown, LinkUp, Received
from runtime.compute_thread import Computed, Measured, MicroBatchDone
from runtime.driver import Driver
from runtime.links import REDIAL_SECONDS
from runtime.protocol import NO_BALLOT, Ballot, Certificate, Frame, FrameKind, WorkerId, plan_from_plain
from runtime.saving import FIRST_RETRY_SECONDS, Delayed, Saved
from runtime.step import StepTransaction
from tests.sim.clock import CLOCK
from tests.sim.network import SimMesh
from tests.sim.values import Cell, HashArithmetic, digest_of
from tests.sim.violation import Violation

if TYPE_CHECKING:
    from tests.sim.cluster import SimAgent
    from tests.sim.world import World

SILENT_WHILE_FROZEN = (a.Send, a.Decided, a.Save, a.Filled, a.Ended, a.AtGate)
POINT_OF_ACTION = {a.SendReport: "report", a.Save: "save", a.AtGate: "gate", a.Filled: "filled"}


class Died(Exception):
    """Unwinds out of whatever a worker was doing when it was killed."""


class WatchedTransaction(StepTransaction):
    """The production transaction; the simulator hears of what no message tells."""

    sim: SimWorker

    def enter(self, step: int) -> None:
        self.sim.marks.append("install")
        self.sim.world.watch.entered(self.sim, step)
        self.sim.world.checks.entering(self.sim, step)
        super().enter(step)

    def certify(self, certificate: Certificate) -> None:
        self.sim.marks.append("certified")
        self.sim.ahead = self.sim.world.checks.certifying(self.sim, certificate)
        if self.sim.ahead:
            self.sim.world.watch.certified(self.sim, certificate)
        super().certify(certificate)
        self.sim.world.checks.holders()


class WatchedDriver(Driver):
    """The production driver, with a chance to die before each thing that it does."""

    sim: SimWorker

    def do(self, actions: list[a.Action]) -> None:
        super().do(actions)
        self.sim.pass_marks()

    def act(self, action: a.Action) -> None:
        sim = self.sim
        sim.pass_marks()
        if self.tx.frozen and isinstance(action, SILENT_WHILE_FROZEN):
            sim.world.violation(f"worker {sim.id} is frozen and does {type(action).__name__}")
        if (point := POINT_OF_ACTION.get(type(action))) is not None:
            sim.at(point)
        if isinstance(action, a.SendReport):
            sim.world.watch.promised(sim)
        elif isinstance(action, a.Filled):
            sim.world.watch.filled(sim, action.shard)
        super().act(action)
        if point == "report" and sim.moved_here() is not None:
            sim.at("moved")


class SimCompute:
    """runtime/compute_thread.py without the thread: the same bookkeeping, one call per micro-batch."""

    def __init__(self, owner: SimWorker) -> None:
        self.owner = owner
        self.step = -1
        self.wanted: deque[int] = deque()
        self.running: tuple[int, int] | None = None
        self.undelivered: set[tuple[int, int]] = set()
        self.cancel = False
        self.installed: int | None = None
        self.parameters: tuple[int, ...] = ()
        self.begun_under = NO_BALLOT
        self.begun_at = 0.0
        self.asleep = True

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.wanted)

    def pace(self) -> tuple[float, float]:
        return 0.0, 0.0  # nobody watches it here: see tests/sim/cluster.py, watch_frozen

    def want(self, step: int, ranks: tuple[int, ...]) -> None:
        if step != self.step:
            self.step = step
            self.undelivered.clear()
        if self.running is not None and (self.running[0] != step or self.running[1] not in ranks):
            self.cancel = True
        done = {rank for s, rank in self.undelivered if s == step}
        if self.running is not None and not self.cancel:
            done.add(self.running[1])
        self.wanted = deque(rank for rank in ranks if rank not in done)
        if self.asleep and self.wanted:
            self.asleep = False
            self.owner.later(0.0001, self.begin)

    def begin(self) -> None:
        if not self.wanted:
            self.asleep = True
            return
        self.running, self.cancel = (self.step, self.wanted.popleft()), False
        self.begun_under = self.owner.tx.installed().ballot
        if self.installed != self.step:
            self.parameters = self.owner.world.wrongs.parameters(self.owner, self.step)
            self.installed = self.step
        self.begin_micro_batch(0)

    def begin_micro_batch(self, number: int) -> None:
        self.begun_at = self.owner.world.engine.now
        self.owner.later(self.owner.micro_batch_seconds(), self.micro_batch, number)

    def measure(self) -> None:
        """Beside whatever is computed, which production would do one after the other."""
        seconds = self.owner.micro_batch_seconds()
        self.owner.later(seconds, self.owner.receive, self.owner.on_outcome, Measured(seconds))

    def micro_batch(self, number: int) -> None:
        assert self.running is not None
        step, rank = self.running
        world = self.owner.world
        if number > 0 and self.cancel:  # looked at before each micro-batch; the first was begun
            self.running, self.installed = None, None
            self.begin()
            return
        self.owner.receive(self.owner.on_outcome, MicroBatchDone(step, world.engine.now - self.begun_at))
        if number + 1 < world.job.micro_batches:
            self.begin_micro_batch(number + 1)
            return
        right = world.reference.gradient(self.parameters, step, rank)
        gradient = Cell(world.wrongs.gradient(self.owner, step, rank, right))
        world.checks.computed(self.owner, step, rank, self.begun_under)
        self.running = None
        self.undelivered.add((step, rank))
        work = replace(world.reference.work(step, rank), gradient_digest=digest_of(gradient.value))
        if world.job.guard.compares(step):
            work = replace(work, parameter_digests=tuple(map(digest_of, self.parameters)))
        outcome = Computed(step, rank, gradient, work)  # type: ignore[arg-type]
        self.owner.later(0.0001, self.deliver, outcome)
        self.begin()

    def deliver(self, outcome: Computed) -> None:
        self.undelivered.discard((outcome.step, outcome.rank))
        self.owner.receive(self.owner.on_outcome, outcome)


class SimSaver:
    """runtime/saving.py without the thread: one piece after another."""

    def __init__(self, owner: SimWorker) -> None:
        self.owner = owner
        self.free_at = 0.0
        self.newest: dict[int, int] = {}  # version by shard (-1: the weights)

    def save(self, version: int, shard: int, snapshot: tuple[Any, int]) -> None:
        self._write(version, shard, snapshot[1])

    def write_weights(self, version: int, flat: list[int]) -> None:
        self._write(version, -1, tuple(flat))

    def initialise(self) -> None:
        self._write(0, -2, None)

    def _write(self, version: int, shard: int, value: Any) -> None:
        engine = self.owner.world.engine
        self.newest[shard] = version
        self.free_at = max(engine.now, self.free_at) + engine.jitter(self.owner.world.profile.write_seconds)
        self.owner.later(self.free_at - engine.now, self._written, version, shard, value)

    def _written(self, version: int, shard: int, value: Any) -> None:
        if shard >= 0:
            self.owner.world.reached("write", self.owner)
        self.owner.call(self._durable, (version, shard, value))

    def _durable(self, version: int, shard: int, value: Any, told: bool = False) -> None:
        disk = self.owner.world.disk
        if shard >= -1 and self.owner.world.engine.now < disk.fails_until:
            given_up = self.newest[shard] > version
            if given_up or not told:
                delayed = Delayed(version, shard, disk.failure, given_up)
                self.owner.receive(self.owner.on_saved, delayed)
            if not given_up:
                self.owner.later(FIRST_RETRY_SECONDS, self._durable, version, shard, value, True)
            return
        if shard >= 0:
            saved = Saved(version, shard, disk.write_shard(version, shard, value))
        elif shard == -1:
            disk.weights = (version, value)
            saved = Saved(version, weights=True)
        else:
            disk.initialise(self.owner.world.reference.version(0).states)
            saved = Saved(0)
        self.owner.receive(self.owner.on_saved, saved)


class SimWorker:
    def __init__(self, world: World, agent: SimAgent, worker: WorkerId, slowness: float) -> None:
        self.world, self.agent, self.id, self.slowness = world, agent, worker, slowness
        self.alive = True
        self.stopped = False  # by a signal
        self.stopped_at = 0.0
        self.impaired = False  # something was done to it or its links, so to give it up is no mistake
        self.mute_until = 0.0  # its agent hears nothing of it before, and it nothing of its agent
        self.stubborn_until = 0.0  # no signal that its agent sends has effect before
        self.backlog: list[tuple[Any, tuple[Any, ...]]] = []
        self.marks: list[str] = []
        self.redial_due = False
        self.settling = False
        self.ahead = False  # the first of all to have certified its step
        self.up_last = 0.0  # when its last message reached the agent
        self.arithmetic = HashArithmetic(
            world.job.shards,
            world.load_state,
            world.noise if world.job.sdc else None,
            lambda shard, step, gradient, state: world.checks.applied(self, shard, step, gradient, state),
            lambda shard: world.checks.dropped(self, shard),
        )
        self.tx = WatchedTransaction(worker, world.job.facts(), self.arithmetic, world.judge)
        self.tx.sim = self
        self.mesh = SimMesh(world.network, self)
        self.compute = SimCompute(self)
        self.saver = SimSaver(self)
        self.driver = WatchedDriver(self.tx, self.arithmetic, self.mesh, self, self.compute, self.saver)  # type: ignore[arg-type]
        self.driver.sim = self

    def __repr__(self) -> str:
        return f"worker {self.id}"

    # --- what the driver takes for its agent's socket -----------------------------------------------------------

    closed = None

    def send(self, message: dict[str, Any]) -> None:
        if self.stopped:
            self.backlog.append((self.send, (message,)))
        else:
            self.world.cluster.from_worker(self, message)

    # --- being run ----------------------------------------------------------------------------------------------

    def later(self, seconds: float, call: Any, *arguments: Any) -> None:
        """A call of another thread of this process: not while it is stopped, never once it is dead."""
        self.world.engine.after(seconds, self.call, call, arguments)

    def call(self, call: Any, arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((self.call, (call, arguments)))
        else:
            call(*arguments)

    def receive(self, call: Any, *arguments: Any) -> None:
        """Something for the control thread."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((self.receive, (call, *arguments)))
            return
        CLOCK.ahead_seconds = self.agent.ahead_seconds
        try:
            call(*arguments)
        except Died:
            return
        except Violation:
            raise
        except Exception as error:  # the process's edge
            self.world.checks.raised(self, error)
            return
        if self.driver.links.redial and not self.redial_due:
            self.redial_due = True
            self.later(REDIAL_SECONDS * 1.01, self.redial)
        if not self.settling and self.tx.unsettled:
            self.settling = True
            self.later(self.world.settle_seconds(), self.settle)

    def redial(self) -> None:
        self.redial_due = False
        self.receive(self.driver.links.dial_again)

    def settle(self) -> None:
        self.settling = False
        self.receive(self._settle)

    def _settle(self) -> None:
        self.driver.do(self.tx.settle())

    def resume(self) -> None:
        """SIGCONT: everything that came meanwhile is there at once."""
        if self.stopped:
            self.world.watch.woke(self)
            self.stopped = False
            backlog, self.backlog = self.backlog, []
            for call, arguments in backlog:
                call(*arguments)

    # --- what comes in ------------------------------------------------------------------------------------------

    def frame(self, sender: WorkerId, frame: Frame) -> None:
        self.receive(self._frame, sender, frame)

    def _frame(self, sender: WorkerId, frame: Frame) -> None:
        if frame.kind is FrameKind.GRADIENT:
            self.at("gradient in flight")
        elif frame.kind is FrameKind.PARAMETERS and self.tx.certificate is None:
            self.world.reached("overtaken", self.world.workers[sender])
        elif frame.kind is FrameKind.SNAPSHOT:
            self.at("take")
            if self.put_off(self._frame, sender, frame):
                return
        if self.world.tracing:
            self.world.trace_frame(self, sender, frame)
        if frame.kind is not FrameKind.LOST and self.tx.admit(frame) < 0:
            self.world.watch.over(self, sender, frame.ballot)
        self.driver.on_link(Received(sender, frame))

    def on_link(self, event: LinkUp | LinkDown | ConnectFailed | Received) -> None:
        if self.world.tracing:
            self.world.trace(f"worker {self.id}: {event}")
        if isinstance(event, LinkDown) and self.driver.links.is_member(event.peer):
            self.world.watch.lost_link(self, event.peer)
        self.driver.on_link(event)

    def on_message(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "inject":  # what the driver does about it kills a process
            self.hit_by(message["fault"])
            return
        if kind in ("ask", "plan"):
            self.at(kind)
            if kind == "plan" and self.world.vocabulary.waiting and self.accepts(message["plan"]):
                self.at("first plan" if self.tx.plan is None else "next plan")
            if self.put_off(self.on_message, message):
                return
        if self.world.tracing:
            self.world.trace_message(self, message)
        before = self.tx.plan
        self.driver.on_message(message)
        if kind == "plan" and self.tx.plan is before:
            self.world.watch.refused(self, Ballot(*message["plan"]["ballot"]))
        if self.tx.plan is not before:
            self.world.watch.installed(self, self.tx.installed())
            self.world.checks.installed(self)
            if self.world.checks.refound and self.id not in self.world.checks.refound:
                self.at("refound")

    def hit_by(self, plain: dict[str, Any]) -> None:
        kind = FaultKind(plain["kind"])
        if kind is FaultKind.POISON:
            self.world.wrongs.poison(plain["what"], plain["step"])
            return
        during = None if plain["during"] is None else Point(plain["during"])
        target = {"ID": self.id, "NODE": self.agent.node}.get(FORMS[kind].number)
        plain = {name: value for name, value in plain.items() if name != "spared"}
        self.world.vocabulary.inject(Fault(**{**plain, "kind": kind, "during": during, "target": target}))

    def accepts(self, plan: Any) -> bool:
        return change.accepts(self.tx, plan_from_plain(plan))  # type: ignore[arg-type]

    def put_off(self, call: Any, *arguments: Any) -> bool:
        """Stopped right before it: this is done when it goes on."""
        if self.stopped:
            self.backlog.append((self.receive, (call, *arguments)))
        return self.stopped

    def on_outcome(self, outcome: Any) -> None:
        if isinstance(outcome, Computed):
            self.at("compute")
            if self.world.tracing:
                self.world.trace(f"worker {self.id} computed rank {outcome.rank} of step {outcome.step}")
        self.driver.on_outcome(outcome)

    def on_saved(self, saved: Saved | Delayed) -> None:
        self.driver.on_saved(saved)

    def moved_here(self) -> int | None:
        """A shard whose second backup it is, filled, so that the next plan may let another copy go."""
        if self.tx.plan is not None:
            for shard, where in enumerate(self.tx.plan.shards):
                holding = self.tx.holdings.get(shard)
                if len(where.backups) > 1 and self.id in where.fill and holding is not None and holding.complete:
                    return shard
        return None

    # --- dying --------------------------------------------------------------------------------------------------

    def at(self, point: str) -> None:
        """A protocol point: whatever is planned to happen here happens now."""
        if self.world.armed:
            self.world.reached(point, self)
            if not self.alive:
                raise Died

    def pass_marks(self) -> None:
        while self.marks:
            self.at(self.marks.pop(0))

    def micro_batch_seconds(self) -> float:
        return self.world.engine.jitter(self.world.profile.micro_batch_seconds * self.slowness)

    def kill(self) -> None:
        self.alive = False
        self.world.watch.died(self)
        self.backlog.clear()
        self.world.network.died(self)
