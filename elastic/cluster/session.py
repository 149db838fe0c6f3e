"""One job on Ray, as its job process sees it: begun, asked to stop, waited for, removed without a trace."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster import placement
from elastic.cluster.controller_actor import CONTROLLER_OPTIONS, ControllerActor
from elastic.cluster.engine import Engine
from elastic.cluster.names import CONTROLLER
from elastic.cluster.pulse import Pulse
from elastic.cluster.removal import remove_agents, remove_controller
from elastic.config import JobConfig
from elastic.rundir import RunDirectory

GONE_PATIENCE_SECONDS = 60.0  # without a controller that answers
RETRY_SECONDS = 0.3
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ended:
    state: str  # done | stopped | failed
    reason: str


class Session:
    def __init__(self, engine: Engine, run: RunDirectory, job: JobConfig, run_id: str) -> None:
        self._engine, self._run, self._job, self._run_id = engine, run, job, run_id
        self._controller: Any = None
        self._waiting: Any = None  # the call that returns at the job's end
        self._stopping: Any = None  # the request to stop
        self._silent_since: float | None = None
        self._broken = ""  # the process of Ray's that has died
        self._pulse = Pulse()

    def begin(self, given_up: Callable[[], bool]) -> bool:
        """Reserve the nodes and start the controller, which starts the rest; False if it was given up before that.
        Raises HostError."""
        if not placement.place_first(self._engine.namespace, self._job, given_up):
            return False
        facts = {
            "run_dir": str(self._run.path),
            "run_id": self._run_id,
            "namespace": self._engine.namespace,
            "secret": os.urandom(32),
            "local": self._engine.local,
            "host": LOOPBACK if self._engine.local else "",
            "directory": os.getcwd(),
        }
        # On this host, where the run directory is; elsewhere only if this host is lost.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor = ray.remote(**CONTROLLER_OPTIONS)(ControllerActor)
        named = actor.options(name=CONTROLLER, lifetime="detached", scheduling_strategy=here)
        self._controller = named.remote(facts)
        return True

    def wait(self, seconds: float) -> Ended | None:
        """The job's end, if it comes within so many seconds. Sees a controller through its restarts."""
        if self._waiting is None:
            self._waiting = self._controller.wait_end.remote()
        done, _ = ray.wait([self._waiting], timeout=seconds)
        self._look_at_ray()
        self._pulse.look(self._controller)
        self._stop_if_asked()
        if not done:
            self._silent_since = None
            return None
        try:
            return Ended(*ray.get(self._waiting))
        except ray.exceptions.RayError as error:
            self._waiting = None
            return self._controller_silent(error)

    def stop(self) -> None:
        """Ask for an end at the next step, with a checkpoint. Asked again until a controller has heard it."""
        self._stopping = self._controller.request.remote("stop")

    def end(self, grace_seconds: float) -> None:
        """Remove every actor, worker and placement group of this job."""
        if self._engine.broken():
            self._engine.kill()
            return
        with contextlib.suppress(ray.exceptions.RayError):
            remove_controller()
            remove_agents(grace_seconds)
            placement.remove_all(self._engine.namespace)

    def _look_at_ray(self) -> None:
        """A local Ray without one of its own processes can't start anything any more: save what can be saved."""
        broken = self._engine.broken()
        if broken and not self._broken:
            self._broken = broken
            print(f"everstep: Ray's {broken} has died; stopping", file=sys.stderr, flush=True)
            self._stopping = self._controller.cannot_go_on.remote(f"Ray's {broken} has died")

    def _stop_if_asked(self) -> None:
        if self._stopping is None or not ray.wait([self._stopping], timeout=0)[0]:
            return
        try:
            ray.get(self._stopping)
            self._stopping = None
        except ray.exceptions.RayError:
            self.stop()

    def _controller_silent(self, error: Exception) -> Ended | None:
        """It is being restarted, most likely."""
        if self._broken:
            return Ended("failed", f"Ray's {self._broken} has died, and the job with it; go on with --resume")
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > GONE_PATIENCE_SECONDS:
            return Ended("failed", f"the controller is gone and Ray doesn't bring it back: {type(error).__name__}")
        time.sleep(RETRY_SECONDS)
        return None
