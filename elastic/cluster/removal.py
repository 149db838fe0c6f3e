"""Taking a job's actors away: agents with their workers first closed, then killed; whoever is left, by pid."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Any

import ray

from elastic.cluster.names import CONTROLLER, agent_slot

KILL_PATIENCE_SECONDS = 3.0


def remove_controller() -> None:
    """First of all, so that nobody starts anew what is being taken away."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(CONTROLLER), no_restart=True)


def remove_agents(grace_seconds: float) -> None:
    """End every agent of this namespace and its workers. Returns once those of this host are gone."""
    agents: list[Any] = []
    for name in ray.util.list_named_actors():
        if agent_slot(name) is not None:
            with contextlib.suppress(ValueError):
                agents.append(ray.get_actor(name))
    closing = [agent.close.remote(grace_seconds) for agent in agents]
    here = ray.get_runtime_context().get_node_id()
    watched: list[int] = []
    if closing:
        done, _ = ray.wait(closing, num_returns=len(closing), timeout=grace_seconds + KILL_PATIENCE_SECONDS)
        for call in done:
            with contextlib.suppress(ray.exceptions.RayError):  # it was dead, and its workers with it
                pid, node_id = ray.get(call)
                if node_id == here:
                    with contextlib.suppress(ProcessLookupError):
                        watched.append(os.pidfd_open(pid))
    for agent in agents:
        ray.kill(agent, no_restart=True)
    for fd in watched:
        if not select.select([fd], [], [], KILL_PATIENCE_SECONDS)[0]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)
