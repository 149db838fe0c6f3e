"""Whoever Ray started for a job dies when the raylet does, at once, and takes its own with it.

Ray notices the same after some seconds, its helpers only after a minute; until then an agent's workers would go on
training for a job that is gone. So each actor watches its raylet. The helpers of a local Ray are ended by a process
that does nothing else. It must know them beforehand: once the raylet is dead nothing tells them from other processes
(the title that they give themselves is written over their environment).

This file is also that process's program, started without site packages: it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

ORPHAN_EXIT_CODE = 1
LOOK_SECONDS = 2.0  # the helpers are there from the start; who came since then watches the raylet too


def die_with_raylet() -> None:
    """Watch the process that started this one; its workers die with the thread that forked them."""
    raylet = os.getppid()
    try:
        pidfd = os.pidfd_open(raylet)
    except ProcessLookupError:
        os._exit(ORPHAN_EXIT_CODE)
    if os.getppid() != raylet:
        os._exit(ORPHAN_EXIT_CODE)
    threading.Thread(target=_watch, args=(pidfd,), name="raylet-watch", daemon=True).start()


def _watch(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(ORPHAN_EXIT_CODE)


def start_sweeper(raylet: int) -> subprocess.Popen[bytes]:
    """A process that outlives this one, in a session of its own, and ends with that raylet; it watches already."""
    command = [sys.executable, "-I", "-S", __file__, str(raylet)]
    quiet = subprocess.DEVNULL
    sweeper = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, start_new_session=True)
    assert sweeper.stdout is not None
    with sweeper.stdout:
        sweeper.stdout.readline()
    return sweeper


def sweep_after(raylet: int) -> None:
    """Wait for the raylet's end, then kill its children."""
    known: dict[int, int] = {}  # pid -> pidfd
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        watched = os.pidfd_open(raylet)
        _look_for_children(raylet, known)
        os.write(sys.stdout.fileno(), b"watching\n")
        while not select.select([watched], [], [], LOOK_SECONDS)[0]:
            _look_for_children(raylet, known)
    for pidfd in known.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _look_for_children(parent: int, known: dict[int, int]) -> None:
    """A pidfd names its process for good, also when the number is given to another."""
    children = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == parent}
    for pid in known.keys() - children:
        os.close(known.pop(pid))
    for pid in children - known.keys():
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if _parent_of(pid) == parent:
                known[pid] = pidfd
            else:
                os.close(pidfd)


def _parent_of(pid: int) -> int | None:
    """None once it is gone. Its name may hold anything, so what follows it is found from behind."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return None


if __name__ == "__main__":
    sweep_after(int(sys.argv[1]))
