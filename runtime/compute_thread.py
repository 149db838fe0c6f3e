"""The thread that trains: one per process, since all of torch's generators are the process's.

The control thread says what is wanted (`want`) and collects what came of it (`collect`); nothing else crosses. A rank
that is running when the wish changes goes on if it is still wanted, and else stops before its next micro-batch.

Each micro-batch is timed (runtime/brake.py). A worker that was given no rank is timed by one that is thrown away
(`measure`), so that it is known when it has become fast enough for work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.brake import Brake
from runtime.priority import compute_after
from runtime.protocol import RankWork


@dataclass(frozen=True, slots=True)
class Computed:
    step: int
    rank: int
    gradient: torch.Tensor
    work: RankWork


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


@dataclass(frozen=True, slots=True)
class MicroBatchDone:
    step: int
    seconds: float  # wall clock


@dataclass(frozen=True, slots=True)
class Measured:
    """A micro-batch that belongs to no step, computed to see how long one takes."""

    seconds: float


PACE_MICRO_BATCHES = 64
PACE_LEAST = 4  # the first ones compile, allocate and read for the first time

Outcome = Computed | Failed | MicroBatchDone | Measured
RunRank = Callable[[int, int, torch.Tensor, Callable[[], bool], Callable[[], None]], RankWork | None]


class ComputeThread:
    """`run_rank` and `install` are called on this thread only; `wake` after each outcome, from this thread.

    `install(version)` puts the staged parameters into the model; called when a rank of another version than the last
    one is next. `take` and `give_back` hand out gradient buffers. `run_probe` computes one micro-batch of any tokens.
    """

    def __init__(
        self,
        run_rank: RunRank,
        install: Callable[[], None],
        take: Callable[[], torch.Tensor],
        give_back: Callable[[torch.Tensor], None],
        wake: Callable[[], None],
        pin: Callable[[], None],
        run_probe: Callable[[torch.Tensor], object] = lambda gradient: None,
        shortest_seconds: float = 0.0,
    ) -> None:
        self._run_rank, self._install, self._take, self._give_back = run_rank, install, take, give_back
        self._wake, self._pin, self._run_probe = wake, pin, run_probe
        self._brake = Brake(shortest_seconds)
        self._to_measure = False
        self._changed = threading.Condition()
        self._step = -1
        self._wanted: deque[int] = deque()
        self._running: tuple[int, int] | None = None
        self._undelivered: set[tuple[int, int]] = set()
        self._cancel = False
        self._installed: int | None = None
        self._outcomes: deque[Outcome] = deque()
        self._begun = 0.0  # monotonic: when the micro-batch under way was begun
        self._durations: deque[float] = deque(maxlen=PACE_MICRO_BATCHES)
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a logical rank is being computed or is about to be."""
        with self._changed:
            return self._running is not None or bool(self._wanted)

    def pace(self) -> tuple[float, float]:
        """(seconds that the micro-batch under way has taken so far, the longest of the last ones; 0: none, unknown)."""
        with self._changed:
            busy = time.monotonic() - self._begun if self._running is not None else 0.0
            known = len(self._durations) >= PACE_LEAST
            return busy, max(self._durations) if known else 0.0

    def want(self, step: int, ranks: tuple[int, ...]) -> None:
        with self._changed:
            if step != self._step:
                self._step = step
                self._undelivered.clear()
            if self._running is not None and (self._running[0] != step or self._running[1] not in ranks):
                self._cancel = True  # for good: if it is wanted again before it has stopped, it begins anew
            done = {rank for s, rank in self._undelivered if s == step}
            if self._running is not None and not self._cancel:
                done.add(self._running[1])
            self._wanted = deque(rank for rank in ranks if rank not in done)
            self._changed.notify()

    def slow(self, factor: float, seconds: float | None) -> None:
        """An injected fault: from the next micro-batch on each takes so many times as long; None: for good."""
        self._brake.slow(factor, seconds)

    def measure(self) -> None:
        """Time one micro-batch once nothing else is wanted."""
        with self._changed:
            self._to_measure = True
            self._changed.notify()

    def collect(self) -> list[Outcome]:
        """What has come since the last call, in order."""
        with self._changed:
            outcomes = list(self._outcomes)
            self._outcomes.clear()
            self._undelivered.clear()
        return outcomes

    def _loop(self) -> None:
        compute_after()
        self._pin()
        while True:
            wanted = self._next()
            if wanted is None:
                self._bring(self._measure())
                continue
            step, rank = wanted
            outcome = self._compute(step, rank)
            with self._changed:
                self._running = None
                if outcome is None:
                    self._installed = None  # what was staged may have changed while it was being installed
                else:
                    self._outcomes.append(outcome)
                    if isinstance(outcome, Computed):
                        self._undelivered.add((step, rank))
            self._wake()

    def _next(self) -> tuple[int, int] | None:
        """The next rank, once one is wanted. None: none is, but there is something to measure."""
        with self._changed:
            while not self._wanted and not self._to_measure:
                self._changed.wait()
            if not self._wanted:
                self._to_measure = False
                return None
            self._running, self._cancel = (self._step, self._wanted.popleft()), False
            self._begun = time.monotonic()
            return self._running

    def _compute(self, step: int, rank: int) -> Outcome | None:
        try:
            if self._installed != step:
                self._install()
                self._installed = step
            gradient = self._take()
            work = self._run_rank(step, rank, gradient, lambda: self._cancel, lambda: self._micro_batch_done(step))
        except Exception as error:  # the thread's edge: whatever it was, the control thread tells of it
            return None if self._cancel else Failed(error)
        if work is None:
            self._give_back(gradient)
            return None
        return Computed(step, rank, gradient, work)

    def _micro_batch_done(self, step: int) -> None:
        seconds = self._brake.end(self._begun)
        with self._changed:
            self._durations.append(seconds)
            self._begun = time.monotonic()
        self._bring(MicroBatchDone(step, seconds))

    def _measure(self) -> Measured | Failed:
        try:
            gradient = self._take()
            begun = time.monotonic()
            self._run_probe(gradient)
            self._give_back(gradient)
            return Measured(self._brake.end(begun))
        except Exception as error:  # the thread's edge
            return Failed(error)

    def _bring(self, outcome: Outcome) -> None:
        with self._changed:
            self._outcomes.append(outcome)
        self._wake()
