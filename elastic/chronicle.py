"""What a run leaves behind, in order: step records, checkpoints, the final weights. Pure book-keeping.

Workers may tell anything twice, out of turn, or again to a new controller; the ledger gets every step once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic.messages import ShardSaved, WriteManifest
from runtime.protocol import StepRecord


class Chronicle:
    """`checkpoint`: the newest complete one's version; None: there is none, not even of version 0."""

    def __init__(
        self,
        shards: int,
        ledger_next: int,
        ledger_digest: Callable[[int], str | None],
        checkpoint: int | None,
    ) -> None:
        self.shards = shards
        self.ledger_next = ledger_next
        self.checkpoint = checkpoint
        self.weights = -1
        self._digest = ledger_digest
        self._early: dict[int, StepRecord] = {}
        self._files: dict[int, dict[int, Mapping[str, Any]]] = {}

    def decided(self, records: Iterable[StepRecord]) -> list[StepRecord]:
        """The records that are next in the ledger now."""
        self._early.update({r.step: r for r in records if r.step >= self.ledger_next})
        due = []
        while (record := self._early.pop(self.ledger_next, None)) is not None:
            due.append(record)
            self.ledger_next += 1
        return due

    def contradicts(self, records: Iterable[StepRecord]) -> int | None:
        """A step among these that is in the ledger with other bits."""
        for record in records:
            if record.step < self.ledger_next and self._digest(record.step) not in (None, record.digest):
                return record.step
        return None

    def shard_saved(self, event: ShardSaved) -> WriteManifest | None:
        """The manifest to write, when this was the last file of its version."""
        if self.checkpoint is not None and event.version <= self.checkpoint:
            return None
        files = self._files.setdefault(event.version, {})
        known = event.shard in files
        files[event.shard] = event.file
        if known or len(files) < self.shards:
            return None
        return WriteManifest(event.version, dict(sorted(files.items())))

    def checkpoint_written(self, version: int) -> bool:
        """False if that was known."""
        if self.checkpoint is not None and version <= self.checkpoint:
            return False
        self.checkpoint = version
        self._files = {v: f for v, f in self._files.items() if v > version}
        return True

    def complete(self, version: int) -> bool:
        """Nothing of a run that ends at this version is missing."""
        return self.weights >= version and (self.checkpoint or 0) >= version and self.ledger_next >= version
