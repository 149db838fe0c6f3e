"""The thread that trains does every rank that is wanted, whatever was wanted meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import torch

from runtime.compute_thread import Computed, ComputeThread, Measured, MicroBatchDone, Outcome
from runtime.protocol import RankWork

PATIENCE_SECONDS = 10.0


class Play:
    """Each micro-batch (two to a rank) begins with a word, and ends when it is let go."""

    def __init__(self) -> None:
        self.began, self.let_go, self.woke = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
        self.computed: list[tuple[int, int]] = []
        self.thread = ComputeThread(
            self.run_rank,
            lambda: None,
            lambda: torch.zeros(1),
            lambda gradient: None,
            self.woke.set,
            lambda: None,
            lambda gradient: self.let_go.acquire(timeout=PATIENCE_SECONDS),
        )
        self.thread.start()

    def run_rank(
        self, step: int, rank: int, gradient: torch.Tensor, cancelled: Callable[[], bool], done: Callable[[], None]
    ) -> RankWork | None:
        for _ in range(2):
            if cancelled():
                return None
            self.began.release()
            assert self.let_go.acquire(timeout=PATIENCE_SECONDS)
            done()
        return RankWork((0.0,), 1, b"")

    def outcomes(self) -> Iterator[Outcome]:
        while True:
            assert self.woke.wait(PATIENCE_SECONDS)
            self.woke.clear()
            yield from self.thread.collect()

    def ranks(self, count: int) -> list[int]:
        """So many that come, in order."""
        found: list[int] = []
        for outcome in self.outcomes():
            found += [outcome.rank] if isinstance(outcome, Computed) else []
            if len(found) == count:
                return found
        raise AssertionError


def running(*ranks: int) -> Play:
    """The first of these is in its first micro-batch."""
    play = Play()
    play.thread.want(3, ranks)
    assert play.began.acquire(timeout=PATIENCE_SECONDS)
    return play


def test_what_is_wanted_still_goes_on() -> None:
    play = running(0, 1)
    play.thread.want(3, (2, 0))
    play.let_go.release(100)
    assert play.ranks(2) == [0, 2]
    assert not play.thread.busy


def test_what_is_wanted_no_more_stops() -> None:
    play = running(0, 1)
    play.thread.want(3, (1,))
    play.let_go.release(100)
    assert play.ranks(1) == [1]
    assert not play.thread.busy


def test_what_is_wanted_again_before_it_has_stopped_begins_anew() -> None:
    play = running(0, 1)
    play.thread.want(3, (1,))
    play.thread.want(3, (0, 1))
    play.let_go.release(100)
    assert sorted(play.ranks(2)) == [0, 1]
    assert not play.thread.busy


def test_each_micro_batch_is_timed_and_a_slow_one_takes_longer() -> None:
    play = running(0)
    play.thread.slow(3.0, None)
    time.sleep(0.05)
    play.let_go.release(100)
    seconds = []
    for outcome in play.outcomes():
        if isinstance(outcome, MicroBatchDone):
            seconds.append(outcome.seconds)
        if isinstance(outcome, Computed):
            break
    assert len(seconds) == 2
    assert seconds[0] >= 0.15


def test_one_is_measured_when_nothing_else_is_wanted() -> None:
    play = running(0)
    play.thread.measure()
    play.let_go.release(100)
    kinds = []
    for outcome in play.outcomes():
        kinds.append(type(outcome))
        if isinstance(outcome, Measured):
            break
    assert kinds == [MicroBatchDone, MicroBatchDone, Computed, Measured]
    assert not play.thread.busy
