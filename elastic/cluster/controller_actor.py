"""The controller as a Ray actor: finds its agents, watches them, and lets the shell reach them.

    agents, requests ──Ray calls──▶ ┐
    pump: time, dead agents ──────▶ ┴ shell (one event at a time) ──▶ agents (Ray calls), files

A dead agent is known by the failure of a call that never returns. The job process is known to live by its lock; when it
is gone, everything of the job ends, on a cluster that isn't ours too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from dataloader.errors import EverstepError, PeerError
from elastic import messages as m
from elastic.cluster import placement
from elastic.cluster.agent_actor import AGENT_OPTIONS, AgentActor
from elastic.cluster.fate import die_with_raylet
from elastic.cluster.names import agent_name, agent_slot, log_to
from elastic.cluster.removal import remove_agents
from elastic.config import stored_job
from elastic.controller import Controller
from elastic.durable import new_incarnation, read_state
from elastic.faults import parse_fault
from elastic.rundir import RunDirectory, holder, write_atomic
from elastic.shell import Shell, controller_facts
from elastic.wire import Plain, event_from_plain

CONTROLLER_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "concurrency_groups": {"watch": 2},
}
LOCK_CHECK_SECONDS = 1.0
GRACE_SECONDS = 2.0

log = logging.getLogger("everstep.controller")


@dataclass(slots=True)
class Contact:
    """One agent, as the controller reaches it."""

    handle: Any
    instance: str = ""
    pid: int = 0
    node_id: str = ""
    metrics: str = ""
    host: str = ""
    watch: Any = None  # the call that never returns


class ControllerActor:
    """`facts`: run_dir, run_id, namespace, secret, local, host, directory. Plain values.

    The constructor never raises: what is wrong is the job's end, which `wait_end` tells.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        die_with_raylet(facts["local"])
        self._facts = facts
        self._run = RunDirectory(Path(facts["run_dir"]))
        log_to(self._run.logs / "controller.log")
        self._contacts: dict[int, Contact] = {}
        self._inbox: queue.SimpleQueue[m.AgentDown | None] = queue.SimpleQueue()
        self._tick_at = float("inf")
        self._end: tuple[str, str] | None = None
        self._ended = threading.Event()
        self._node_id = ray.get_runtime_context().get_node_id()
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
        run = self._run
        self._job = stored_job(run.job)

        def make_core(ledger_next: int, digest: Callable[[int], str | None], checkpoint: int | None) -> Controller:
            incarnation = new_incarnation(run, self._facts["run_id"], ledger_next)
            facts = controller_facts(self._job)
            return Controller(facts, read_state(run), incarnation, ledger_next, digest, checkpoint)

        shell = Shell(run, self._job, self, make_core)
        self._shell = shell
        self._find_agents()
        shell.start()
        core = shell.core
        if isinstance(core, Controller):
            for slot in sorted(core.returning - self._contacts.keys()):
                shell.handle(m.AgentDown(slot, "", time.time()))
        for contact in self._contacts.values():
            contact.handle.introduce.remote()

    def _find_agents(self) -> None:
        for name in ray.util.list_named_actors():
            slot = agent_slot(name)
            if slot is not None:
                with contextlib.suppress(ValueError):  # it has just died for good
                    self._contacts[slot] = Contact(ray.get_actor(name))

    # --- calls ------------------------------------------------------------------------------------------------

    def introduce(self, event: Plain, contact: Plain) -> None:
        """An agent is up, or heard that this controller is."""
        slot, instance = event["slot"], event["instance"]
        known = self._contacts.get(slot) or Contact(ray.get_actor(agent_name(slot)))
        self._contacts[slot] = known
        if known.instance != instance:
            known.instance, known.pid, known.node_id = instance, contact["pid"], contact["node_id"]
            known.metrics, known.host = contact["metrics"], event["host"]
            known.watch = known.handle.wait_closed.remote(instance)
            known.watch.future().add_done_callback(lambda call: self._agent_lost(slot, instance, call))
            self._write_targets()
        self._take([event])

    def report(self, slot: int, events: list[Plain]) -> None:
        """What an agent saw and its workers said, in order."""
        self._take(events)

    def request(self, fault: str) -> list[str]:
        """A fault from the command line; what became of it, in words."""
        fault = str(parse_fault(fault))
        if self._shell is None or self._end is not None:
            return [f"{fault}: too late, the job has ended"]
        said = self._shell.handle(m.FaultRequested(fault))
        words = {"fault_injected": "injected", "fault_skipped": "skipped"}
        lines = []
        for action in said:
            if action.kind in words and action.fields.get("fault") == fault:
                reason = action.fields.get("reason")
                lines.append(f"{fault}: {words[action.kind]}" + (f", {reason}" if reason else ""))
        return lines or [f"{fault}: under way"]

    @ray.method(concurrency_group="watch")
    def wait_end(self) -> tuple[str, str]:
        """(state, reason), once the job is at its end."""
        self._ended.wait()
        assert self._end is not None
        return self._end

    def _take(self, events: list[Plain]) -> None:
        if self._shell is None:
            return
        taken = []
        for plain in events:
            try:
                taken.append(event_from_plain(plain))
            except PeerError as error:
                log.error("%s", error)
        self._shell.handle(*taken)

    # --- time, and what nobody calls about ----------------------------------------------------------------------

    def _pump(self) -> None:
        check_at = time.monotonic() + LOCK_CHECK_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                event = self._inbox.get(timeout=self._pump_wait(check_at))
                if event is not None and self._shell is not None:
                    self._agent_down(event)
                    self._shell.handle(event)
            now = time.monotonic()
            if self._shell is not None:
                if now >= self._tick_at:
                    self._tick_at = float("inf")
                    self._shell.handle(m.Tick())
                self._shell.refresh()
            if now >= check_at:
                check_at = now + LOCK_CHECK_SECONDS
                if holder(self._run) is None:
                    self._leave()

    def _pump_wait(self, check_at: float) -> float:
        waits = [min(check_at, self._tick_at) - time.monotonic()]
        if self._shell is not None and (due := self._shell.due()) is not None:
            waits.append(due)
        return max(0.0, min(waits))

    def _agent_lost(self, slot: int, instance: str, call: Any) -> None:
        """On a thread of Ray's: only leave word."""
        if call.exception() is not None or call.result() != "superseded":
            self._inbox.put(m.AgentDown(slot, instance, time.time()))

    def _agent_down(self, event: m.AgentDown) -> None:
        contact = self._contacts.get(event.slot)
        if contact is not None and contact.instance == event.instance:
            contact.instance, contact.metrics = "", ""
        self._write_targets()

    def _leave(self) -> None:
        """The job process is gone without a word."""
        log.error("the job process is gone: ending everything of it")
        namespace = self._facts["namespace"]
        remove_agents(GRACE_SECONDS)
        placement.remove_all(namespace)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        os._exit(1)

    def _write_targets(self) -> None:
        """Prometheus' file_sd format."""
        targets = [
            {
                "targets": [contact.metrics],
                "labels": {"run": self._job.run.name, "slot": str(slot), "host": contact.host},
            }
            for slot, contact in sorted(self._contacts.items())
            if contact.metrics
        ]
        write_atomic(self._run.prometheus_targets, json.dumps(targets, indent=1).encode(), durable=False)

    # --- what the shell reaches ------------------------------------------------------------------------------------

    def start_agent(self, slot: int) -> None:
        facts = {
            "slot": slot,
            "run_dir": str(self._run.path),
            "job": self._job.model_dump(mode="json"),
            "strict_port": slot < self._job.cluster.nodes,
            **{name: self._facts[name] for name in ("secret", "host", "local", "directory")},
        }
        options = {
            "name": agent_name(slot),
            "lifetime": "detached",
            "get_if_exists": True,
            "scheduling_strategy": placement.strategy(self._facts["namespace"], self._job, slot),
        }
        self._contacts[slot] = Contact(ray.remote(**AGENT_OPTIONS)(AgentActor).options(**options).remote(facts))

    def deliver(self, slot: int, actions: list[Plain]) -> None:
        contact = self._contacts.get(slot)
        if contact is not None:
            contact.handle.deliver.remote(actions)

    def kill_agent(self, slot: int, again: bool) -> float | None:
        contact = self._contacts.get(slot)
        if contact is None:
            return None
        here = contact.node_id == self._node_id and contact.pid > 0
        if not again:
            del self._contacts[slot]
        moment = time.time()
        if not again:
            ray.kill(contact.handle, no_restart=True)
        if here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(contact.pid, signal.SIGKILL)
        elif again:
            contact.handle.die.remote()
        return moment

    def kill_controller(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def slots(self) -> list[int]:
        return [slot for slot, contact in list(self._contacts.items()) if contact.instance]

    def wake(self, after_seconds: float) -> None:
        self._tick_at = min(self._tick_at, time.monotonic() + after_seconds)
        self._inbox.put(None)

    def ended(self, state: str, reason: str) -> None:
        self._end = (state, reason)
        self._ended.set()
