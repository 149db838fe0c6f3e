"""The run's two append-only files: `ledger.jsonl`, one record per decided step, and `events.jsonl`, one per fault,
decision and change.

Rules of this room:
- One JSON object per line, in one write. A line without its newline was never written: readers pass over it, and the
  next append cuts it off. So whoever is killed in mid-write leaves nothing to mend by hand.
- The ledger is append-if-absent by step. A step that is decided twice (a worker certified it and died, a replay after
  a rollback) must come out with the same bits; that is checked here, and only the first record stays.
- Appends take a lock on the file and first look at what others have appended meanwhile, so that a controller which
  was replaced and doesn't know it yet can't tear the order.
- What a later action relies on is fsynced before that action: a fault before it is done, the ledger before a
  checkpoint of the same version is published (`sync`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dataloader.errors import DataError, HostError, InternalError
from elastic.record_lines import (
    EVENT_KINDS,
    decode,
    differing_field,
    encode,
    record_from_json,
    record_to_json,
    whole_lines,
)
from runtime.protocol import StepRecord

# Events that something later relies on, also after a power cut.
DURABLE_KINDS = frozenset({"fault_injected", "checkpoint", "run_ended"})


class _LineFile:
    """An append-only file of JSON lines; one object per process and file (its lock doesn't exclude threads)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0  # bytes read or written so far, up to a line's end
        self._lines = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise HostError(f"{path}: can't be written: {error.strerror}") from None
        with self._locked():
            self._catch_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sync(self) -> None:
        """Return once all that was appended survives a power cut."""
        os.fsync(self._fd)
        fsync_directory(self.path.parent)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Take in what others appended, cut off a torn tail. Under the lock."""
        size = os.fstat(self._fd).st_size
        if size == self._end:
            return
        data = os.pread(self._fd, max(0, size - self._end), self._end)
        for line, value in whole_lines(data, self.path, self._lines):
            self._seen(value, self._end)
            self._end += len(line)
            self._lines += 1
        if self._end < size:
            os.ftruncate(self._fd, self._end)

    def _seen(self, value: dict[str, Any], offset: int) -> None:
        """A line is in the file at this byte."""

    def _write(self, value: Mapping[str, Any]) -> None:
        """Append one line whole, or nothing. Under the lock, after `_catch_up`."""
        line = encode(value)
        try:
            written = os.write(self._fd, line)
            reason = "the disk is full"
        except OSError as error:
            written, reason = 0, error.strerror or str(error)
        if written != len(line):
            os.ftruncate(self._fd, self._end)
            raise HostError(f"{self.path}: can't be appended to: {reason}")
        self._seen(dict(value), self._end)
        self._end += len(line)
        self._lines += 1


class Ledger(_LineFile):
    """`ledger.jsonl`, open for appending: steps 0, 1, 2, ... without a gap."""

    def __init__(self, path: Path) -> None:
        self._offsets = array("Q")  # of each step's line
        super().__init__(path)

    @property
    def next_step(self) -> int:
        """The first step that has no record yet."""
        return len(self._offsets)

    def record(self, step: int) -> StepRecord | None:
        """The record of a step, if it has one."""
        if not 0 <= step < self.next_step:
            return None
        start = self._offsets[step]
        end = self._offsets[step + 1] if step + 1 < self.next_step else self._end
        line = decode(os.pread(self._fd, end - start, start)) or {}
        return record_from_json(line, f"{self.path}:{step + 1}")

    def append(self, record: StepRecord) -> bool:
        """Write the record of the next step; False if that step has one already, of the same bits.

        Raises InternalError when the step's record differs from the one there or would leave a gap, HostError when
        the file can't be written. Not fsynced: see `sync`.
        """
        with self._locked():
            self._catch_up()
            if record.step < self.next_step:
                self._compare(record)
                return False
            if record.step > self.next_step:
                raise InternalError(f"{self.path}: step {record.step} was handed in before step {self.next_step}")
            self._write(record_to_json(record))
            return True

    def _seen(self, value: dict[str, Any], offset: int) -> None:
        if value.get("step") != self.next_step:
            raise DataError(
                f"{self.path}:{self._lines + 1}: step {value.get('step')} where step {self.next_step} belongs"
            )
        self._offsets.append(offset)

    def _compare(self, record: StepRecord) -> None:
        there = self.record(record.step)
        name = differing_field(there, record) if there is not None else None
        if name is not None:
            raise InternalError(
                f"{self.path}:{record.step + 1}: step {record.step} was decided again with another {name}: "
                f"{getattr(there, name)} in the ledger, {getattr(record, name)} now"
            )


class EventLog(_LineFile):
    """`events.jsonl`, open for appending."""

    def append(self, kind: str, *, time: float, step: int, generation: int, **details: Any) -> None:
        """Write one event (`time` in seconds since the epoch); of DURABLE_KINDS it returns when the disk has it.

        Raises HostError when the file can't be written.
        """
        if kind not in EVENT_KINDS:
            raise InternalError(f"unknown event kind {kind!r}")
        with self._locked():
            self._catch_up()
            self._write({"time": time, "kind": kind, "step": step, "generation": generation, **details})
        if kind in DURABLE_KINDS:
            self.sync()


def fsync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
