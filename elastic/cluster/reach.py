"""The agents of a job, as its controller reaches them: found, started, watched, told, killed.

A dead agent is known by the failure of a call that never returns. No call here waits for an agent, and starting one,
for which Ray takes its time, has a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from elastic import messages as m
from elastic.cluster import placement
from elastic.cluster.agent_actor import AGENT_OPTIONS, AgentActor
from elastic.cluster.names import agent_name, agent_slot
from elastic.config import JobConfig
from elastic.rundir import RunDirectory, write_atomic
from elastic.wire import Plain

LEAVE_SECONDS = 20.0  # for workers to write what they are writing; an agent knows of deadlines that come earlier
LEAVE_PATIENCE_SECONDS = 6.0

log = logging.getLogger("everstep.controller")


@dataclass(slots=True)
class Contact:
    """One agent. `instance` is empty until it has introduced itself, and again when it is lost."""

    handle: Any
    instance: str = ""
    pid: int = 0
    node_id: str = ""
    metrics: str = ""
    host: str = ""
    watch: Any = None  # the call that never returns
    cut_until: float = 0.0  # monotonic; an injected fault: out of reach


class Agents:
    """`facts` are the controller's; `lost` is called, on a thread of Ray's, for an agent that is gone; `fail` for a
    start that Ray refuses."""

    def __init__(
        self,
        run: RunDirectory,
        job: JobConfig,
        facts: Mapping[str, Any],
        lost: Callable[[m.AgentDown], None],
        fail: Callable[[str], None],
    ) -> None:
        self._run, self._job, self._facts, self._lost, self._fail = run, job, facts, lost, fail
        self._contacts: dict[int, Contact] = {}
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
        self._node_id = ray.get_runtime_context().get_node_id()

    def find(self) -> set[int]:
        """Ask those that an earlier controller started to introduce themselves; their slots."""
        for name in ray.util.list_named_actors():
            slot = agent_slot(name)
            if slot is not None:
                with contextlib.suppress(ValueError):  # it has just died for good
                    handle = ray.get_actor(name)
                    self._contacts[slot] = Contact(handle)
                    handle.introduce.remote()
        return set(self._contacts)

    def slots(self) -> list[int]:
        """Of those that have introduced themselves and live."""
        return [slot for slot, contact in list(self._contacts.items()) if contact.instance]

    # --- coming and going -----------------------------------------------------------------------------------------

    def start(self, slot: int) -> None:
        known = self._contacts.get(slot)
        if known is not None and not known.instance:
            del self._contacts[slot]
        self._starter.submit(self._start, slot)

    def introduced(self, event: Plain, contact: Plain) -> None:
        """An agent says who and where it is; from now on it is watched."""
        slot, instance = event["slot"], event["instance"]
        known = self._contacts.get(slot) or Contact(ray.get_actor(agent_name(slot)))
        self._contacts[slot] = known
        if known.instance != instance:
            known.instance, known.pid, known.node_id = instance, contact["pid"], contact["node_id"]
            known.metrics, known.host = contact["metrics"], event["host"]
            known.watch = known.handle.wait_closed.remote(instance)
            known.watch.future().add_done_callback(lambda call: self._watch_ended(slot, instance, call))
            self._write_targets()

    def down(self, event: m.AgentDown) -> None:
        contact = self._contacts.get(event.slot)
        if contact is not None and contact.instance == event.instance:
            contact.instance, contact.metrics = "", ""
        self._write_targets()

    def kill(self, slot: int, again: bool) -> float | None:
        """SIGKILL; the moment of it. `again`: Ray brings it back."""
        contact = self._contacts.get(slot)
        if contact is None:
            return None
        moment = time.time()
        if not again:
            del self._contacts[slot]
            ray.kill(contact.handle, no_restart=True)
        if contact.node_id == self._node_id and contact.pid > 0 and time.monotonic() >= contact.cut_until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(contact.pid, signal.SIGKILL)
        elif again:
            contact.handle.die.remote()
        return moment

    def thaw(self, slot: int) -> None:
        """SIGCONT to an agent of this host and to its workers."""
        contact = self._contacts.get(slot)
        if contact is not None and contact.node_id == self._node_id and contact.pid > 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent = psutil.Process(contact.pid)
                for process in (*agent.children(), agent):
                    process.resume()

    def release(self, slot: int) -> None:
        """Its workers and then it may end, on a thread of its own: they end what they write."""
        contact = self._contacts.get(slot)
        if contact is not None:
            threading.Thread(target=self._release, args=(slot, contact), name=f"release-{slot}", daemon=True).start()

    def _release(self, slot: int, contact: Contact) -> None:
        call = contact.handle.leave.remote(LEAVE_SECONDS)
        ray.wait([call], timeout=LEAVE_SECONDS + LEAVE_PATIENCE_SECONDS)  # if it dies meanwhile, it is gone as well
        instance = contact.instance
        ray.kill(contact.handle, no_restart=True)
        placement.remove_later(self._facts["namespace"], self._job, slot)
        self._lost(m.AgentDown(slot, instance, time.time()))

    def deliver(self, slot: int, actions: list[Plain]) -> None:
        contact = self._contacts.get(slot)
        if contact is not None:
            for cut in [action["seconds"] for action in actions if action["kind"] == "CutAgent"]:
                contact.cut_until = float("inf") if cut is None else time.monotonic() + cut
            contact.handle.deliver.remote(actions)

    def _start(self, slot: int) -> None:
        facts = {
            "slot": slot,
            "run_dir": str(self._run.path),
            "job": self._job.model_dump(mode="json"),
            "strict_port": slot < self._job.cluster.nodes,
            **{name: self._facts[name] for name in ("secret", "host", "local", "directory")},
        }
        try:
            handle = (
                ray.remote(**AGENT_OPTIONS)(AgentActor)
                .options(
                    name=agent_name(slot),
                    lifetime="detached",
                    get_if_exists=True,
                    scheduling_strategy=placement.strategy(self._facts["namespace"], self._job, slot),
                )
                .remote(facts)
            )
        except Exception as error:  # a thread's edge
            log.exception("agent %s", slot)
            self._fail(f"Ray can't start the agent of slot {slot}: {type(error).__name__}: {error}")
        else:
            self._contacts.setdefault(slot, Contact(handle))  # it may have introduced itself already

    def _watch_ended(self, slot: int, instance: str, call: Any) -> None:
        if call.exception() is not None or call.result() != "superseded":
            self._lost(m.AgentDown(slot, instance, time.time()))

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
        try:
            write_atomic(self._run.prometheus_targets, json.dumps(targets, indent=1).encode(), durable=False)
        except OSError as error:  # nobody trains the worse for it
            log.error("%s: %s", self._run.prometheus_targets, error)
