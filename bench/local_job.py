"""A job without Ray: the real controller and real worker processes, with agent and shell played by this process.

For measuring (and testing) the step itself. Worker processes, links, shards, controller, checkpoints and messages are
those of production; only who carries the messages differs. `hold_at` parks all workers at the boundary of a step until
`release`, so that something else can be measured in between.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic import messages as m
from elastic.config import JobConfig
from elastic.controller import Controller
from elastic.processes import WORKER_COMMAND
from elastic.shell import controller_facts
from elastic.wire import WORKER_KINDS, event_from_plain, from_worker
from runtime.checkpoint.catalogue import commit, newest
from runtime.checkpoint.manifest import ShardEntry
from runtime.checkpoint.store import LocalStore
from runtime.comm.local import Channel, LocalServer, private_directory
from runtime.comm.loop import dispatch
from runtime.numerics import environment
from runtime.protocol import StepRecord, WorkerId

ROOT = Path(__file__).resolve().parent.parent


class JobEnded(RuntimeError):
    """The job ended, or stood still, before what was waited for."""


@dataclass(slots=True)
class _Process:
    slot: int
    popen: subprocess.Popen[bytes]
    pidfd: int


class LocalJob:
    """Use as `with local_job(job, run) as running: running.until(...)`. One thread, one selector."""

    def __init__(self, job: JobConfig, run: Path, hold_at: frozenset[int], directory: Path) -> None:
        self.job, self.run = job, run
        self.hold_at = hold_at
        self.records: dict[int, StepRecord] = {}
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.parked: dict[int, set[WorkerId]] = {}  # step -> workers that wait at its boundary
        self.ended: tuple[str, str] | None = None
        self._plain = job.model_dump(mode="json")
        self._plain["faults"] += [{"at_step": step, "fault": "stop", "wait": True} for step in sorted(hold_at)]
        self._secret = os.urandom(32)
        self._selector = selectors.DefaultSelector()
        self._server = LocalServer(directory / "agent", self._selector)
        self._store = LocalStore(run / "checkpoints")
        self._processes: dict[WorkerId, _Process] = {}
        self._channels: dict[WorkerId, Channel] = {}
        self._unnamed: list[Channel] = []
        self._wakes: list[float] = []
        self._pending: deque[m.Event] = deque()
        (run / "weights").mkdir(parents=True)
        (run / "checkpoints").mkdir()
        self.controller = Controller(controller_facts(job), None, 1, 0, self._digest, None)
        self._perform(self.controller.start(time.monotonic()))

    # --- for whoever measures -----------------------------------------------------------------------------------

    def until(self, reached: Callable[[], bool], timeout_seconds: float) -> None:
        """Run the job until `reached()`. JobEnded if it ends before, or takes too long."""
        deadline = time.monotonic() + timeout_seconds
        while not reached():
            if self.ended is not None or time.monotonic() > deadline:
                status = self.controller.status()
                raise JobEnded(f"job {self.ended or 'takes too long'}; {status['state']} at step {status['step']}")
            self._turn(min(deadline - time.monotonic(), 0.5))

    def all_parked_at(self, step: int) -> bool:
        members = self.controller.ballots.members
        return bool(members) and self.parked.get(step, set()) >= members

    def release(self, step: int) -> None:
        self.hold_at -= {step}
        for worker in self.parked.pop(step, set()):
            self._tell(worker, {"kind": "release", "step": step})

    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes.values()]

    def shut(self) -> None:
        for process in self._processes.values():
            process.popen.kill()
            process.popen.wait()
            os.close(process.pidfd)
        for channel in [*self._channels.values(), *self._unnamed]:
            channel.close()
        self._server.shut()
        self._selector.close()

    # --- the agent's part -----------------------------------------------------------------------------------------

    def _turn(self, wait_seconds: float) -> None:
        now = time.monotonic()
        dispatch(self._selector, max(0.0, min([wait_seconds, *(due - now for due in self._wakes)])))
        self._greet()
        for worker, channel in list(self._channels.items()):
            for message in channel.receive():
                self._take_in(worker, message)
        now = time.monotonic()
        if any(due <= now for due in self._wakes):
            self._wakes = [due for due in self._wakes if due > now]
            self._pending.append(m.Tick())
        while self._pending and self.ended is None:
            self._perform(self.controller.handle(self._pending.popleft(), time.monotonic()))

    def _greet(self) -> None:
        self._unnamed += self._server.accepted()
        for channel in list(self._unnamed):
            for message in channel.receive():
                worker = message["worker"]
                self._unnamed.remove(channel)
                self._channels[worker] = channel
                channel.send(
                    {
                        "kind": "setup",
                        "worker": worker,
                        "job": self._plain,
                        "run_dir": str(self.run),
                        "secret": self._secret,
                        "host": "127.0.0.1",
                    }
                )

    def _take_in(self, worker: WorkerId, message: Mapping[str, Any]) -> None:
        if message["kind"] not in WORKER_KINDS:
            return  # meant for its agent alone, which watches it
        event = event_from_plain(from_worker(worker, message))
        if isinstance(event, m.WaitingAtGate) and event.step in self.hold_at:
            self.parked.setdefault(event.step, set()).add(worker)
        else:
            self._pending.append(event)

    def _start_worker(self, slot: int, worker: WorkerId) -> None:
        own = {
            "EVERSTEP_AGENT_SOCKET": str(self._server.path),
            "EVERSTEP_WORKER": str(worker),
            "EVERSTEP_PARENT": str(os.getpid()),
        }
        with (self.run / f"worker-{worker}.log").open("wb") as log:
            popen = subprocess.Popen(
                WORKER_COMMAND,
                env={**os.environ, **environment(self.job.train), **own},
                stdout=log,
                stderr=log,
                start_new_session=True,  # as torchelastic does: the kernel shares cores between sessions first
            )
        pidfd = os.pidfd_open(popen.pid)
        self._processes[worker] = _Process(slot, popen, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda mask: self._exited(worker))

    def _exited(self, worker: WorkerId) -> None:
        process = self._processes.pop(worker)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        if channel := self._channels.pop(worker, None):
            for message in channel.receive():
                self._take_in(worker, message)
            channel.close()
        self._pending.append(m.WorkerExited(worker, f"exit code {process.popen.wait()}", time.time()))

    def _tell(self, worker: WorkerId, message: Mapping[str, Any]) -> None:
        if channel := self._channels.get(worker):
            channel.send(message)

    # --- the shell's part -----------------------------------------------------------------------------------------

    def _digest(self, step: int) -> str | None:
        return self.records[step].digest if step in self.records else None

    def _perform(self, actions: list[m.Action]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: m.Action) -> None:
        match action:
            case m.StartAgent(slot):
                self._pending.append(m.AgentUp(slot, os.urandom(8).hex(), "127.0.0.1"))
            case m.StartWorker(slot, worker):
                self._start_worker(slot, worker)
            case m.ToWorker(_, worker, message):
                self._tell(worker, message)
            case m.KillWorker(_, worker, fault):
                self._kill(worker, fault)
            case m.AppendEvent(kind, fields):
                self.events.append((kind, fields))
            case m.AppendLedger(record):
                self.records[record.step] = record
            case m.WriteManifest(version, shards):
                base = newest(self._store)
                assert base is not None
                entries = tuple(ShardEntry(**entry) for _, entry in sorted(shards.items()))
                commit(self._store, base.model_copy(update={"version": version, "shards": entries}))
                self._pending.append(m.CheckpointWritten(version))
            case m.Wake(seconds):
                self._wakes.append(time.monotonic() + seconds)
            case m.End(state, reason):
                self.ended = (state, reason)
            case _:
                pass  # durable state and status are of no use to one process

    def _kill(self, worker: WorkerId, fault: bool) -> None:
        if process := self._processes.get(worker):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
            if fault:
                self._pending.append(m.Killed(worker, time.time()))


@contextlib.contextmanager
def local_job(job: JobConfig, run: Path, hold_at: frozenset[int] = frozenset()) -> Iterator[LocalJob]:
    """`run`: a directory that is not there yet."""
    with private_directory() as directory:
        running = LocalJob(job, run, hold_at, directory)
        try:
            yield running
        finally:
            running.shut()
