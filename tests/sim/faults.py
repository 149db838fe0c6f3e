"""What goes wrong, and when: each fault waits for its occurrence of a protocol point, and happens right there.

armed      from the start, from a step on, or (chained) as soon as the fault before it has happened, so that it
           hits the recovery from that
happens    at the n-th time that its point is reached from then on, or when the job has come to ``latest``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic import messages as m

if TYPE_CHECKING:
    from tests.sim.cluster import SimAgent
    from tests.sim.worker import SimWorker
    from tests.sim.world import World

STEP_POINTS = (
    "compute",
    "contributed",
    "reduced",
    "gradient in flight",
    "vote",
    "certified",
    "publish",
    "install",
    "save",
    "gate",
)
CHANGE_POINTS = ("ask sent", "ask", "report", "plan sent", "plan", "fill", "join", "lost")
KINDS = {
    "kill-worker": 30,
    "kill-node": 6,
    "kill-agent": 5,
    "kill-controller": 12,
    "add-node": 5,
    "freeze-worker": 8,
    "slow-link": 5,
    "slow-worker": 4,
    "cut-link": 10,
    "isolate-worker": 6,
    "hold-node": 4,
    "split-node": 5,
    "desert-node": 8,
}
PER_STEP = {"compute": 5, "contributed": 15, "reduced": 4, "gradient in flight": 4, "vote": 14, "certified": 5}
PER_STEP |= {"publish": 14, "install": 5}


@dataclass
class Fault:
    kind: str
    point: str
    count: int
    earliest: int
    latest: int
    chained: bool
    here: bool  # hits whoever reached the point; else somebody by chance


class Faults:
    def __init__(self, world: World) -> None:
        self.world, self.random = world, world.engine.random
        self.planned = self.draw()
        self.waiting: dict[str, list[Fault]] = {}
        self.armed = False
        self.happened: list[tuple[str, str]] = []
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.points: Counter[str] = Counter()

    def draw(self) -> list[Fault]:
        random, steps = self.random, self.world.job.steps
        number = random.choice((3, 3, 4, 5, 6))
        kinds = random.choices(list(KINDS), list(KINDS.values()), k=number)
        latest = sorted(random.randrange(1, steps) for _ in range(number))
        faults = []
        for index, kind in enumerate(kinds):
            chained = index > 0 and random.random() < 0.5
            if chained and random.random() < 0.65:
                point, count = random.choice(CHANGE_POINTS), random.randint(1, 6)
            else:
                point = random.choice(STEP_POINTS)
                count = 1 + random.randrange(2 * PER_STEP.get(point, 3))
            earliest = max(0, latest[index] - 3) if index or random.random() < 0.9 else -1
            faults.append(Fault(kind, point, count, earliest, latest[index], chained, random.random() < 0.6))
        return faults

    # --- waiting for the moment ---------------------------------------------------------------------------------

    def progress(self, step: int) -> None:
        """The job has entered this step for the first time."""
        self.arm(step)
        for fault in [f for waiting in self.waiting.values() for f in waiting if f.latest <= step]:
            self.happen(fault, "install", None)

    def arm(self, step: int) -> None:
        while self.planned and not self.planned[0].chained and self.planned[0].earliest <= step:
            self.wait_for(self.planned.pop(0))
        self.armed = bool(self.waiting)

    def wait_for(self, fault: Fault) -> None:
        self.waiting.setdefault(fault.point, []).append(fault)
        self.armed = True

    def reached(self, point: str, worker: SimWorker | None) -> None:
        waiting = self.waiting.get(point)
        if not waiting:
            return
        for fault in list(waiting):
            fault.count -= 1
            if fault.count <= 0:
                self.happen(fault, point, worker)

    def happen(self, fault: Fault, point: str, worker: SimWorker | None) -> None:
        waiting = self.waiting[fault.point]
        waiting.remove(fault)
        if not waiting:
            del self.waiting[fault.point]
        self.coverage[point, fault.kind] += 1
        self.happened.append((point, fault.kind))
        target = worker if fault.here and worker is not None and worker.alive else self.somebody()
        self.world.trace(f"*** {fault.kind} at {point}, target {target}")
        if target is not None:
            getattr(self, fault.kind.replace("-", "_"))(target)
        while self.planned and self.planned[0].chained:
            self.wait_for(self.planned.pop(0))
            break
        self.arm(self.world.checks.max_step)
        if not self.planned and not self.waiting:
            self.world.heal_later()

    def somebody(self) -> SimWorker | None:
        checks = self.world.checks
        members = [w for w in self.world.workers.values() if w.alive and checks.standing(w)]
        others = [w for w in self.world.workers.values() if w.alive]
        return self.random.choice(members or others) if members or others else None

    # --- the faults ---------------------------------------------------------------------------------------------

    def by_request(self, text: str) -> bool:
        """Now and then through the command line, so that the controller does it itself."""
        return self.random.random() < 0.2 and self.world.request(text)

    def kill_worker(self, target: SimWorker) -> None:
        if not self.by_request(f"kill-worker={target.id}"):
            self.world.cluster.worker_dies(target, "kill-worker")

    def kill_node(self, target: SimWorker) -> None:
        """The node is gone; the shell asks for another in its place."""
        self.world.cluster.lose_agent(target.agent, again=False, gone_for_good=False)

    def kill_agent(self, target: SimWorker) -> None:
        self.world.cluster.lose_agent(target.agent, again=True, gone_for_good=False)

    def kill_controller(self, target: SimWorker) -> None:
        if not self.by_request("kill-controller"):
            self.world.cluster.kill_controller()

    def add_node(self, target: SimWorker) -> None:
        self.world.request("add-node")

    def freeze_worker(self, target: SimWorker) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        target.stopped = True
        seconds = self.random.choice((0.05, 0.3, 1.0, 4.0, 20.0))
        self.world.engine.after(self.world.engine.jitter(seconds), target.resume)

    def slow_link(self, target: SimWorker) -> None:
        slow = self.world.network.slow
        for other in self.others(target):
            if self.random.random() < 0.5:
                factor = self.random.choice((10.0, 100.0))
                slow[target.id, other.id] = factor
                if self.random.random() < 0.5:
                    slow[other.id, target.id] = factor

    def slow_worker(self, target: SimWorker) -> None:
        target.slowness *= self.random.choice((5.0, 20.0))

    def cut_link(self, target: SimWorker) -> None:
        others = self.others(target)
        if others:
            self.cut(target, [self.random.choice(others)], self.random.choice((0.0, 0.3, 2.0)))

    def isolate_worker(self, target: SimWorker) -> None:
        self.cut(target, self.others(target), self.random.choice((0.0, 1.0, 3.0)))
        if self.random.random() < 0.5:
            self.hold_control(target.agent, self.random.choice((0.2, 2.0)))

    def cut(self, target: SimWorker, others: Iterable[SimWorker], blocked_seconds: float) -> None:
        network = self.world.network
        for other in others:
            network.cut(target, other)
            if blocked_seconds:
                pair = frozenset((target.id, other.id))
                network.blocked.add(pair)
                self.world.engine.after(self.world.engine.jitter(blocked_seconds), network.blocked.discard, pair)

    def hold_node(self, target: SimWorker) -> None:
        """The node is cut off, but not for long enough that anyone takes its links for broken."""
        until = self.world.engine.now + self.random.choice((0.1, 0.5, 3.0))
        for worker in target.agent.living():
            for other in self.world.workers.values():
                if other.agent is not target.agent:
                    self.world.network.held[frozenset((worker.id, other.id))] = until
        target.agent.held_until = until

    def split_node(self, target: SimWorker) -> None:
        """The net splits; the controller's side goes on without this node, whose workers go on by themselves."""
        seconds = self.random.choice((0.5, 2.0, 6.0))
        for worker in target.agent.living():
            self.cut(worker, [w for w in self.others(worker) if w.agent is not target.agent], seconds)
        target.agent.held_until = self.world.engine.now + seconds
        notice = self.world.engine.jitter(self.world.profile.notice_seconds)
        self.world.engine.after(notice, self.world.cluster.desert, target.agent)

    def desert_node(self, target: SimWorker) -> None:
        """The shell takes the agent for dead; the workers and their links know nothing of it."""
        if self.random.random() < 0.5:
            self.hold_control(target.agent, self.random.choice((0.2, 2.0)))
        self.world.cluster.desert(target.agent)

    def hold_control(self, agent: SimAgent, seconds: float) -> None:
        agent.held_until = self.world.engine.now + seconds

    def others(self, target: SimWorker) -> list[SimWorker]:
        return [w for w in self.world.workers.values() if w.alive and w is not target]


__all__ = ["CHANGE_POINTS", "KINDS", "STEP_POINTS", "Faults", "m"]
