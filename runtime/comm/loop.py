"""One control thread, one selector: how everything that a worker or an agent waits for shares a single wait.

Rules of the room:
- whoever registers a file object on the shared selector registers as its ``data`` a callable that takes the
  ready mask (``Ready``). `dispatch` calls it, so owners need not know of one another;
- a callable never blocks, and tolerates being called once more after its owner has closed: another callable of
  the same turn may have closed it;
- only the control thread touches the selector and what is registered on it. Other threads call `Wake.set`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable
from typing import TypeAlias

Ready: TypeAlias = Callable[[int], None]


def dispatch(selector: selectors.BaseSelector, timeout_seconds: float | None) -> None:
    """Waits once, at most `timeout_seconds` (None: for ever), and calls whoever is ready."""
    for key, mask in selector.select(timeout_seconds):
        key.data(mask)


class Wake:
    """Ends the control thread's wait from another thread, for instance when the compute thread has a result."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._closing = threading.Lock()
        self._closed = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._fd, selectors.EVENT_READ, self._ready)

    def set(self) -> None:
        """From any thread, also after `close`. Many calls before the control thread wakes count as one."""
        with self._closing, contextlib.suppress(BlockingIOError):  # the counter is full: it is set all the more
            if not self._closed:  # by then the number may be another file's
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """On the control thread; a later `set` does nothing."""
        with self._closing:
            self._closed = True
            self._selector.unregister(self._fd)
            os.close(self._fd)

    def _ready(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
