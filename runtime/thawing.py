"""A process that was stopped can't start itself again: a small one does it, some seconds later.

Of fault injection only. This file is also that process's program, started without site packages: it imports only the
standard library. It ends as soon as all that it watches have ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable


def thaw_later(pids: Iterable[int], seconds: float) -> None:
    """SIGCONT to these processes in so many seconds, also if this one is stopped or dead by then."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(seconds), *map(str, pids)]
    subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def thaw_after(seconds: float, pids: Iterable[int]) -> None:
    deadline = time.monotonic() + seconds
    living: dict[int, int] = {}  # pidfd -> pid
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            living[os.pidfd_open(pid)] = pid
    while living and (left := deadline - time.monotonic()) > 0.0:
        for ended in select.select(list(living), [], [], left)[0]:
            del living[ended]
    for pidfd in living:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


if __name__ == "__main__":
    thaw_after(float(sys.argv[1]), map(int, sys.argv[2:]))
