"""The node agent as a Ray actor: gives the agent its controller, and the controller its agent.

Rules of this room: `report` and `introduce` don't wait for the controller. What it didn't get is noticed afterwards,
on a thread of its own; then the agent introduces itself until somebody hears it, and says again what must not be lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from dataloader.errors import EverstepError
from elastic import messages as m
from elastic.agent import Agent, AgentFacts
from elastic.cluster.drain import draining_seconds
from elastic.cluster.fate import die_with_raylet
from elastic.cluster.names import CONTROLLER, log_to
from elastic.wire import KEPT_KINDS, Plain, event_to_plain
from runtime.config import TrainConfig
from runtime.priority import answer_first

AGENT_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "concurrency_groups": {"watch": 2, "urgent": 2},
}
CHECK_PERIOD_SECONDS = 0.5
DRAIN_PERIOD_SECONDS = 1.0
SILENT_SECONDS = 3.0

log = logging.getLogger("everstep.agent")


class Relay:
    """The controller, as its agent reaches it: calls that nobody waits for, looked after by `look_after`."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._lock = threading.Lock()
        self._handle: Any = None
        self._introduction: Any = None  # the newest; None while the agent is about to make it
        self._called = False
        self._calls: list[tuple[Any, list[Plain]]] = []  # with events that must not be lost
        self._last: Any = None  # the newest of any kind
        self._unanswered: tuple[Any, float] | None = None  # the oldest call that is looked at, and since when

    def introduce(self, event: Plain, contact: Plain) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        with self._lock:
            self._introduction = self._controller().introduce.remote(event, {**contact, "node_id": node_id})

    def report(self, events: list[Plain]) -> None:
        call = self._controller().report.remote(self._slot, events)
        kept = [event for event in events if event["kind"] in KEPT_KINDS]
        with self._lock:
            self._last = call
            if kept:
                self._calls.append((call, kept))

    def look_after(self, agent: Agent, ended: threading.Event) -> None:
        """A thread's work: introduce the agent; whenever a call has failed, again, until one is heard."""
        lost: list[Plain] = []
        due = not self._call_in(agent)
        while not ended.wait(CHECK_PERIOD_SECONDS):
            self._say_if_unanswered()
            lost_now, failed = self._sort_calls()
            lost += lost_now
            under_way = self._introduction is None
            heard = None if under_way else _outcome(self._introduction)
            due = due or failed or heard is False
            if due and (heard is not None or not self._called):
                due = not self._call_in(agent)
            elif lost and heard:
                agent.report_again(lost)
                lost = []

    def _sort_calls(self) -> tuple[list[Plain], bool]:
        """Of the calls that are over: what must be said again, and whether any has failed."""
        with self._lock:
            calls, self._calls = self._calls, []
            if self._last is not None:
                calls.append((self._last, []))
                self._last = None
        outcomes = [(_outcome(call), call, kept) for call, kept in calls]
        with self._lock:
            self._calls = [(call, kept) for outcome, call, kept in outcomes if outcome is None] + self._calls
        failed = [kept for outcome, _, kept in outcomes if outcome is False]
        return [event for kept in failed for event in kept], bool(failed)

    def _say_if_unanswered(self) -> None:
        """A node that is cut off from the controller waits, and says so where people look first."""
        with self._lock:
            newest = self._last
        now = time.monotonic()
        if self._unanswered is not None and _outcome(self._unanswered[0]) is not None:
            if now >= self._unanswered[1] + SILENT_SECONDS:
                log.warning("the controller answers again, after %.0f s", now - self._unanswered[1])
            self._unanswered = None
        if self._unanswered is None and newest is not None:
            self._unanswered = (newest, now)
        elif self._unanswered is not None and 0 <= now - self._unanswered[1] - SILENT_SECONDS < CHECK_PERIOD_SECONDS:
            log.warning("the controller has not answered for %.0f s: the workers of this node wait", SILENT_SECONDS)

    def _call_in(self, agent: Agent) -> bool:
        """False if there is no controller of that name now."""
        try:
            self._controller()
        except ValueError:
            return False
        with self._lock:
            self._introduction, self._called = None, True
        agent.introduce()
        return True

    def _controller(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(CONTROLLER)
        return self._handle


def _outcome(call: Any) -> bool | None:
    """Did the call reach the controller? None: not known yet."""
    done, _ = ray.wait([call], timeout=0)
    if not done:
        return None
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        return False
    except ray.exceptions.RayError as error:
        log.error("the controller refused a call: %s", error)
    return True


class AgentActor:
    """`facts`: slot, run_dir, job, secret, host, strict_port, local, directory (to work in). Plain values."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        die_with_raylet()
        answer_first(whole_process=True)
        run_dir = Path(facts["run_dir"])
        log_to(run_dir / "logs" / f"agent-{facts['slot']}.log")
        with contextlib.suppress(OSError):  # on another host it may not be there
            os.chdir(facts["directory"])
        self._ended = threading.Event()
        self._watched = threading.Condition()
        self._watches = 0
        self._agent: Agent | None = None
        relay = Relay(facts["slot"])
        train = TrainConfig.model_validate(facts["job"]["train"])
        metrics = facts["job"]["metrics"]
        first_life = not ray.get_runtime_context().was_current_actor_reconstructed
        try:
            self._agent = Agent(
                AgentFacts(
                    slot=facts["slot"],
                    run_dir=run_dir,
                    job=facts["job"],
                    secret=facts["secret"],
                    host=facts["host"] or str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
                    metrics_host=metrics["host"],
                    metrics_port=metrics["port"] and metrics["port"] + facts["slot"],
                    strict_port=facts["strict_port"] and first_life,
                ),
                relay,
                lambda: _environment(train),
            )
        except EverstepError as error:
            log.error("%s", error)
            relay.report([event_to_plain(m.WorkerFailed(-1, str(error), True))])
            return
        self._agent.start()
        self._listen_for_notices(self._agent, facts["job"]["cluster"]["preemption_seconds"])
        threading.Thread(target=relay.look_after, args=(self._agent, self._ended), name="relay", daemon=True).start()

    def _listen_for_notices(self, agent: Agent, usual_seconds: float) -> None:
        """SIGTERM to this process, instead of what Ray does on one, and a drain of its Ray node. A handler can be set
        on the main thread only; that is where Ray runs an actor's constructor."""
        signal.signal(signal.SIGTERM, lambda *_: agent.preempt(usual_seconds, "SIGTERM"))
        node_id = ray.get_runtime_context().get_node_id()

        def look() -> None:
            while not self._ended.wait(DRAIN_PERIOD_SECONDS):
                if (seconds := draining_seconds(node_id, usual_seconds)) is not None:
                    agent.preempt(seconds, "drain")
                    return

        threading.Thread(target=look, name="drain", daemon=True).start()

    def deliver(self, actions: list[Plain]) -> None:
        if self._agent is not None:
            self._agent.deliver(actions)

    def introduce(self) -> None:
        """A new controller asks."""
        if self._agent is not None:
            self._agent.introduce()

    @ray.method(concurrency_group="watch")
    def wait_closed(self, instance: str) -> str:
        """Never returns while this agent lives and nobody else watches: it is the call's failure that tells."""
        if self._agent is None or instance != self._agent.instance:
            return "gone"
        with self._watched:
            self._watches += 1
            mine = self._watches
            self._watched.notify_all()
            while mine == self._watches:
                self._watched.wait()
        return "superseded"

    @ray.method(concurrency_group="urgent")
    def die(self) -> None:
        while self._agent is not None and self._agent.is_cut:  # nothing reaches it
            time.sleep(CHECK_PERIOD_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    @ray.method(concurrency_group="urgent")
    def leave(self, grace_seconds: float) -> None:
        """Let all workers end what they write, and go. The actor itself is for the caller to kill."""
        self._ended.set()
        if self._agent is not None and not self._agent.leave(grace_seconds):
            log.error("workers of slot %s did not leave in time", self._agent.facts.slot)

    @ray.method(concurrency_group="urgent")
    def close(self, grace_seconds: float) -> tuple[int, str]:
        """End all workers; the agent's pid and Ray node. The actor itself is for the caller to kill."""
        self._ended.set()
        if self._agent is not None and not self._agent.close(grace_seconds):
            log.error("workers of slot %s did not end in time", self._agent.facts.slot)
        return os.getpid(), ray.get_runtime_context().get_node_id()


def _environment(train: TrainConfig) -> Mapping[str, str]:
    from runtime.numerics import environment  # brings in torch, so on the thread that forks

    return environment(train)
