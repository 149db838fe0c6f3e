"""The thread that writes: shards of a checkpoint, the initial checkpoint, the final weights. Never the step's thread.

It is given copies, so training may go on meanwhile. Each piece that is durable is told of once (`collect`); an error
of any kind is told of like one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.store import Store
from runtime.checkpoint.weights import write_weights
from runtime.checkpoint.writer import write_shard
from runtime.shards.layout import FlatLayout
from runtime.shards.state import unpack


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable piece. `file`: a shard's manifest entry; neither that nor `weights`: the checkpoint of version 0."""

    version: int
    shard: int = -1
    file: Mapping[str, Any] | None = None
    weights: bool = False
    error: Exception | None = None


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
        self._done: deque[Saved] = deque()
        self._writing = 0

    def save(self, version: int, shard: int, snapshot: tuple[Any, Any]) -> None:
        """`snapshot`: (meta, payload), a copy of the holding."""

        def write() -> Saved:
            entry = write_shard(self._store, shard, unpack(*snapshot))
            return Saved(version, shard, entry.model_dump())

        self._run(version, write)

    def write_weights(self, version: int, flat: torch.Tensor) -> None:
        def write() -> Saved:
            write_weights(self._weights, flat, self._layout)
            return Saved(version, weights=True)

        self._run(version, write)

    def initialise(self) -> None:
        def write() -> Saved:
            self._write_first()
            return Saved(0)

        self._run(0, write)

    @property
    def idle(self) -> bool:
        """Nothing is being written, and all that was has been collected."""
        return self._writing == 0

    def collect(self) -> list[Saved]:
        done: list[Saved] = []
        while self._done:
            done.append(self._done.popleft())
        self._writing -= len(done)
        return done

    def _run(self, version: int, write: Callable[[], Saved]) -> None:
        def task() -> None:
            try:
                saved = write()
            except Exception as error:  # the thread's edge: in a pool's future nobody would look for it
                saved = Saved(version, error=error)
            self._done.append(saved)
            self._wake()

        self._writing += 1
        self._pool.submit(task)
