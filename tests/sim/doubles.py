"""Double faults: every fault at every point, and then every fault at every point once more, in the recovery from that.

A seed decides the pair, in turn, and all that chance has a say in: the job's shape, the moment, who is hit. The second
fault waits for its point from the moment on that the first has happened, or both wait from the same step on.
`thaw` and its like are no faults; whatever is frozen here goes on after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from elastic.faults import FORMS, Fault, FaultKind, Point
from tests.sim.job import Job, Profile
from tests.sim.vocabulary import Waiting
from tests.sim.world import Outcome, Setting, World

if TYPE_CHECKING:
    from tests.sim.worker import SimWorker

K = FaultKind
Case = tuple[FaultKind, Point | None]
THAWS = {K.THAW_WORKER, K.THAW_AGENT, K.THAW_NODE}
CASES: tuple[Case, ...] = tuple(
    (kind, point)
    for kind in FaultKind
    if kind not in THAWS
    for point in (None, *(p for p in Point if p in FORMS[kind].points))
)
PAIRS = tuple((first, second) for first in CASES for second in CASES)
STRIDE = 1009  # so that a few seeds are not all of one kind

CHANGE = {Point.PLAN, Point.HANDOVER, Point.JOIN}
BRINGS: dict[FaultKind, set[Point]] = {  # which of these follow from a fault by itself
    K.KILL_WORKER: CHANGE,
    K.KILL_AGENT: CHANGE,
    K.KILL_NODE: {Point.PLAN},
    K.KILL_CONTROLLER: {Point.PLAN},
    K.KILL_DRIVER: {Point.PLAN, Point.JOIN},
    K.ADD_NODE: CHANGE,
    K.STOP: {Point.PLAN},
}
MOST = {Point.PLAN: 3, Point.HANDOVER: 2, Point.JOIN: 1, Point.SAVE: 2}  # which time the point is reached; else
OFTEN = 8
STEPS, STEPS_TO_JOIN = 9, 14  # the latter where somebody has to join first
PATIENCE_SECONDS = 12.0  # for a point to be reached


def pair_of(seed: int) -> tuple[Case, Case]:
    return PAIRS[seed * STRIDE % len(PAIRS)]


def case_of(text: str) -> Case:
    kind, _, point = text.partition(",during=")
    return FaultKind(kind), Point(point) if point else None


def name_of(case: Case) -> str:
    kind, point = case
    return str(kind) if point is None else f"{kind} {point}"


class Double:
    """Both faults of one world, and whether each came to its point."""

    def __init__(self, world: World, pair: tuple[Case, Case]) -> None:
        self.world, self.random, self.pair = world, world.engine.random, pair
        self.together = self.random.random() < 0.3
        self.first_step = self.random.choice((1, 1, 2))
        self.waiting: dict[int, Waiting] = {}
        self.reached: dict[int, bool] = {}
        self.begun = False

    def progress(self, step: int) -> None:
        if not self.begun and step >= self.first_step:
            self.begun = True
            if self.pair[0][1] in CHANGE:
                self.world.effects.request("add-node")
            self.wait_for(0)
            if self.together:
                self.wait_for(1)
        if step >= self.world.job.steps - 5:
            self.overdue(0)
        if step >= self.world.job.steps - 2:
            self.overdue(1)

    def wait_for(self, number: int) -> None:
        kind, point = self.pair[number]
        if number == 1 and point in CHANGE and point not in BRINGS.get(self.pair[0][0], ()):
            self.world.effects.request("add-node")
        if point is None:
            self.reached[number] = True
            fault = self.aimed(self.drawn(kind, None))
        else:
            fault = self.drawn(kind, point)
        most = 1 if point is None else MOST.get(point, OFTEN)
        happened: Callable[[Fault, str], None] = lambda fault, hook: self.happened(number, hook)  # noqa: E731
        self.waiting[number] = self.world.vocabulary.inject(fault, self.random.randint(1, most), happened)
        self.world.engine.after(PATIENCE_SECONDS, self.overdue, number)

    def happened(self, number: int, hook: str) -> None:
        self.reached.setdefault(number, bool(hook))
        if number == 0 and not self.together:
            self.wait_for(1)
        if len(self.reached) == 2 and not any(w.fault.during for w in self.waiting.values() if self.is_waiting(w)):
            self.world.heal_later()

    def is_waiting(self, waiting: Waiting) -> bool:
        return any(waiting in known for known in self.world.vocabulary.waiting.values())

    def overdue(self, number: int) -> None:
        """Nobody comes to its point (any more): it happens without."""
        if number not in self.waiting or not self.is_waiting(self.waiting[number]):
            return
        waiting = self.waiting[number]
        self.world.vocabulary.give_up(waiting)
        self.reached[number] = False
        fault = self.aimed(replace(waiting.fault, during=None))
        self.waiting[number] = self.world.vocabulary.inject(fault, 1, waiting.then)

    # --- how --------------------------------------------------------------------------------------------------

    def drawn(self, kind: FaultKind, point: Point | None) -> Fault:
        """Without a target yet: it hits whoever comes to the point."""
        choice = self.random.choice
        options = FORMS[kind].options
        fault = Fault(kind, during=point)
        if "seconds" in options:
            fault = replace(fault, seconds=choice((0.02, 0.1, 0.5, 2.0, 6.0)))
        if kind is K.DELAY_WORKER:
            fault = replace(fault, seconds=choice((0.01, 0.1, 0.5)))
        if kind is K.CLOCK_JUMP:
            fault = replace(fault, seconds=choice((-3600.0, -1.0, 5.0, 3600.0)))
        if "factor" in options:
            fault = replace(fault, factor=choice((3.0, 20.0)))
        if "what" in options:
            fault = replace(fault, what=choice(FORMS[kind].whats))
        if "way" in options:
            fault = replace(fault, way=choice((None, None, "in", "out")))
        if "peer" in options and self.random.random() < 0.4 and (someone := self.somebody()) is not None:
            fault = replace(fault, peer=someone.id)
        return fault

    def aimed(self, fault: Fault) -> Fault:
        someone = self.somebody()
        if not FORMS[fault.kind].number or someone is None:
            return fault
        return replace(fault, target=someone.id if FORMS[fault.kind].number == "ID" else someone.agent.node)

    def somebody(self) -> SimWorker | None:
        living = [w for w in self.world.workers.values() if w.alive]
        members = [w for w in living if self.world.checks.standing(w)]
        return self.random.choice(members or living) if living else None


# --- the world of a seed ------------------------------------------------------------------------------------------


def draw_setting(seed: int, pair: tuple[Case, Case]) -> Setting:
    random = Random(seed)
    nodes, per_node = random.choice(((2, 2), (2, 2), (3, 2), (2, 3), (4, 1), (3, 1), (2, 1), (1, 3)))
    workers = nodes * per_node
    saves = any(point is Point.SAVE or kind in (K.KILL_DRIVER, K.DISK_FULL, K.STORE_DOWN) for kind, point in pair)
    joins = any(point in CHANGE for _, point in pair)
    steps = STEPS_TO_JOIN if joins else STEPS
    judges = any(kind in (K.CORRUPT_WORKER, K.POISON) for kind, _ in pair)  # attempts, which noise makes all differ
    sdc = not saves and not judges and random.random() < 0.2
    job = Job(
        nodes=nodes,
        workers_per_node=per_node,
        standbys=random.choice((0, 0, 0, 1)),
        min_workers=1,
        logical_ranks=workers + per_node + random.randint(0, 2),  # so that who comes is wanted
        shards=random.choice((2, 3, 4)),
        steps=steps,
        micro_batches=random.choice((1, 2)),
        save_every=0 if sdc else random.choice((2, 3)),
        keep=random.choice((1, 2)),
        sdc=sdc,
        skips=frozenset(s for s in range(steps) if random.random() < 0.04),
        faults=(),
    )
    slow = random.choice((0.0005, 0.002, 0.01))
    profile = Profile(
        micro_batch_seconds=random.choice((0.1, 0.2) if joins else (0.02, 0.04)),  # so that they join in time
        link_seconds=(random.choice((0.01, 0.1, 1.0)) * slow, slow),
        lazy_senders=frozenset(w for w in range(8) if random.random() < 0.1),
        laziness=random.choice((5.0, 30.0)),
        control_seconds=random.choice((0.001, 0.005, 0.02)),
        settle_seconds=random.choice((0.0005, 0.01, 0.1)),
        write_seconds=random.choice((0.005, 0.05)),
        boot_seconds=random.choice((0.05, 0.2)),
        restart_seconds=random.choice((0.1, 0.5)),
        notice_seconds=random.choice((0.01, 0.1)),
        exit_seconds=random.choice((0.001, 0.01, 0.1)),
    )
    return Setting(job, profile, script=lambda world: Double(world, pair))


def double_world(seed: int, tracing: bool = False, pair: tuple[Case, Case] | None = None) -> World:
    return World(seed, tracing, draw_setting(seed, pair or pair_of(seed)))


def coverage(outcomes: list[Outcome]) -> tuple[dict[tuple[Case, Case], int], dict[Case, tuple[int, int]]]:
    """How often each pair came about as it is written; and each fault: (how often drawn, how often at its point)."""
    pairs = dict.fromkeys(PAIRS, 0)
    single = dict.fromkeys(CASES, (0, 0))
    for outcome in outcomes:
        pair = pair_of(outcome.seed)
        pairs[pair] += outcome.reached == (True, True)
        for case, reached in zip(pair, outcome.reached, strict=False):
            drawn, came = single[case]
            single[case] = (drawn + 1, came + reached)
    return pairs, single
