"""The job process's watch over the controller: one that is frozen is killed, so that Ray starts another."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import Any

import ray

from elastic.detector import AwakeClock

SILENT_SECONDS = 3.0
PERIOD_SECONDS = 0.5


class Pulse:
    """`look` is to be called some times a second. It only kills a process of this host, and names it by a pidfd."""

    def __init__(self) -> None:
        self._clock = AwakeClock()
        self._call: Any = None
        self._asked = 0.0  # of the clock
        self._pid, self._pidfd = 0, -1

    def look(self, controller: Any) -> None:
        now = self._clock.advance(time.monotonic())
        if self._call is None:
            if now >= self._asked + PERIOD_SECONDS:
                self._asked, self._call = now, controller.ping.remote()
            return
        done, _ = ray.wait([self._call], timeout=0)
        if done:
            with contextlib.suppress(ray.exceptions.RayError):  # it is dead, which others see to
                self._know(*ray.get(self._call))
            self._call = None
        elif now - self._asked >= SILENT_SECONDS and self._pidfd >= 0 and not _has_ended(self._pidfd):
            print(f"everstep: the controller has been silent for {now - self._asked:.1f} s; killed", file=sys.stderr)
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._call, self._asked = None, now

    def _know(self, node_id: str, pid: int) -> None:
        if pid != self._pid and node_id == ray.get_runtime_context().get_node_id():
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pid, self._pidfd = pid, -1
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)


def _has_ended(pidfd: int) -> bool:
    """Then Ray is starting another already, which takes its time."""
    return bool(select.select([pidfd], [], [], 0)[0])
