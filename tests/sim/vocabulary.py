"""The simulator's interpreter of the vocabulary of faults (elastic/faults.py); elastic/injection.py is the processes'.

A schedule, the same entries as a job file's `faults`, is played in a simulated world: each entry is due when the job
first enters its step, and then happens at once, or waits for its target to come to the point that `during` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic.faults import FORMS, Fault, FaultKind, Point, parse_fault
from elastic.injection import FaultEntry
from runtime.injected import STORE_FAILURES
from tests.sim import preemption

if TYPE_CHECKING:
    from tests.sim.cluster import SimAgent
    from tests.sim.worker import SimWorker
    from tests.sim.world import World

K = FaultKind
HOOKS: dict[Point, tuple[str, ...]] = {  # where the simulator's workers pass by, right before they do it
    Point.REDUCE: ("contributed",),
    Point.VOTE: ("vote",),
    Point.PUBLISH: ("publish",),
    Point.PLAN: ("first plan", "next plan"),
    Point.HANDOVER: ("fill", "take"),
    Point.JOIN: ("first plan",),
    Point.SAVE: ("write",),
}
CONTROLLER_HOOKS: dict[Point, tuple[str, ...]] = {Point.PLAN: ("plan sent",), Point.SAVE: ("save",)}
BY_CONTROLLER = {K.ADD_NODE, K.STOP}  # nobody else can do it


@dataclass(eq=False)
class Waiting:
    """A fault that is due and waits for its point. Without a target: for whoever comes to it first, and hits that."""

    fault: Fault
    count: int = 1  # which time
    then: Callable[[Fault, str], None] | None = None  # called with what has happened, and at which hook

    def is_for(self, worker: SimWorker | None) -> bool:
        if of_controller(self.fault.kind) or worker is None:
            return worker is None and of_controller(self.fault.kind)
        return self.fault.target in (None, number_of(self.fault.kind, worker))


def of_controller(kind: FaultKind) -> bool:
    return not FORMS[kind].number


def number_of(kind: FaultKind, worker: SimWorker) -> int:
    return worker.id if FORMS[kind].number == "ID" else worker.agent.node


def hooks(fault: Fault) -> tuple[str, ...]:
    assert fault.during is not None
    return (CONTROLLER_HOOKS if of_controller(fault.kind) else HOOKS)[fault.during]


class Vocabulary:
    def __init__(self, world: World, schedule: Iterable[FaultEntry]) -> None:
        self.world = world
        self.due = sorted(((entry.at_step, parse_fault(entry.fault)) for entry in schedule), key=lambda due: due[0])
        for step, fault in [*self.due, *((entry.at_step, parse_fault(entry.fault)) for entry in world.job.faults)]:
            if fault.kind is K.POISON:  # everybody knows it from the start
                world.wrongs.poison(fault.what, step)
        self.waiting: dict[str, list[Waiting]] = {}
        self.happened: list[tuple[Fault, str]] = []  # and at which hook

    # --- when -------------------------------------------------------------------------------------------------

    def progress(self, step: int) -> None:
        """The job has entered this step for the first time."""
        while self.due and self.due[0][0] <= step:
            fault = self.due.pop(0)[1]
            if fault.kind is K.POISON:
                self.happened.append((fault, ""))
            else:
                self.inject(fault)

    def inject(self, fault: Fault, count: int = 1, then: Callable[[Fault, str], None] | None = None) -> Waiting:
        waiting = Waiting(fault, count, then)
        if fault.during is None:
            self.world.engine.after(0.0, self.happen, waiting, "", None)  # whoever told of the step finishes first
        else:
            for hook in hooks(fault):
                self.waiting.setdefault(hook, []).append(waiting)
            self.world.look_who_waits()
        return waiting

    def give_up(self, waiting: Waiting) -> None:
        """It waits no longer."""
        for hook in [h for h, known in self.waiting.items() if waiting in known]:
            self.waiting[hook].remove(waiting)
            if not self.waiting[hook]:
                del self.waiting[hook]
        self.world.look_who_waits()

    def reached(self, hook: str, worker: SimWorker | None) -> None:
        for waiting in [w for w in self.waiting.get(hook, ()) if w.is_for(worker)]:
            waiting.count -= 1
            if waiting.count <= 0:
                self.give_up(waiting)
                self.happen(waiting, hook, worker)

    def happen(self, waiting: Waiting, hook: str, worker: SimWorker | None) -> None:
        fault = waiting.fault
        if fault.target is None and worker is not None and FORMS[fault.kind].number:
            fault = replace(fault, target=number_of(fault.kind, worker))
        self.happened.append((fault, hook))
        self.world.trace(f"*** {fault}" + (f" ({hook})" if hook else ""))
        self.world.watch.fault(fault, worker)
        self.perform(fault)
        if waiting.then is not None:
            waiting.then(fault, hook)

    # --- what -------------------------------------------------------------------------------------------------

    def perform(self, fault: Fault) -> None:
        """One whose target is gone does nothing."""
        match FORMS[fault.kind].number:
            case "ID":
                worker = self.world.workers.get(-1 if fault.target is None else fault.target)
                if worker is not None and worker.alive:
                    self.on_worker(fault, worker)
            case "NODE":
                for agent in self.world.cluster.every_agent():
                    if agent.alive and fault.target == agent.node >= 0:
                        self.on_node(fault, agent)
            case _:
                self.on_job(fault)

    def on_worker(self, fault: Fault, worker: SimWorker) -> None:
        effects = self.world.effects
        match fault.kind:
            case K.KILL_WORKER:
                effects.kill_worker(worker)
            case K.FREEZE_WORKER:
                effects.freeze_worker(worker, fault.seconds)
            case K.THAW_WORKER:
                worker.resume()
            case K.SLOW_WORKER:
                effects.slow_worker(worker, fault.factor or 1.0, fault.seconds)
            case K.PARTITION_WORKER:
                effects.partition_worker(worker, fault.peer, fault.way, fault.seconds)
            case K.DELAY_WORKER:
                effects.delay_worker(worker, fault.peer, fault.seconds or 0.0)
            case K.CORRUPT_WORKER if fault.what == "link":
                effects.damage_frame(worker)
            case K.CORRUPT_WORKER:
                self.world.wrongs.corrupt(worker, fault.what)

    def on_node(self, fault: Fault, agent: SimAgent) -> None:
        effects = self.world.effects
        match fault.kind:
            case K.KILL_AGENT:
                effects.kill_agent(agent)
            case K.KILL_NODE:
                effects.kill_node(agent)
            case K.FREEZE_AGENT:
                effects.freeze_agent(agent, fault.seconds)
            case K.FREEZE_NODE:
                effects.freeze_node(agent, fault.seconds)
            case K.THAW_AGENT:
                agent.resume()
            case K.THAW_NODE:
                effects.thaw_node(agent)
            case K.SLOW_NODE:
                for worker in agent.living():
                    effects.slow_worker(worker, fault.factor or 1.0, fault.seconds)
            case K.PARTITION_NODE:
                effects.partition_node(agent, fault.way, fault.seconds)
            case K.PREEMPT_NODE:
                preemption.notice(self.world.cluster, agent, fault.seconds or 0.0)
            case K.CLOCK_JUMP:
                effects.clock_jump(agent, fault.seconds or 0.0)

    def on_job(self, fault: Fault) -> None:
        effects = self.world.effects
        match fault.kind:
            case K.KILL_CONTROLLER:
                effects.kill_controller()
            case K.KILL_DRIVER:
                effects.kill_driver()
            case K.FREEZE_CONTROLLER:
                effects.freeze_controller(fault.seconds)
            case K.DISK_FULL | K.STORE_DOWN:
                effects.fail_store(fault.seconds or 0.0, STORE_FAILURES[str(fault.kind)])
            case K.POISON:
                self.world.wrongs.poison(fault.what)
            case kind if kind in BY_CONTROLLER:
                effects.request(str(fault))
