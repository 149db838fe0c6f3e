"""Whoever Ray started here dies when the raylet does, at once, and takes its own with it.

Ray notices the same after some seconds, its helpers only after a minute; until then an agent's workers would go on
training for a job that is gone.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

ORPHAN_EXIT_CODE = 1
WATCHERS = (b"ControllerActor", b"AgentActor")  # in the titles that Ray gives their processes


def die_with_raylet(local: bool) -> None:
    """Watch the process that started this one. `local`: the raylet is the job's own, so are all that it has started."""
    raylet = os.getppid()
    try:
        pidfd = os.pidfd_open(raylet)
    except ProcessLookupError:
        os._exit(ORPHAN_EXIT_CODE)
    if os.getppid() != raylet:
        os._exit(ORPHAN_EXIT_CODE)
    end = (lambda: _end_others(raylet)) if local else (lambda: None)
    threading.Thread(target=_watch, args=(pidfd, end), name="raylet-watch", daemon=True).start()


def _watch(pidfd: int, end: Callable[[], None]) -> None:
    select.select([pidfd], [], [])
    try:
        end()
    finally:
        os._exit(ORPHAN_EXIT_CODE)  # workers die with the thread that forked them


def _end_others(raylet: int) -> None:
    """Kill what else that raylet has started: Ray marks each with its number.

    Not those who watch as well: they end by themselves, and two that kill each other leave the rest alive.
    """
    mark = f"RAY_RAYLET_PID={raylet}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            watches = any(name in (entry / "cmdline").read_bytes() for name in WATCHERS)
            if not watches and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # gone, or somebody else's
