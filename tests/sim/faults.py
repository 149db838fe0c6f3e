"""What goes wrong, and when: each fault waits for its occurrence of a protocol point, and happens right there.

armed      from the start, from a step on, or (chained) as soon as the fault before it has happened, so that it
           hits the recovery from that
happens    at the n-th time that its point is reached from then on, or when the job has come to ``latest``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from elastic import messages as m
from tests.sim import preemption

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
CHANGE_POINTS = ("ask sent", "ask", "report", "plan sent", "plan", "fill", "filled", "moved", "refound", "join", "lost")
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
    "isolate-worker": 4,
    "evict-worker": 4,
    "favour-worker": 3,
    "kill-holder": 4,
    "lose-worker": 4,
    "hold-node": 4,
    "split-node": 5,
    "desert-node": 8,
}
DISRUPTIVE = set(KINDS) - {"add-node", "freeze-worker", "slow-link", "slow-worker", "favour-worker", "hold-node"}
PER_STEP = {"compute": 5, "contributed": 15, "reduced": 4, "gradient in flight": 4, "vote": 14, "certified": 5}
PER_STEP |= {"publish": 14, "install": 5}

# Chains that random faults rarely make, each as (kinds, points, most occurrences, hits whoever is there).
Link = tuple[tuple[str, ...], tuple[str, ...], int, bool]
MOTIFS: tuple[tuple[Link, ...], ...] = (
    # whoever knows more than the rest is cut off, and the next controller finds it again
    (
        (("favour-worker",), ("contributed", "reduced", "vote"), 8, True),
        (("evict-worker",), ("ahead",), 8, True),
        (("kill-controller",), ("plan sent", "plan", "plan", "ask", "report"), 8, True),
        (("kill-worker", "cut-link", "kill-controller"), ("ask", "report", "plan sent", "plan"), 8, False),
    ),
    (
        (("evict-worker", "evict-worker", "split-node", "desert-node"), ("ahead", "certified"), 8, True),
        (("kill-controller",), ("plan sent", "plan", "plan", "ask", "report"), 8, True),
        (("kill-worker", "cut-link"), ("ask", "report", "plan sent", "plan"), 8, False),
    ),
    (
        (("favour-worker",), ("contributed", "reduced", "vote"), 8, True),
        (("evict-worker",), ("ahead", "overtaken"), 6, True),
        (("kill-controller",), ("plan", "plan sent"), 3, True),
        (("kill-controller",), ("refound",), 3, False),
    ),
    (
        (("evict-worker",), ("ahead", "ahead", "certified"), 8, True),
        (("kill-controller",), ("plan", "plan", "plan sent"), 4, True),
        (("kill-controller", "kill-controller", "cut-link"), ("refound",), 3, False),
    ),
    # a publisher is lost in mid-sentence
    (
        (("favour-worker",), ("contributed", "reduced", "vote"), 8, True),
        (("kill-worker", "kill-worker", "evict-worker"), ("ahead", "overtaken", "overtaken"), 8, True),
    ),
    ((("kill-worker", "kill-worker", "evict-worker"), ("ahead", "overtaken"), 10, True),) * 2,
    ((("kill-worker", "isolate-worker"), ("certified", "publish", "vote", "reduced"), 12, True),) * 2,
    # a controller dies in mid-sentence, twice
    (
        (("kill-worker", "cut-link", "kill-controller"), ("vote", "publish", "reduced", "certified"), 12, True),
        (("kill-controller",), ("ask sent", "ask", "report", "plan sent", "plan"), 8, False),
        (("kill-controller", "kill-worker"), ("ask sent", "ask", "report", "plan sent", "plan"), 8, True),
    ),
    # two controllers plan at once, and not the same
    (
        (("kill-worker", "cut-link", "add-node"), ("vote", "publish", "install", "compute"), 12, False),
        (("kill-controller",), ("report", "report", "ask"), 8, False),
        (("kill-worker",), ("ask", "report", "plan", "plan"), 6, True),
    ),
    # a copy has just been retired when somebody is ahead
    (
        (("kill-worker", "add-node", "kill-agent"), ("install", "contributed"), 8, True),
        (("favour-worker",), ("moved",), 2, False),
        (("kill-holder", "kill-holder", "kill-controller"), ("ahead", "overtaken"), 6, False),
    ),
    # a copy moves to who has joined, and its holders die around that
    (
        (("kill-worker", "add-node", "kill-agent"), ("install", "contributed"), 8, True),
        (("kill-worker", "kill-worker", "freeze-worker"), ("fill", "filled", "report"), 8, True),
        (("kill-worker",), ("ask", "report", "plan sent", "plan", "filled"), 8, True),
        (("kill-worker",), ("plan", "install", "report"), 8, True),
    ),
    (
        (("kill-worker", "add-node"), ("install",), 8, True),
        (("lose-worker",), ("moved",), 1, True),
        (("kill-holder",), ("plan", "install"), 8, False),
    ),
    # everything is lost, and the rollback is disturbed
    (
        (("kill-node", "kill-worker"), ("reduced", "vote", "fill"), 8, True),
        (("kill-worker", "kill-node"), ("ask", "report", "plan"), 4, False),
        (("kill-worker", "kill-node", "cut-link", "kill-controller"), ("plan", "install"), 6, False),
    ),
)


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
        self.planned += preemption.planned(world.seed, world.job.steps)
        self.waiting: dict[str, list[Fault]] = {}
        self.armed = False
        self.happened: list[tuple[str, str]] = []
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.weak: int | None = None  # the shard whose holders are hit by preference

    def draw(self) -> list[Fault]:
        """By chance; in most seeds part of it is a motif. All are to happen before the job's end."""
        random, job = self.random, self.world.job
        number = random.choice((3, 3, 4, 5, 6))
        end = min([job.steps, *(entry.at_step for entry in job.faults if entry.fault == "stop")])
        latest = sorted(random.randrange(1, max(2, end - 3)) for _ in range(number))
        faults: list[Fault] = []
        for index in range(number):
            faults.append(self.draw_one(latest[index], faults[-1] if faults else None))
        if random.random() < 0.6:
            at = random.randrange(2)
            motif = [
                Fault(random.choice(kinds), random.choice(points), random.randint(1, most), 0, 0, True, here)
                for kinds, points, most, here in random.choice(MOTIFS)
            ]
            motif[0].earliest, motif[0].latest = faults[at].earliest, faults[at].latest
            motif[0].chained = at > 0 and random.random() < 0.3
            faults[at : at + len(motif)] = motif
        for before, fault in pairwise(faults):  # each has a step for its point to be reached
            fault.latest = min(end - 1, max(fault.latest, before.latest + 1))
        return faults

    def draw_one(self, latest: int, before: Fault | None) -> Fault:
        random, job = self.random, self.world.job
        (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        chained = before is not None and random.random() < 0.5
        if chained and before is not None and before.kind in DISRUPTIVE and random.random() < 0.7:
            point, count = random.choice(CHANGE_POINTS), random.randint(1, 6)
        else:
            lacking = {"save": job.save_every == 0, "gate": not any(entry.wait for entry in job.faults)}
            point = random.choice([p for p in STEP_POINTS if not lacking.get(p, False)])
            count = 1 + random.randrange(2 * PER_STEP.get(point, 3))
        earliest = max(0, latest - 3) if before is not None or random.random() < 0.9 else -1
        return Fault(kind, point, count, earliest, latest, chained, random.random() < 0.6)

    # --- waiting for the moment ---------------------------------------------------------------------------------

    def progress(self, step: int) -> None:
        """The job has entered this step for the first time."""
        self.arm(step)
        last = step >= self.world.job.steps - 1
        while late := [f for waiting in self.waiting.values() for f in waiting if f.latest <= step]:
            self.happen(late[0], "late", None)
            if not last:
                break

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
        if point == "moved" and worker is not None:
            self.weak = worker.moved_here()
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
        """A living member by chance; rather often one that holds a shard that is moving."""
        living = [w for w in self.world.workers.values() if w.alive]
        members = [w for w in living if self.world.checks.standing(w)]
        if self.random.random() < 0.3 and (holders := self.holders()):
            return self.random.choice(holders)
        return self.random.choice(members or living) if living else None

    def holders(self) -> list[SimWorker]:
        """Living holders of one shard: the same as last time, or one that is moving."""
        plan = self.world.checks.newest
        if plan is None:
            return []
        if self.weak is None or self.random.random() < 0.2:
            moving = [s for s, where in enumerate(plan.shards) if where.fill or len(where.backups) > 1]
            self.weak = self.random.choice(moving or range(self.world.job.shards))
        where = plan.shards[self.weak]
        found = [self.world.workers[w] for w in (where.owner, *where.backups)]
        return [w for w in found if w.alive]

    # --- the faults ---------------------------------------------------------------------------------------------

    def preempt_node(self, target: SimWorker) -> None:
        preemption.happen(self.world, target)

    def by_request(self, text: str) -> bool:
        """Now and then through the command line, so that the controller does it itself."""
        return self.random.random() < 0.2 and self.world.request(text)

    def kill_worker(self, target: SimWorker) -> None:
        if not self.by_request(f"kill-worker={target.id}"):
            self.world.cluster.worker_dies(target, "kill-worker")

    def kill_holder(self, target: SimWorker) -> None:
        holders = self.holders()
        self.world.cluster.worker_dies(self.random.choice(holders) if holders else target, "kill-holder")

    def lose_worker(self, target: SimWorker) -> None:
        """It dies, and its agent is slow to see it."""
        self.world.cluster.worker_dies(target, "lose-worker", self.random.choice((0.5, 1.5, 4.0)))

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
        """SIGSTOP, and SIGCONT some time later; perhaps in a state in which it can't be killed either."""
        target.stopped = target.impaired = True
        self.perhaps_stubborn(target)
        seconds = self.random.choice((0.05, 0.3, 1.0, 4.0, 20.0))
        self.world.engine.after(self.world.engine.jitter(seconds), target.resume)

    def perhaps_stubborn(self, target: SimWorker) -> None:
        """A signal to it takes effect only after a while."""
        if self.random.random() < 0.5:
            target.stubborn_until = self.world.engine.now + self.random.choice((0.5, 3.0, 10.0))

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
        self.perhaps_stubborn(target)
        if self.random.random() < 0.5:
            self.hold_control(target.agent, self.random.choice((0.2, 2.0)))

    def evict_worker(self, target: SimWorker) -> None:
        """It loses its links, can't say so, and survives being killed for a while."""
        target.stubborn_until = self.world.engine.now + self.random.choice((1.0, 4.0, 10.0))
        target.mute_until = self.world.engine.now + self.random.choice((0.3, 0.5, 1.0, 2.0))
        self.cut(target, self.others(target), self.random.choice((0.0, 1.0)))

    def favour_worker(self, target: SimWorker) -> None:
        """Everything between the others takes its time, so that this one is ahead."""
        network = self.world.network
        seconds = self.random.choice((0.2, 0.6, 1.5))
        others = self.others(target)
        for sender in others:
            for receiver in others:
                if sender is not receiver:
                    base = network.base(sender, receiver)
                    network.slow[sender.id, receiver.id] = max(1.0, self.world.engine.jitter(seconds) / base)
        self.world.engine.after(self.world.engine.jitter(3.0), network.slow.clear)

    def cut(self, target: SimWorker, others: Iterable[SimWorker], blocked_seconds: float) -> None:
        network = self.world.network
        for other in others:
            target.impaired = other.impaired = True
            network.cut(target, other)
            if blocked_seconds:
                pair = frozenset((target.id, other.id))
                network.blocked.add(pair)
                self.world.engine.after(self.world.engine.jitter(blocked_seconds), network.blocked.discard, pair)

    def hold_node(self, target: SimWorker) -> None:
        """The node is cut off, but not for long enough that anyone takes its links for broken."""
        until = self.world.engine.now + self.random.choice((0.1, 0.5, 3.0))
        self.impair(target.agent)
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

    def impair(self, agent: SimAgent) -> None:
        for worker in agent.living():
            worker.impaired = True

    def hold_control(self, agent: SimAgent, seconds: float) -> None:
        self.impair(agent)
        agent.held_until = self.world.engine.now + seconds

    def others(self, target: SimWorker) -> list[SimWorker]:
        return [w for w in self.world.workers.values() if w.alive and w is not target]


__all__ = ["CHANGE_POINTS", "KINDS", "STEP_POINTS", "Faults", "m"]
