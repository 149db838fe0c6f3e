"""What a job holds while it lives, and what is left of it afterwards: processes, ports, shared memory, files.

The job is started with a mark in its environment and a temporary directory of its own. While it lives, all processes
that descend from it or carry the mark are noted by pid and time of start (a title that a process gives itself is
written over its environment, and an orphan has lost its parent: neither way finds all), with their listening sockets
by inode and the shared memory that they have mapped. What of it is there once the job has ended is left over.
Placement groups live and die with the job's own Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "EVERSTEP_CHAOS"
LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 10.0  # for the last ones to end
LONGEST_BASE_BYTES = 8  # Ray and our own sockets put long names below it, and the kernel allows 107 bytes
LISTEN = "0A"
SHARED_MEMORY = "/dev/shm/"
# torch keeps a directory there for a compiler that we don't use; it is empty.
NOT_OURS = ("torchinductor_",)


class Witness:
    """Looks on while the block runs. What the job starts from `root` on, or under the mark, is the job's."""

    def __init__(self, mark: str, temporary: Path) -> None:
        self.temporary = temporary
        self._mark = f"{MARK}={mark}".encode()
        self._known: set[psutil.Process] = set()
        self._listening: dict[str, int] = {}  # inode -> port
        self._segments: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def left(self, patience_seconds: float = PATIENCE_SECONDS) -> list[str]:
        """What is there after so long; empty as soon as nothing is."""
        deadline = time.monotonic() + patience_seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def seen(self) -> int:
        """Processes, so far."""
        return len(self._known)

    def _look_on(self) -> None:
        while True:
            self.look()
            if self._closing.wait(LOOK_SECONDS):
                return

    def look(self) -> None:
        self._known |= self._processes()
        listening = listening_sockets()
        for process in list(self._known):
            for inode in sockets_of(process.pid):
                if inode in listening:
                    self._listening[inode] = listening[inode]
            self._segments |= segments_of(process.pid)

    def _processes(self) -> set[psutil.Process]:
        """Living ones: by mark, and all that descend from those or from others known, but for this one."""
        found: set[psutil.Process] = set()
        everyone = list(psutil.process_iter())
        children: dict[int, list[psutil.Process]] = {}
        for process in everyone:
            with contextlib.suppress(psutil.Error):
                children.setdefault(process.ppid(), []).append(process)
        frontier = [p for p in everyone if p.pid != os.getpid() and (p in self._known or self._is_marked(p.pid))]
        while frontier:
            process = frontier.pop()
            if process not in found:
                found.add(process)
                frontier += children.get(process.pid, [])
        return found

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def _left(self) -> list[str]:
        self._known |= self._processes()
        listening = listening_sockets()
        left = [f"process {p.pid}: {_title(p)}" for p in sorted(self._known, key=lambda p: p.pid) if _lives(p)]
        left += [f"port {port}" for inode, port in sorted(self._listening.items()) if inode in listening]
        left += [f"shared memory {name}" for name in sorted(self._segments) if os.path.exists(name)]
        files = sorted(self.temporary.iterdir()) if self.temporary.is_dir() else []
        left += [f"temporary file {entry}" for entry in files if not entry.name.startswith(NOT_OURS)]
        return left


@contextlib.contextmanager
def witnessed() -> Iterator[Witness]:
    """What this process starts within the block is marked, and has its temporary files where nobody else has."""
    base = tempfile.gettempdir()
    temporary = Path(
        tempfile.mkdtemp(prefix="evc-", dir=base if len(os.fsencode(base)) <= LONGEST_BASE_BYTES else "/tmp")
    )
    mark = secrets.token_hex(8)
    surroundings = {MARK: mark, "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
    before = {name: os.environ.get(name) for name in surroundings}
    os.environ.update(surroundings)
    try:
        with Witness(mark, temporary) as witness:
            yield witness
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(temporary, ignore_errors=True)


# --- /proc ---------------------------------------------------------------------------------------------------


def listening_sockets() -> dict[str, int]:
    """TCP, of this machine: inode -> port."""
    found: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes; none of a process that has ended."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def segments_of(pid: int) -> set[str]:
    """Shared memory with a name that it has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        names = {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line}
        return {name for name in names if not name.endswith("(deleted)")}
    return set()


def _lives(process: psutil.Process) -> bool:
    """A zombie holds nothing but its number, and is its parent's affair."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return (" ".join(process.cmdline()) or process.name())[:120]
    return "?"
