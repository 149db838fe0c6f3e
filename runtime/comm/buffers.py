"""Where received payloads live: 64-byte aligned buffers that come back by themselves.

A fresh buffer of some megabytes costs one page fault per 4 KiB, about as much time as receiving into it. So large
buffers are kept and used again. A buffer is free again when nothing looks into it any more: when the memoryview that
was handed out, and every array, tensor or slice made from that memoryview, is gone. There is nothing to release by
hand, so nothing can be released too early.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES = 64
_GRAIN_BYTES = 1 << 16  # kept buffers have sizes in these steps, so that shards of nearly equal size share them

_Storage = npt.NDArray[np.uint8]


def aligned(size_bytes: int) -> _Storage:
    """Uninitialised bytes whose address is a multiple of ALIGNMENT_BYTES."""
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    offset = -raw.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return raw[offset : offset + size_bytes]


class PayloadBuffers:
    """A pool that keeps at most `keep_bytes` of idle buffers. `take` belongs to one thread; views may die on any."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: list[_Storage] = []  # the warmest last
        self._returned: deque[_Storage] = deque()  # filled by whichever thread drops the last view

    def take(self, size_bytes: int) -> memoryview:
        """A writable flat memoryview of `size_bytes` bytes; contents undefined."""
        if size_bytes < _GRAIN_BYTES:
            return aligned(size_bytes).data
        room = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        self._collect()
        found = next((i for i in reversed(range(len(self._idle))) if self._idle[i].nbytes == room), None)
        storage = aligned(room) if found is None else self._idle.pop(found)
        window = storage[:size_bytes]
        # The memoryview, and whatever is made from it, keeps `window` alive; nothing else does.
        weakref.finalize(window, self._returned.append, storage).atexit = False
        return window.data

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        excess = sum(storage.nbytes for storage in self._idle) - self._keep_bytes
        while excess > 0:
            excess -= self._idle.pop(0).nbytes
