"""The thread that writes: shards of a checkpoint, the initial checkpoint, the final weights. Never the step's thread.

It is given copies, so training may go on meanwhile. Each piece that is durable is told of once (`collect`); an error
of any kind is told of like one. A place that can't be written to (a full disk, a store that is down) is no error: it is
told of, and tried again until it works or a newer version of the shard waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataloader.errors import HostError
from runtime.checkpoint.store import Store, may_pass
from runtime.checkpoint.weights import write_weights
from runtime.checkpoint.writer import write_shard
from runtime.shards.layout import FlatLayout
from runtime.shards.state import unpack

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable piece. `file`: a shard's manifest entry; neither that nor `weights`: the checkpoint of version 0."""

    version: int
    shard: int = -1
    file: Mapping[str, Any] | None = None
    weights: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Delayed:
    """A piece that can't be written now; told once of each. `given_up`: a newer one is written instead."""

    version: int
    shard: int
    reason: str
    given_up: bool = False


class Saver:
    """`write_first` writes the checkpoint of version 0 whole."""

    def __init__(
        self,
        store: Store,
        weights: Path,
        layout: FlatLayout,
        write_first: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._store, self._weights, self._layout = store, weights, layout
        self._write_first, self._wake = write_first, wake
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._done: deque[Saved | Delayed] = deque()
        self._newest: dict[int, int] = {}  # version by shard (-1: the weights)
        self._failing: tuple[float, str] = (0.0, "")  # injected: until when (monotonic), and how
        self._writing = 0

    def save(self, version: int, shard: int, snapshot: tuple[Any, Any]) -> None:
        """`snapshot`: (meta, payload), a copy of the holding."""

        def write() -> Saved:
            entry = write_shard(self._store, shard, unpack(*snapshot))
            return Saved(version, shard, entry.model_dump())

        self._newest[shard] = version
        self._run(version, lambda: self._patiently(version, shard, write))

    def write_weights(self, version: int, flat: torch.Tensor) -> None:
        def write() -> Saved:
            write_weights(self._weights, flat, self._layout)
            return Saved(version, weights=True)

        self._newest[-1] = version
        self._run(version, lambda: self._patiently(version, -1, write))

    def initialise(self) -> None:
        def write() -> Saved:
            self._write_first()
            return Saved(0)

        self._run(0, write)

    def fail_for(self, seconds: float, how: str) -> None:
        """An injected fault: nothing can be written for so long."""
        self._failing = (time.monotonic() + seconds, how)

    @property
    def idle(self) -> bool:
        """Nothing is being written, and all that was has been collected."""
        return self._writing == 0

    def collect(self) -> list[Saved | Delayed]:
        done: list[Saved | Delayed] = []
        while self._done:
            done.append(self._done.popleft())
        self._writing -= sum(isinstance(what, Saved) or what.given_up for what in done)
        return done

    def _patiently(self, version: int, shard: int, write: Callable[[], Saved]) -> Saved | Delayed:
        pause, told = FIRST_RETRY_SECONDS, False
        while True:
            try:
                until, how = self._failing
                if time.monotonic() < until:
                    what = f"shard {shard} of version {version}"
                    raise HostError(f"{what} can't be written: {how} (injected)") from OSError(how)
                return write()
            except HostError as error:
                if not may_pass(error):
                    raise
                delayed = Delayed(version, shard, str(error), self._newest[shard] > version)
                if delayed.given_up:
                    return delayed
                if not told:
                    self._tell(delayed)
                    told = True
            time.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    def _tell(self, what: Saved | Delayed) -> None:
        self._done.append(what)
        self._wake()

    def _run(self, version: int, write: Callable[[], Saved | Delayed]) -> None:
        def task() -> None:
            try:
                saved = write()
            except Exception as error:  # the thread's edge: in a pool's future nobody would look for it
                saved = Saved(version, error=error)
            self._tell(saved)

        self._writing += 1
        self._pool.submit(task)
