"""An injected fault: this process's wall clock is wrong from now on, as where a host's clock is set.

What is taken from it are stamps to be shown. Whoever decides anything by it would be found out.
"""

from __future__ import annotations

import time

_right = time.time
_ahead_seconds = 0.0


def jump(seconds: float) -> None:
    """That much ahead of what it said so far; negative: behind."""
    global _ahead_seconds
    _ahead_seconds += seconds
    time.time = _wrong


def ahead_seconds() -> float:
    return _ahead_seconds


def _wrong() -> float:
    return _right() + _ahead_seconds
