"""Whoever Ray started for a job dies when the raylet does, at once, and takes its own with it.

Ray notices the same after some seconds, its helpers only after a minute; until then an agent's workers would go on
training for a job that is gone. So each actor watches its raylet. The helpers of a local Ray are ended by a process
that does nothing else: an actor may be ended by Ray itself before it has got to them.

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
import time
from pathlib import Path

ORPHAN_EXIT_CODE = 1
ROUNDS = 20  # of killing, until nobody is left
ROUND_SECONDS = 0.05


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
    """A process that outlives this one, in a session of its own, and ends soon after that raylet."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(raylet)]
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def sweep_after(raylet: int) -> None:
    """Wait for the raylet's end, then kill what it had started: Ray marks each with its number."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(raylet)], [], [])
    for _ in range(ROUNDS):
        if not _kill_marked(f"RAY_RAYLET_PID={raylet}".encode()):
            return
        time.sleep(ROUND_SECONDS)


def _kill_marked(mark: bytes) -> int:
    """How many there still were."""
    found = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found += 1
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # gone, or somebody else's
    return found


if __name__ == "__main__":
    sweep_after(int(sys.argv[1]))
