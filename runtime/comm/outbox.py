"""What is queued for one non-blocking stream socket: buffers in order, written as far as the kernel takes them.

Buffers are queued, not copied. They must stay unchanged until they are written, which the queue's owner promises.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable
from itertools import islice

# Buffers handed to one sendmsg. The kernel's own limit is 1,024; more than some dozen gain nothing.
_GATHERED = 64


class Outbox:
    """FIFO of buffers. `unsent_bytes` is what the kernel has not taken yet."""

    __slots__ = ("_parts", "unsent_bytes")

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self.unsent_bytes = 0

    def push(self, parts: Iterable[memoryview]) -> None:
        """Queues flat byte views (format ``B``), none of them empty."""
        for part in parts:
            self._parts.append(part)
            self.unsent_bytes += len(part)

    def write(self, sock: socket.socket, budget_bytes: int) -> int:
        """Writes until the queue is empty, the kernel has no room, or the budget is spent; returns the bytes written.

        Raises OSError when the connection is broken.
        """
        written = 0
        while self._parts and written < budget_bytes:
            batch = list(islice(self._parts, _GATHERED))
            try:
                count = sock.sendmsg(batch, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            self._consume(count)
            written += count
            if count < sum(map(len, batch)):
                break  # the kernel is full: asking again would only say so
        return written

    def clear(self) -> None:
        self._parts.clear()
        self.unsent_bytes = 0

    def _consume(self, count: int) -> None:
        self.unsent_bytes -= count
        while count:
            first = self._parts[0]
            if count < len(first):
                self._parts[0] = first[count:]
                return
            count -= len(first)
            self._parts.popleft()
