"""Whether Ray is draining a node: how a cluster's operator or autoscaler says that it goes away.

Ray has no public call for it, so this is the one place that uses a private one; where it is missing, no drain is seen.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

log = logging.getLogger("everstep.agent")


def draining_seconds(node_id: str, without_deadline: float) -> float | None:
    """Seconds that this node has left; None if it is not being drained, or if that can't be known now."""
    try:
        state: Any = ray._private.state.state
        draining: dict[str, int] = state.get_draining_nodes()  # deadlines, Unix time in ms; 0: none
    except Exception as error:  # whatever Ray's private parts may raise
        log.warning("can't see whether Ray drains this node: %s: %s", type(error).__name__, error)
        return None
    deadline = draining.get(node_id)
    if deadline is None:
        return None
    return max(0.0, deadline / 1e3 - time.time()) if 0 < deadline < 2**62 else without_deadline
