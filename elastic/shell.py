"""The shell around the controller: takes events in, one at a time, and does what the pure core asks for, in order.

    agents, requests, time ──▶ handle ──▶ core ──▶ actions ──▶ files of the run directory · agents (`Reach`) · the end

Rules of this room: no Ray; whatever is beyond this process is reached through `Reach`. What a later action relies on
is durable before that action. Nothing that takes long is done while events wait: manifests are written on a thread of
their own and come back as an event. An error that nobody can mend ends the job with one line.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from dataloader.errors import EverstepError, HostError, InternalError
from elastic import messages as m
from elastic.config import JobConfig
from elastic.controller_state import ControllerFacts
from elastic.durable import write_state
from elastic.messages import Action, Event
from elastic.policy import Policy
from elastic.record_lines import read_events, read_ledger
from elastic.records import EventLog, Ledger
from elastic.rundir import RunDirectory, write_atomic
from elastic.tally import Tally
from elastic.wire import Plain, action_to_plain
from runtime.checkpoint.catalogue import commit, newest
from runtime.checkpoint.manifest import Manifest, ShardEntry
from runtime.checkpoint.retention import prune
from runtime.checkpoint.store import LocalStore, may_pass
from runtime.guard import GuardRules
from runtime.protocol import Figures

STATUS_PERIOD_SECONDS = 0.2
RETRY_SECONDS = 0.5  # of a manifest that could not be written

LedgerFigures = Callable[[int, int], tuple[Figures, ...]]

log = logging.getLogger("everstep.controller")


class Core(Protocol):
    """The pure controller (elastic/controller.py)."""

    def start(self, now: float) -> list[Action]: ...
    def handle(self, event: Event, now: float) -> list[Action]: ...
    def status(self) -> dict[str, Any]: ...
    def place(self) -> tuple[int, int]: ...


class Reach(Protocol):
    """What the shell reaches outside: agents by slot, and itself. No call waits for the other side."""

    def start_agent(self, slot: int) -> None: ...
    def deliver(self, slot: int, actions: list[Plain]) -> None: ...

    def kill_agent(self, slot: int, again: bool) -> float | None:
        """The moment of the kill; None if there is nothing to kill."""

    def thaw_agent(self, slot: int) -> None: ...
    def release_agent(self, slot: int) -> None: ...
    def kill_controller(self) -> None: ...
    def freeze_controller(self, seconds: float | None) -> None: ...
    def kill_driver(self) -> None: ...
    def slots(self) -> list[int]: ...
    def wake(self, after_seconds: float) -> None: ...
    def ended(self, state: str, reason: str) -> None: ...


class Shell:
    """`core` is made from the records that the shell has read: `make_core(ledger_next, ledger_digest, checkpoint,
    ledger_figures)`."""

    def __init__(
        self,
        run: RunDirectory,
        job: JobConfig,
        reach: Reach,
        make_core: Callable[[int, Callable[[int], str | None], int | None, LedgerFigures], Core],
    ) -> None:
        self.run, self.job, self._reach = run, job, reach
        self._lock = threading.Lock()
        self._events, self._ledger = EventLog(run.events), Ledger(run.ledger)
        self._digests = [record.digest for record in read_ledger(run.ledger)]
        self.tally = Tally.of(read_events(run.events))
        self._store = LocalStore(run.checkpoints)
        whole = newest(self._store)
        self._manifest: Manifest | None = whole
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="manifest")
        self._waiting_manifests: list[m.WriteManifest] = []
        self._failing: tuple[float, str] = (0.0, "")  # injected: until when no manifest can be written, and how
        self._outgoing: dict[int, list[Plain]] = {}
        self._follow_ups: deque[Event] = deque()
        self._status_wanted = False
        self._status_written = float("-inf")
        self.end: tuple[str, str] | None = None
        version = None if whole is None else whole.version
        self.core = make_core(self._ledger.next_step, self._digest, version, self._figures)

    # --- in ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        with self._lock:
            self._guarded(lambda: self._perform(self.core.start(time.monotonic())))

    def handle(self, *events: Event) -> list[m.AppendEvent]:
        """Take events in, in order; the event records that they led to."""
        said: list[m.AppendEvent] = []
        with self._lock:
            self._follow_ups.extend(events)
            self._guarded(lambda: self._drain(said))
        return said

    def due(self) -> float | None:
        """Seconds until `refresh` has something to do; None if nothing is waiting."""
        if not self._status_wanted:
            return None
        return max(0.0, self._status_written + STATUS_PERIOD_SECONDS - time.monotonic())

    def refresh(self) -> None:
        """Write the status that the rate limit has held back."""
        with self._lock:
            self._guarded(self._publish)

    def fail(self, reason: str) -> None:
        """End the job for a reason that the core doesn't know."""
        with self._lock:
            self._fail(reason)

    def _drain(self, said: list[m.AppendEvent]) -> None:
        while self._follow_ups and self.end is None:
            actions = self.core.handle(self._follow_ups.popleft(), time.monotonic())
            said += [action for action in actions if isinstance(action, m.AppendEvent)]
            self._perform(actions)
        self._publish()

    def _guarded(self, work: Callable[[], None]) -> None:
        """The edge of the process: what goes wrong in here ends the job, with one line."""
        try:
            work()
        except EverstepError as error:
            log.error("%s", error)
            self._fail(str(error))
        except Exception as error:
            log.exception("the controller failed")
            self._fail(f"the controller failed: {type(error).__name__}: {error}; see {self.run.logs}/controller.log")

    # --- out ----------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        """In order. Actions for agents are collected as long as nothing else comes between, then sent as one call."""
        for action in actions:
            match action:
                case (
                    m.WelcomeAgent(slot)
                    | m.StartWorker(slot)
                    | m.KillWorker(slot)
                    | m.Freeze(slot)
                    | m.Thaw(slot)
                    | m.PreemptAgent(slot)
                    | m.CutAgent(slot)
                    | m.JumpClock(slot)
                    | m.ToWorker(slot)
                ):
                    self._outgoing.setdefault(slot, []).append(action_to_plain(action))
                case m.Wake(after_seconds):
                    self._reach.wake(after_seconds)
                case m.PublishStatus():
                    self._status_wanted = True
                case _:
                    self._send()
                    self._act(action)
        self._send()

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for slot, actions in outgoing.items():
            self._reach.deliver(slot, actions)

    def _act(self, action: Action) -> None:
        match action:
            case m.Persist(state):
                write_state(self.run, state, self.job.faults)
            case m.AppendEvent(kind, fields):
                self._append(kind, fields)
            case m.AppendLedger(record):
                if self._ledger.append(record):
                    self._digests.append(record.digest)
                self._write_ripe_manifests()
            case m.WriteManifest():
                self._waiting_manifests.append(action)
                self._write_ripe_manifests()
            case m.PruneCheckpoints():
                prune_old = functools.partial(prune, self._store, self.job.checkpoint.keep)
                self._writer.submit(
                    self._write, -1, "pruning checkpoints", prune_old
                )  # never between data and manifest
            case m.StartAgent(slot):
                self._reach.start_agent(slot)
            case m.KillAgent(slot, again):
                moment = self._reach.kill_agent(slot, again)
                if moment is not None:
                    self._follow_ups.append(m.Killed(-1, moment, slot))
            case m.ThawAgent(slot):
                self._reach.thaw_agent(slot)
            case m.ReleaseAgent(slot):
                self._reach.release_agent(slot)
            case m.KillController():
                self._publish(force=True)
                self._reach.kill_controller()
            case m.FreezeController(seconds):
                self._reach.freeze_controller(seconds)
            case m.FailStore(seconds, how):
                self._failing = (time.monotonic() + seconds, how)
            case m.KillDriver():
                self._reach.kill_driver()
            case m.End(state, reason):
                self._finish(state, reason)
            case _:
                raise InternalError(f"an action that the shell doesn't know: {action!r}")

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        step, generation = self.core.place()
        place = {"step": step, "generation": generation}
        self.tally.add(kind, fields)
        self._events.append(kind, **{"time": time.time(), **place, **fields})

    def _digest(self, step: int) -> str | None:
        return self._digests[step] if 0 <= step < len(self._digests) else None

    def _figures(self, end: int, count: int) -> tuple[Figures, ...]:
        """Of the last committed steps before `end`, so many at most: the guard's memory at a start or a rollback."""
        found: list[Figures] = []
        for step in reversed(range(end)):
            if len(found) >= count:
                break
            record = self._ledger.record(step)
            if record is not None and record.verdict == "commit":
                found.append((record.loss, record.grad_norm))
        return tuple(reversed(found))

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _write_ripe_manifests(self) -> None:
        """A checkpoint is not published before the ledger has all steps up to it: else a resumed run had a gap."""
        ripe = [w for w in self._waiting_manifests if w.version <= self._ledger.next_step]
        self._waiting_manifests = [w for w in self._waiting_manifests if w.version > self._ledger.next_step]
        for wanted in ripe:
            publish = functools.partial(self._write_manifest, wanted)
            self._writer.submit(self._write, wanted.version, f"checkpoint of version {wanted.version}", publish)

    def _write_manifest(self, wanted: m.WriteManifest) -> None:
        until, how = self._failing
        if time.monotonic() < until:
            raise HostError(f"{self.run.checkpoints}: can't be written: {how} (injected)") from OSError(how)
        self._ledger.sync()
        before = self._manifest = self._manifest or newest(self._store)
        if before is None:
            raise InternalError(f"{self.run.checkpoints}: no checkpoint of version 0 to take the layout from")
        entries = tuple(ShardEntry(**entry) for _, entry in sorted(wanted.shards.items()))
        commit(self._store, before.model_copy(update={"version": wanted.version, "shards": entries}))
        self.handle(m.CheckpointWritten(wanted.version))

    def _write(self, version: int, what: str, work: Callable[[], object]) -> None:
        """On the writer's thread: what goes wrong there ends the job too, but a disk that is full is waited for."""
        try:
            while self.end is None:
                try:
                    work()
                    return
                except HostError as error:
                    if not may_pass(error):
                        raise
                    self.handle(m.SaveDelayed(-1, version, str(error)))
                time.sleep(RETRY_SECONDS)
        except EverstepError as error:
            self.fail(str(error))
        except Exception as error:  # a thread's edge
            log.exception("%s", what)
            self.fail(f"{what}: {type(error).__name__}: {error}")

    # --- what people see ------------------------------------------------------------------------------------------

    def _publish(self, force: bool = False) -> None:
        """status.json, and the same to the agents, who serve it as metrics; at most so often, but always the last."""
        now = time.monotonic()
        if not self._status_wanted or (not force and now < self._status_written + STATUS_PERIOD_SECONDS):
            return
        self._status_wanted, self._status_written = False, now
        status = {**self.core.status(), "time": time.time()}
        if self.end is not None:
            status["state"] = self.end[0]
        write_atomic(self.run.status, json.dumps(_finite(status)).encode(), durable=False)
        facts = {"kind": "JobFacts", "status": status, "tally": self.tally.plain()}
        for slot in self._reach.slots():
            self._reach.deliver(slot, [facts])

    # --- the end --------------------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        if self.end is None:
            self._outgoing.clear()
            try:
                self._append("run_ended", {"state": "failed", "reason": reason})
            except EverstepError as error:
                log.error("%s", error)
            self._finish("failed", reason)

    def _finish(self, state: str, reason: str) -> None:
        self.end = (state, reason)
        self._status_wanted = True
        try:
            self._publish(force=True)
        except OSError as error:
            log.error("%s: %s", self.run.status, error)
        self._reach.ended(state, reason)


def _finite(value: Any) -> Any:
    """JSON has no NaN: floats that aren't finite become strings, as in the ledger."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value


def controller_facts(job: JobConfig) -> ControllerFacts:
    cluster, train = job.cluster, job.train
    return ControllerFacts(
        nodes=cluster.nodes,
        workers_per_node=cluster.workers_per_node,
        standbys=cluster.standbys,
        min_workers=cluster.min_workers,
        logical_ranks=train.logical_ranks,
        shards=train.shards,
        steps=train.steps,
        micro_batches_per_rank=train.micro_batches_per_rank,
        faults=job.faults,
        policy=Policy(**job.policy.model_dump()),
        balance=job.balance.terms,
        global_batch=train.global_batch,
        guard=GuardRules(**job.guard.model_dump()),
    )
