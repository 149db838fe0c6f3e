"""What goes wrong, and when: each fault waits for its occurrence of a protocol point, and happens right there.

armed      from the start, from a step on, or (chained) as soon as the fault before it has happened, so that it
           hits the recovery from that
happens    at the n-th time that its point is reached from then on, or when the job has come to ``latest``
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.sim import preemption
from tests.sim.mishaps import DISRUPTIVE, KINDS, Mishaps

if TYPE_CHECKING:
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
        (("lose-node", "kill-worker"), ("reduced", "vote", "fill"), 8, True),
        (("kill-worker", "lose-node"), ("ask", "report", "plan"), 4, False),
        (("kill-worker", "lose-node", "cut-link", "kill-controller"), ("plan", "install"), 6, False),
    ),
)


@dataclass
class Chance:
    kind: str
    point: str
    count: int
    earliest: int
    latest: int
    chained: bool
    here: bool  # hits whoever reached the point; else somebody by chance


class Faults:
    def __init__(self, world: World, drawn: bool) -> None:
        self.world, self.random = world, world.engine.random
        self.mishaps = Mishaps(world, self.holders)
        self.planned = self.draw() + preemption.planned(world.seed, world.job.steps) if drawn else []
        self.waiting: dict[str, list[Chance]] = {}
        self.happened: list[tuple[str, str]] = []
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.weak: int | None = None  # the shard whose holders are hit by preference

    def draw(self) -> list[Chance]:
        """By chance; in most seeds part of it is a motif. All are to happen before the job's end."""
        random, job = self.random, self.world.job
        number = random.choice((3, 3, 4, 5, 6))
        end = min([job.steps, *(entry.at_step for entry in job.faults if entry.fault == "stop")])
        latest = sorted(random.randrange(1, max(2, end - 3)) for _ in range(number))
        faults: list[Chance] = []
        for index in range(number):
            faults.append(self.draw_one(latest[index], faults[-1] if faults else None))
        if random.random() < 0.6:
            at = random.randrange(2)
            motif = [
                Chance(random.choice(kinds), random.choice(points), random.randint(1, most), 0, 0, True, here)
                for kinds, points, most, here in random.choice(MOTIFS)
            ]
            motif[0].earliest, motif[0].latest = faults[at].earliest, faults[at].latest
            motif[0].chained = at > 0 and random.random() < 0.3
            faults[at : at + len(motif)] = motif
        for before, fault in pairwise(faults):  # each has a step for its point to be reached
            fault.latest = min(end - 1, max(fault.latest, before.latest + 1))
        return faults

    def draw_one(self, latest: int, before: Chance | None) -> Chance:
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
        return Chance(kind, point, count, earliest, latest, chained, random.random() < 0.6)

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
        self.world.look_who_waits()

    def wait_for(self, fault: Chance) -> None:
        self.waiting.setdefault(fault.point, []).append(fault)
        self.world.look_who_waits()

    def reached(self, point: str, worker: SimWorker | None) -> None:
        waiting = self.waiting.get(point)
        if not waiting:
            return
        for fault in list(waiting):
            fault.count -= 1
            if fault.count <= 0:
                self.happen(fault, point, worker)

    def happen(self, fault: Chance, point: str, worker: SimWorker | None) -> None:
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
            self.mishaps.happen(fault.kind, target)
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


__all__ = ["CHANGE_POINTS", "KINDS", "STEP_POINTS", "Chance", "Faults"]
