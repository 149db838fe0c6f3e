"""Who gets a busy core first: threads that answer, before threads that compute.

Where more threads want to run than there are cores, a thread that wakes waits for its turn: some milliseconds each
time, and a change of members is a dozen such wakings. Linux gives a thread that asks for short slices its turn at once
(6.12 and newer, also across sessions since 6.14), without any privilege and without more of the core in the end. So
control threads ask for the shortest, and compute threads for the usual ones, at a lower priority. Older kernels ignore
it or refuse; nothing depends on it but latency.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

COMPUTE_NICENESS = 5  # above the process's own
MOST_NICE = 19
SHORT_SLICE_NANOSECONDS = 100_000  # the shortest that Linux grants
USUAL_SLICE = 0  # the kernel's own

# struct sched_attr: size, policy, flags, nice, priority, runtime (SCHED_OTHER: the slice), deadline, period, two clamps
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_SET = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # sched_setattr
_libc = ctypes.CDLL(None, use_errno=True)


def answer_first(whole_process: bool = False) -> None:
    """Ask for short slices for the calling thread and those that it starts from now on; or for all there are."""
    for thread in map(int, os.listdir("/proc/self/task")) if whole_process else (threading.get_native_id(),):
        _ask(thread, SHORT_SLICE_NANOSECONDS)


def take_turns() -> None:
    """Usual slices for the calling thread: whoever started it may have asked for short ones."""
    _ask(threading.get_native_id(), USUAL_SLICE)


def compute_after() -> None:
    """The calling thread computes: usual slices, and a lower priority than who answers."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())  # the main thread's
    os.setpriority(os.PRIO_PROCESS, thread, min(MOST_NICE, niceness + COMPUTE_NICENESS))
    _ask(thread, USUAL_SLICE)


def _ask(thread: int, nanoseconds: int) -> None:
    """What the kernel answers doesn't matter: it may not know of this, and the thread may have ended."""
    if _SET is None:
        return
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, nanoseconds, 0, 0, 0, 0)
    _libc.syscall(_SET, thread, ctypes.create_string_buffer(wanted, len(wanted)), 0)
