"""What the processes of a test hold while they live, and what is left of it afterwards.

A thread looks again and again at all processes that carry the mark: their listening sockets and the shared memory they
have mapped. Afterwards none of the processes, sockets, segments and temporary files may be there any more. Sockets are
told apart by inode, so a port that somebody else takes later is no leftover.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LOOK_SECONDS = 0.5
LISTEN, ESTABLISHED = "0A", "01"
SHARED_MEMORY = "/dev/shm/"
# torch keeps a directory there for a compiler that we don't use; it is empty, and stays.
NOT_OURS = ("torchinductor_",)


@dataclass(slots=True)
class Seen:
    processes: set[int] = field(default_factory=set)
    listening: dict[str, int] = field(default_factory=dict)  # inode -> port
    segments: set[str] = field(default_factory=set)


class Eye:
    def __init__(self, mark: str, temporary: Path) -> None:
        self.mark, self.temporary = mark, temporary
        self.seen = Seen()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def nothing_left(self, seconds: float = 10.0, files: bool = True) -> Seen:
        """Within so many seconds; what was seen since the last call. `files`: also of temporary files, which a killed
        job can't remove."""
        deadline = time.monotonic() + seconds
        while left := self.left(files):
            assert time.monotonic() < deadline, "left behind:\n" + "\n".join(left)
            time.sleep(0.05)
        seen, self.seen = self.seen, Seen()
        return seen

    def left(self, files: bool = True) -> list[str]:
        seen = self.seen
        left = [f"process {pid}: {command_line(pid)}" for pid in self.processes()]
        left += [f"port {seen.listening[inode]}" for inode in sockets(LISTEN) if inode in seen.listening]
        left += [f"segment {name}" for name in sorted(seen.segments) if os.path.exists(name)]
        if files:
            left += [f"file {entry}" for entry in self.temporary.iterdir() if not entry.name.startswith(NOT_OURS)]
        return left

    def processes(self) -> list[int]:
        mark = self.mark.encode()
        return [pid for pid in all_pids() if mark in environment(pid)]

    def sweep(self) -> None:
        """After a test that failed."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.sweep()

    def _look_on(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        seen, listening = self.seen, sockets(LISTEN)
        for pid in self.processes():
            seen.processes.add(pid)
            seen.listening.update({inode: listening[inode][0] for inode in open_sockets(pid) if inode in listening})
            seen.segments.update(segments(pid))


# --- /proc ---------------------------------------------------------------------------------------------------


def all_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def environment(pid: int) -> list[bytes]:
    """Empty for a process that has ended, or is somebody else's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "?"


def open_sockets(pid: int) -> set[str]:
    """Inodes."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def sockets(state: str) -> dict[str, tuple[int, int]]:
    """TCP sockets of this machine in that state: inode -> (local port, remote port)."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state:
                    found[fields[9]] = (int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16))
    return found


def segments(pid: int) -> set[str]:
    """Shared memory that it has mapped and that has a name."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        names = {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line}
        return {name for name in names if not name.endswith("(deleted)")}
    return set()


def links(pids: list[int]) -> dict[frozenset[int], frozenset[str]]:
    """TCP connections between these processes: {pid, pid} -> both sockets' inodes."""
    ports = sockets(ESTABLISHED)
    ends: dict[tuple[int, int], tuple[int, str]] = {}
    for pid in pids:
        for inode in open_sockets(pid):
            if inode in ports:
                ends[ports[inode]] = (pid, inode)
    found: dict[frozenset[int], frozenset[str]] = {}
    for (local, remote), (pid, inode) in ends.items():
        other = ends.get((remote, local))
        if other is not None and other[0] != pid:
            found[frozenset((pid, other[0]))] = frozenset((inode, other[1]))
    return found
