"""The controller as a Ray actor: gives the shell its agents, its time and its callers.

    agents, requests ──Ray calls──▶ ┐
    pump: time, dead agents ──────▶ ┴ shell (one event at a time) ──▶ agents (Ray calls), files

The job process is known to live by its lock; when it is gone, everything of the job ends, on a cluster that isn't ours
too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from dataloader.errors import EverstepError, PeerError
from elastic import messages as m
from elastic.cluster import placement
from elastic.cluster.fate import die_with_raylet
from elastic.cluster.names import log_to
from elastic.cluster.reach import Agents
from elastic.cluster.removal import remove_agents
from elastic.config import stored_job
from elastic.controller import Controller
from elastic.durable import new_incarnation, read_state
from elastic.faults import parse_fault
from elastic.rundir import RunDirectory, holder
from elastic.shell import LedgerFigures, Shell, controller_facts
from elastic.wire import Plain, event_from_plain
from runtime.priority import answer_first
from runtime.thawing import thaw_later

CONTROLLER_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "memory": 1,  # Ray puts an actor that asks for nothing on any host, whatever its affinity
    "max_restarts": -1,
    "max_task_retries": 0,
    "concurrency_groups": {"watch": 2, "pulse": 1},
}
LOCK_CHECK_SECONDS = 1.0
GRACE_SECONDS = 2.0

log = logging.getLogger("everstep.controller")


class ControllerActor:
    """`facts`: run_dir, run_id, namespace, secret, local, host, directory. Plain values.

    The constructor never raises: what is wrong is the job's end, which `wait_end` tells.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        die_with_raylet()
        answer_first(whole_process=True)
        self._facts = facts
        self._run = RunDirectory(Path(facts["run_dir"]))
        log_to(self._run.logs / "controller.log")
        self._inbox: queue.SimpleQueue[m.AgentDown | None] = queue.SimpleQueue()
        self._tick_at = float("inf")
        self._end: tuple[str, str] | None = None
        self._ended = threading.Event()
        self._agents: Agents | None = None
        self._shell: Shell | None = None
        try:
            self._begin()
        except EverstepError as error:
            self.ended("failed", str(error))
        except Exception as error:  # the process's edge
            log.exception("the controller can't start")
            self.ended("failed", f"the controller can't start: {type(error).__name__}: {error}")
        threading.Thread(target=self._pump, name="pump", daemon=True).start()

    def _begin(self) -> None:
        run, job = self._run, stored_job(self._run.job)
        cores: list[Controller] = []

        def make_core(
            ledger_next: int,
            digest: Callable[[int], str | None],
            checkpoint: int | None,
            figures: LedgerFigures,
        ) -> Controller:
            incarnation = new_incarnation(run, self._facts["run_id"], ledger_next)
            facts, state, epoch = controller_facts(job), read_state(run), time.time() - time.monotonic()
            cores.append(Controller(facts, state, incarnation, ledger_next, digest, checkpoint, epoch, figures))
            return cores[0]

        self._agents = Agents(run, job, self._facts, self._inbox.put, self._fail)
        self._shell = Shell(run, job, self, make_core)
        found = self._agents.find()
        self._shell.start()
        for slot in sorted(cores[0].returning - found):
            self._shell.handle(m.AgentDown(slot, "", time.time()))

    # --- calls ------------------------------------------------------------------------------------------------

    def introduce(self, event: Plain, contact: Plain) -> None:
        """An agent is up, or heard that this controller is."""
        if self._agents is not None:
            self._agents.introduced(event, contact)
            self._take(event["slot"], [event])

    def report(self, slot: int, events: list[Plain]) -> None:
        """What an agent saw and its workers said, in order."""
        self._take(slot, events)

    def request(self, fault: str) -> list[str]:
        """A fault from the command line; what became of it, in words."""
        fault = str(parse_fault(fault))
        if self._shell is None or self._end is not None:
            return [f"{fault}: too late, the job has ended"]
        lines = []
        for said in self._shell.handle(m.FaultRequested(fault)):
            if said.fields.get("fault") == fault and said.kind == "fault_injected":
                lines.append(f"{fault}: injected")
            elif said.fields.get("fault") == fault and said.kind == "fault_skipped":
                lines.append(f"{fault}: skipped, {said.fields.get('reason')}")
        return lines or [f"{fault}: under way"]

    def cannot_go_on(self, reason: str) -> None:
        if self._shell is not None and self._end is None:
            self._shell.handle(m.CannotGoOn(reason))

    @ray.method(concurrency_group="pulse")
    def ping(self) -> tuple[str, int]:
        """Its Ray node, and its pid there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="watch")
    def wait_end(self) -> tuple[str, str]:
        """(state, reason), once the job is at its end."""
        self._ended.wait()
        assert self._end is not None
        return self._end

    def _take(self, slot: int, events: list[Plain]) -> None:
        if self._shell is None:
            return
        taken = []
        for plain in events:
            try:
                taken.append(m.Told(slot, event_from_plain(plain)))
            except PeerError as error:
                log.error("%s", error)
        self._shell.handle(*taken)

    # --- time, and what nobody calls about ----------------------------------------------------------------------

    def _pump(self) -> None:
        check_at = time.monotonic() + LOCK_CHECK_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                self._agent_down(self._inbox.get(timeout=self._pump_wait(check_at)))
            now = time.monotonic()
            if self._shell is not None:
                if now >= self._tick_at:
                    self._tick_at = float("inf")
                    self._shell.handle(m.Tick())
                self._shell.refresh()
            if now >= check_at:
                check_at = now + LOCK_CHECK_SECONDS
                if self._is_orphaned():
                    self._leave()

    def _pump_wait(self, check_at: float) -> float:
        waits = [min(check_at, self._tick_at) - time.monotonic()]
        if self._shell is not None and (due := self._shell.due()) is not None:
            waits.append(due)
        return max(0.0, min(waits))

    def _is_orphaned(self) -> bool:
        """Whether the job process is gone. Where the lock can't be read now, that is for the next look."""
        try:
            return holder(self._run) is None
        except OSError as error:
            log.error("%s: %s", self._run.lock, error)
            return False

    def _agent_down(self, event: m.AgentDown | None) -> None:
        if event is not None and self._agents is not None and self._shell is not None:
            self._agents.down(event)
            self._shell.handle(event)

    def _leave(self) -> None:
        """The job process is gone without a word."""
        log.error("the job process is gone: ending everything of it")
        remove_agents(GRACE_SECONDS)
        placement.remove_all(self._facts["namespace"])
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        os._exit(1)

    def _fail(self, reason: str) -> None:
        if self._shell is not None:
            self._shell.fail(reason)

    # --- what the shell reaches ------------------------------------------------------------------------------------

    def start_agent(self, slot: int) -> None:
        if self._agents is not None:
            self._agents.start(slot)

    def deliver(self, slot: int, actions: list[Plain]) -> None:
        if self._agents is not None:
            self._agents.deliver(slot, actions)

    def kill_agent(self, slot: int, again: bool) -> float | None:
        return None if self._agents is None else self._agents.kill(slot, again)

    def release_agent(self, slot: int) -> None:
        if self._agents is not None:
            self._agents.release(slot)

    def slots(self) -> list[int]:
        return [] if self._agents is None else self._agents.slots()

    def thaw_agent(self, slot: int) -> None:
        if self._agents is not None:
            self._agents.thaw(slot)

    def kill_controller(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze_controller(self, seconds: float | None) -> None:
        if seconds is not None:
            thaw_later([os.getpid()], seconds)
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill_driver(self) -> None:
        if (driver := holder(self._run)) is not None and driver.pid is not None:
            os.kill(driver.pid, signal.SIGKILL)

    def wake(self, after_seconds: float) -> None:
        self._tick_at = min(self._tick_at, time.monotonic() + after_seconds)
        self._inbox.put(None)

    def ended(self, state: str, reason: str) -> None:
        self._end = (state, reason)
        self._ended.set()
