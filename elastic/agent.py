"""The node agent: starts this node's workers, passes on what they say and what they are told, sees them exit.

    controller ──deliver──▶ ┌───────────────┐ ◀──unix socket──▶ workers
    controller ◀──report─── │ control thread│ ◀──pidfd── worker processes ◀──fork── forker thread
                            └───────────────┘

Rules of this room: no Ray; the controller is a `Controller`, whose calls don't wait. One control thread owns sockets,
pidfds and all that is known of workers; other threads leave commands and wake it. It decides nothing about membership.
What it says keeps its order: events that bear waiting wait for company, but never longer than a moment, and go ahead
of anything urgent.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dataloader.errors import EverstepError, HostError
from elastic import messages as m
from elastic.crew import Crew
from elastic.metrics import AgentMetrics, MetricsServer
from elastic.processes import WORKER_COMMAND, Forker
from elastic.wire import KEPT_KINDS, PATIENT_KINDS, Plain, action_from_plain, event_to_plain
from runtime import wall_clock
from runtime.comm.local import LocalServer, private_directory
from runtime.comm.loop import Wake, dispatch
from runtime.protocol import WorkerId
from runtime.thawing import thaw_later

PATIENCE_SECONDS = 0.02  # how long an event may wait for company
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
IDLE_SECONDS = 0.1  # how often workers are looked after
BEAT_SECONDS = 0.5  # how often the controller hears of this agent
BROKEN_EXIT_CODE = 70
DEADLINE_EXIT_CODE = 71
DEADLINE_MARGIN_SECONDS = 0.5  # before the node's deadline everybody is gone

log = logging.getLogger("everstep.agent")


class Controller(Protocol):
    """What an agent tells. Neither call waits for an answer."""

    def introduce(self, event: Plain, contact: Plain) -> None:
        """`event`: an AgentUp. `contact`: the agent's `pid` and where it serves `metrics`."""

    def report(self, events: list[Plain]) -> None: ...


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent is told at its birth."""

    slot: int
    run_dir: Path
    job: Mapping[str, Any]  # the resolved job file, plain values
    secret: bytes  # of the job: what workers prove to each other
    host: str  # this node's address, for peers
    metrics_host: str
    metrics_port: int  # 0: a free one
    strict_port: bool = True  # a taken port is an error, and not a reason to take another


@dataclass(slots=True)
class _Outgoing:
    events: list[Plain] = field(default_factory=list)
    due: float = float("inf")  # monotonic


class Agent:
    """`environment` makes what all workers have in their environment; it may take long, and is called on the forker.

    The constructor raises HostError if the metrics port is taken or there is no place for the socket.
    """

    def __init__(
        self,
        facts: AgentFacts,
        controller: Controller,
        environment: Callable[[], Mapping[str, str]],
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.facts = facts
        self.instance = os.urandom(8).hex()
        self.metrics = AgentMetrics()
        self._controller = controller
        self._commands: deque[Callable[[], None]] = deque()
        self._outgoing = _Outgoing()
        self._kill_at: float | None = None  # monotonic; set once it is closing
        self._beat_at = float("inf")  # monotonic; once it has introduced itself
        self._terminate_at = float("inf")  # monotonic; whoever was asked to leave is told to
        self._notice: tuple[float, str] | None = None  # its node goes away: when (monotonic), and how it was told
        self._cut_until = 0.0  # monotonic; an injected fault: nothing passes to or from the controller
        self._held: list[Mapping[str, Any]] = []  # actions that came meanwhile
        self._failed = False
        self._silent = False  # nothing is reported any more
        self._closed = threading.Event()
        self._stack = ExitStack()
        with self._stack:  # undone here if any of it fails
            self._selector = self._stack.enter_context(selectors.DefaultSelector())
            self._wake = Wake(self._selector)
            self._stack.callback(self._wake.close)
            self._served = _serve(self.metrics, facts)
            self._stack.callback(self._served.shut)
            directory = self._stack.enter_context(private_directory())
            server = LocalServer(directory / "agent", self._selector)
            self._stack.callback(server.shut)
            self._forker = Forker(command, environment, facts.run_dir / "logs", self._wake.set)
            self._crew = Crew(self._selector, self._forker, server, self.metrics, self._setup, self._say)
            self._stack = self._stack.pop_all()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)

    # --- from any thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._forker.begin()
        self._thread.start()

    def deliver(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Actions for this agent, in order, as plain values."""
        self._command(lambda: self._act(actions))

    def introduce(self) -> None:
        """Tell the controller, perhaps a new one, who is here."""
        self._command(self._introduce)

    def report_again(self, events: Sequence[Plain]) -> None:
        """These didn't reach the controller; say again what nobody else will."""
        for event in events:
            if event["kind"] in KEPT_KINDS:
                self._command(functools.partial(self._say, event))

    def preempt(self, seconds: float, notice: str) -> None:
        """Its node goes away in so many seconds: the controller is told, and nothing is left here after that."""
        by = time.monotonic() + seconds
        self._command(lambda: self._take_notice(by, notice))

    def leave(self, grace_seconds: float) -> bool:
        """Like `close`, but workers are first asked, and end what they write; all before the node's deadline."""
        if (notice := self._notice) is not None:
            grace_seconds = max(0.0, min(grace_seconds, notice[0] - time.monotonic() - DEADLINE_MARGIN_SECONDS))
        self._command(lambda: self._begin_to_close(grace_seconds, ask_first=True))
        return self._closed.wait(grace_seconds + 5.0)

    @property
    def is_cut(self) -> bool:
        """By an injected fault."""
        return time.monotonic() < self._cut_until

    def close(self, grace_seconds: float = GRACE_SECONDS) -> bool:
        """SIGTERM to all workers, SIGKILL after `grace_seconds`, everything reaped; False if even that took too long.

        Waits for it. Nothing is reported any more from now on.
        """
        self._command(lambda: self._begin_to_close(grace_seconds))
        return self._closed.wait(grace_seconds + 5.0)

    def _command(self, command: Callable[[], None]) -> None:
        if not self._closed.is_set():
            self._commands.append(command)
            self._wake.set()

    # --- the control thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._kill_at is None or self._crew:
                dispatch(self._selector, self._wait_seconds())
                try:
                    while self._commands:
                        self._commands.popleft()()
                    self._crew.turn()
                except EverstepError as error:
                    self._fail(error)
                self._insist()
                self._beat()
                self._take_held()
                self._send_if_due()
            self._outgoing.due = 0.0
            self._send_if_due()
            self._forker.end()
            self._stack.close()
            self._closed.set()
        except Exception:  # the process's edge: Ray brings the agent back, and its workers die with this one
            log.exception("the agent of slot %s failed", self.facts.slot)
            os._exit(BROKEN_EXIT_CODE)

    def _fail(self, error: EverstepError) -> None:
        """An agent that Ray brings back would meet the same, so this ends the job, with one line."""
        log.exception("the agent of slot %s failed", self.facts.slot)
        if not self._failed:
            self._failed = True
            self._say(event_to_plain(m.WorkerFailed(-1, f"the agent of slot {self.facts.slot}: {error}", True)))

    def _wait_seconds(self) -> float:
        if self.is_cut:
            return IDLE_SECONDS
        due = min(self._outgoing.due, self._terminate_at, float("inf") if self._kill_at is None else self._kill_at)
        if self._notice is not None:
            due = min(due, self._notice[0])
        return min(IDLE_SECONDS, max(0.0, due - time.monotonic()))

    # --- to the controller --------------------------------------------------------------------------------------

    def _say(self, event: Plain) -> None:
        if self._silent:
            return
        outgoing = self._outgoing
        if outgoing.events and _supersedes(event, outgoing.events[-1]):
            outgoing.events[-1] = event
            return
        outgoing.events.append(event)
        patience = PATIENCE_SECONDS if event["kind"] in PATIENT_KINDS else 0.0
        outgoing.due = min(outgoing.due, time.monotonic() + patience)

    def _send_if_due(self) -> None:
        if self._outgoing.events and time.monotonic() >= self._outgoing.due and not self.is_cut:
            events, self._outgoing = self._outgoing.events, _Outgoing()
            self._controller.report(events)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._say(event_to_plain(m.AgentBeat(self.facts.slot, self.instance, time.time())))

    def _introduce(self) -> None:
        if self._silent:
            return
        if self.is_cut:
            self._held.append({"kind": "Introduce"})
            return
        self._beat_at = time.monotonic()
        host = self.facts.host if self.facts.metrics_host in ("0.0.0.0", "::") else self.facts.metrics_host
        event = {
            "kind": "AgentUp",
            "slot": self.facts.slot,
            "instance": self.instance,
            "host": self.facts.host,
            "workers": self._crew.up(),
            "starting": self._crew.starting(),
            "exited": self._crew.exited,
        }
        self._controller.introduce(event, {"pid": os.getpid(), "metrics": f"{host}:{self._served.port}"})
        self._say_notice()

    def _take_notice(self, by: float, notice: str) -> None:
        if self._notice is None or by < self._notice[0]:
            log.info("the node of slot %s goes away in %.1f s (%s)", self.facts.slot, by - time.monotonic(), notice)
            self._notice = (by, notice)
            self._say_notice()

    def _say_notice(self) -> None:
        if self._notice is not None:
            by, notice = self._notice
            seconds = max(0.0, by - time.monotonic())
            self._say(event_to_plain(m.Preempted(self.facts.slot, self.instance, seconds, notice)))

    # --- from the controller --------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Mapping[str, Any]]) -> None:
        for plain in actions:
            if plain["kind"] == "CutAgent":
                self._cut(plain["seconds"])
                continue
            if self.is_cut:
                self._held.append(plain)
                continue
            if plain["kind"] == "Introduce":
                self._introduce()
                continue
            if plain["kind"] == "JobFacts":
                self.metrics.job(plain["status"], plain["tally"])
                continue
            match action_from_plain(plain):
                case m.WelcomeAgent(_, node):
                    self.metrics.welcome(node)
                case m.StartWorker(_, worker):
                    if self._kill_at is None:
                        self._crew.start(worker)
                case m.KillWorker() as kill:
                    self._crew.kill(kill)
                case m.Freeze(_, worker, seconds, whole):
                    self._freeze(worker, seconds, whole)
                case m.Thaw(_, worker):
                    self._crew.thaw(worker)
                case m.JumpClock(_, seconds):
                    wall_clock.jump(seconds)
                    self._crew.tell_connected({"kind": "clock", "jump_seconds": seconds})
                case m.PreemptAgent(_, seconds):
                    self._take_notice(time.monotonic() + seconds, "injected")
                case m.ToWorker(_, worker, message):
                    self._crew.tell(worker, message)

    def _cut(self, seconds: float | None) -> None:
        self._cut_until = float("inf") if seconds is None else time.monotonic() + seconds
        if self.is_cut:
            log.warning("cut off from the controller, as was asked for: the workers of this node wait")

    def _take_held(self) -> None:
        if self._held and not self.is_cut:
            log.warning("the controller is in reach again")
            held, self._held = self._held, []
            self._act(held)

    def _freeze(self, worker: WorkerId, seconds: float | None, whole: bool) -> None:
        if worker >= 0:
            self._crew.freeze(worker, seconds)
            return
        pids = [*(self._crew.pids() if whole else []), os.getpid()]
        if seconds is not None:
            thaw_later(pids, seconds)
        for pid in pids:  # this one last
            os.kill(pid, signal.SIGSTOP)

    def _setup(self, worker: WorkerId) -> Plain:
        return {
            "kind": "setup",
            "worker": worker,
            "job": dict(self.facts.job),
            "run_dir": str(self.facts.run_dir),
            "secret": self.facts.secret,
            "host": self.facts.host,
            "clock_ahead_seconds": wall_clock.ahead_seconds(),
        }

    # --- the end --------------------------------------------------------------------------------------------------

    def _begin_to_close(self, grace_seconds: float, ask_first: bool = False) -> None:
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + grace_seconds
            self._terminate_at = now + (0.75 * grace_seconds if ask_first else 0.0)
            if ask_first:
                self._crew.tell_all({"kind": "leave"})
        elif not ask_first:  # in a hurry after all
            self._kill_at = min(self._kill_at, now + grace_seconds)
            self._terminate_at = min(self._terminate_at, now)
        if not ask_first:
            self._silent = True
            self._outgoing = _Outgoing()

    def _insist(self) -> None:
        now = time.monotonic()
        if self._notice is not None and now >= self._notice[0] and (self._crew or self._kill_at is None):
            log.error("the node of slot %s goes away before all is handed over", self.facts.slot)
            os._exit(DEADLINE_EXIT_CODE)  # its workers die with it
        if now >= self._terminate_at:
            self._terminate_at = float("inf")
            self._crew.signal_all(signal.SIGTERM)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = time.monotonic() + PATIENCE_SECONDS
            self._crew.signal_all(signal.SIGKILL)


def _serve(metrics: AgentMetrics, facts: AgentFacts) -> MetricsServer:
    try:
        return MetricsServer(metrics, facts.metrics_host, facts.metrics_port)
    except HostError:
        if facts.strict_port:
            raise
    return MetricsServer(metrics, facts.metrics_host, 0)


def _supersedes(newer: Plain, older: Plain) -> bool:
    """Progress says totals, so the newer of two about one step says it all."""
    same = ("kind", "worker", "step")
    return newer["kind"] == "Progress" and all(newer.get(name) == older.get(name) for name in same)
