"""What is computed wrongly: by a worker, one gradient, as often as it is asked for it, or with parameters that aren't
those that were published, once; or by all alike, from a batch that is poisoned.

The former apart from the other faults, and by a chance of its own: whoever comes to the chosen work first is hit. Only
where gradients are the same at every attempt, for else nothing can be found out. Or as the vocabulary says.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dataloader.errors import CorruptionError
from elastic.injection import POISON_AHEAD
from tests.sim.values import wrong

if TYPE_CHECKING:
    from runtime.protocol import WorkerId
    from tests.sim.worker import SimWorker
    from tests.sim.world import World


class Wrongs:
    def __init__(self, world: World, drawn: bool) -> None:
        self.world = world
        chance, job = Random(f"{world.seed}/wrong"), world.job
        steps = range(job.steps)
        self.rank_due = (chance.choice(steps), chance.randrange(job.logical_ranks)) if chance.random() < 0.4 else None
        self.parameters_due = chance.choice(steps) if chance.random() < 0.3 else None
        if job.sdc or not drawn:
            self.rank_due = None
        if job.sdc or not drawn or self.parameters_due is None or not job.guard.compares(self.parameters_due):
            self.parameters_due = None
        self.corrupt_gradients: set[WorkerId] = set()  # whose next one is wrong, once
        self.corrupt_parameters: set[WorkerId] = set()
        self.flipped: SimWorker | None = None
        self.flipped_in = self.flipped_rank = -1
        self.happened: list[str] = []

    def poison(self, what: str | None, step: int | None = None) -> None:
        """Of a step that nobody can have begun."""
        if step is None:
            step = POISON_AHEAD + max((w.tx.step for w in self.world.workers.values() if w.alive), default=-1)
        self.world.reference.poison[step] = what or "nan"

    def corrupt(self, worker: SimWorker, what: str | None) -> None:
        worker.impaired = True
        (self.corrupt_gradients if what == "gradient" else self.corrupt_parameters).add(worker.id)

    def gradient(self, worker: SimWorker, step: int, rank: int, right: int) -> int:
        if len(self.world.checks.members) < 2:
            return right  # nobody could tell
        if worker.id in self.corrupt_gradients:
            self.corrupt_gradients.discard(worker.id)
            self.note(f"worker {worker.id} computes rank {rank} of step {step} wrongly, this once")
            return wrong(right)
        if worker is self.flipped and (step, rank) == (self.flipped_in, self.flipped_rank):
            return wrong(right)
        if (step, rank) != self.rank_due or not self.world.checks.standing(worker):
            return right
        self.rank_due, self.flipped, self.flipped_in, self.flipped_rank = None, worker, step, rank
        worker.impaired = True
        self.note(f"worker {worker.id} computes rank {rank} of step {step} wrongly")
        return wrong(right)

    def parameters(self, worker: SimWorker, step: int) -> tuple[int, ...]:
        right = tuple(worker.arithmetic.staged)
        if worker.id in self.corrupt_parameters:
            self.corrupt_parameters.discard(worker.id)
            return (right[0] ^ 1, *right[1:])
        if step != self.parameters_due or not self.world.checks.standing(worker):
            return right
        self.parameters_due, worker.impaired = None, True
        self.note(f"worker {worker.id} has wrong parameters in step {step}")
        return (right[0] ^ 1, *right[1:])

    def note(self, text: str) -> None:
        self.happened.append(text)
        self.world.trace(f"*** {text}")

    def may_end(self, worker: SimWorker, error: Exception) -> bool:
        return isinstance(error, CorruptionError) and worker.impaired

    def undecidable(self, reason: str) -> bool:
        """Of two workers that contradict each other for good, nobody can tell the right one, if both look bad."""
        return self.flipped is not None and len(self.world.checks.members) <= 2 and "no two agree" in reason

    def ended(self) -> None:
        events = self.world.disk.events
        seen = any(kind == "bad_step" and e["step"] == self.flipped_in for _, kind, e in events)
        left = {e["worker"] for _, kind, e in events if kind == "member_left"}  # a zombie may come again
        if seen and self.flipped is not None and self.flipped.id not in left:
            self.world.violation(f"worker {self.flipped.id} computed wrongly and was not found")
