"""The workers of one node, as their agent sees them: started, heard, told, killed, gone. The control thread's own.

    start ──forked──▶ process ──connects──▶ channel ──WorkerUp──▶ up ──exit seen──▶ last words read ──▶ gone

A channel belongs to the worker whose process is at its other end, as the kernel says; what it claims doesn't count.
An exit is the last thing that is heard of a worker. What it had said before is in its socket by then, so one wait of
the selector brings both, and the socket is read first.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dataloader.errors import PeerError
from elastic import messages as m
from elastic.detector import AwakeClock, Suspicion, WorkerWatch
from elastic.metrics import AgentMetrics
from elastic.processes import Failure, Forker, WorkerProcess, look_at
from elastic.wire import Plain, event_to_plain, from_worker
from runtime.comm.local import Channel, LocalServer
from runtime.protocol import WorkerId, record_from_plain
from runtime.thawing import thaw_later


@dataclass(slots=True)
class Worker:
    id: WorkerId
    process: WorkerProcess | None = None  # None until it is forked
    channel: Channel | None = None
    info: Plain | None = None  # of its WorkerUp
    linked: bool = False
    optimizer_bytes: int = 0
    computed: int = 0  # micro-batches in its life
    kill: m.KillWorker | None = None  # asked for before it was forked
    watch: WorkerWatch | None = None
    suspicion: Suspicion | None = None  # why it was killed
    exited: float | None = None  # wall clock


class Crew:
    """`setup` is what a worker is told when it has come; `say` takes the events for the controller."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        forker: Forker,
        server: LocalServer,
        metrics: AgentMetrics,
        setup: Callable[[WorkerId], Plain],
        say: Callable[[Plain], None],
    ) -> None:
        self._selector, self._forker, self._server = selector, forker, server
        self._metrics, self._setup, self._say = metrics, setup, say
        self._workers: dict[WorkerId, Worker] = {}
        self.exited: list[Plain] = []  # Exit, in its plain form, of all that have
        self._strangers: list[Channel] = []  # connected, and not known to be a worker of ours yet
        self._sent_to_all: signal.Signals | None = None  # so also to those who are being forked
        self._clock = AwakeClock()

    def __bool__(self) -> bool:
        return bool(self._workers)

    # --- what is asked for ----------------------------------------------------------------------------------------

    def start(self, worker: WorkerId) -> None:
        if worker in self._workers:
            return
        self._workers[worker] = Worker(worker)
        self._metrics.worker(worker, up=0)
        own = {
            "EVERSTEP_AGENT_SOCKET": str(self._server.path),
            "EVERSTEP_WORKER": str(worker),
            "EVERSTEP_PARENT": str(os.getpid()),
        }
        self._forker.start(worker, own)

    def kill(self, kill: m.KillWorker) -> None:
        worker = self._workers.get(kill.worker)
        if worker is None or worker.exited is not None:
            return
        if worker.process is None:
            worker.kill = kill
            return
        moment = time.time()
        worker.process.send(signal.SIGKILL)
        if kill.fault:
            self._say(event_to_plain(m.Killed(worker.id, moment)))

    def freeze(self, worker: WorkerId, seconds: float | None) -> None:
        """An injected fault."""
        known = self._workers.get(worker)
        if known is None or known.process is None or known.exited is not None:
            return
        if seconds is not None:
            thaw_later([known.process.pid], seconds)
        known.process.send(signal.SIGSTOP)
        self._say(event_to_plain(m.Killed(worker, time.time())))

    def thaw(self, worker: WorkerId) -> None:
        known = self._workers.get(worker)
        if known is not None and known.process is not None:
            known.process.send(signal.SIGCONT)

    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers.values() if w.process is not None and w.exited is None]

    def tell(self, worker: WorkerId, message: Mapping[str, Any]) -> None:
        known = self._workers.get(worker)
        if known is not None and known.channel is not None:
            known.channel.send(message)

    def tell_connected(self, message: Mapping[str, Any]) -> None:
        """All others learn it as they come (`setup`)."""
        for worker in self._workers.values():
            if worker.channel is not None:
                worker.channel.send(message)

    def tell_all(self, message: Mapping[str, Any]) -> None:
        """Whoever can't be told yet has nothing to end."""
        for worker in self._workers.values():
            if worker.channel is not None and worker.info is not None:
                worker.channel.send(message)
            elif worker.process is not None and worker.exited is None:
                worker.process.send(signal.SIGTERM)

    def signal_all(self, number: signal.Signals) -> None:
        self._sent_to_all = number
        for worker in self._workers.values():
            if worker.process is not None and worker.exited is None:
                worker.process.send(number)

    def up(self) -> list[Plain]:
        """WorkerInfo, in its plain form, of those that are up."""
        return [
            {**w.info, "linked": w.linked, "optimizer_bytes": w.optimizer_bytes, "computed": w.computed}
            for w in self._workers.values()
            if w.info is not None and w.exited is None
        ]

    def starting(self) -> list[WorkerId]:
        return [w.id for w in self._workers.values() if w.info is None and w.exited is None]

    # --- what happens ---------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Take in all that the selector's last wait has brought."""
        for started in self._forker.collect():
            self._forked(started)
        self._greet()
        for worker in list(self._workers.values()):
            self._listen(worker)
            if worker.exited is not None and worker.process is not None:
                self._gone(worker, worker.process.reap(), worker.exited)
        self._watch()

    def _watch(self) -> None:
        """Who hangs is killed here and now, before anybody hears of it: so its work is given away only after."""
        now = self._clock.advance(time.monotonic())
        for worker in self._workers.values():
            watch, process = worker.watch, worker.process
            if watch is None or process is None or worker.suspicion is not None or not watch.wants_a_look(now):
                continue
            if (seen := look_at(process.pid)) is not None and (suspicion := watch.judge(now, seen)) is not None:
                worker.suspicion = suspicion
                process.send(signal.SIGKILL)

    def _forked(self, started: WorkerProcess | Failure) -> None:
        worker = self._workers[started.worker]
        if isinstance(started, Failure):
            self._gone(worker, started.reason, time.time())
            return
        worker.process, worker.watch = started, WorkerWatch(self._clock.seconds)
        self._selector.register(started.pidfd, selectors.EVENT_READ, lambda _: self._exit_seen(worker))
        if self._sent_to_all is not None:
            started.send(self._sent_to_all)
        if worker.kill is not None:
            self.kill(worker.kill)

    def _greet(self) -> None:
        self._strangers += self._server.accepted()
        if not self._strangers:
            return
        by_pid = {w.process.pid: w for w in self._workers.values() if w.process is not None}
        unborn = any(w.process is None for w in self._workers.values())  # forked, perhaps, and not collected
        waiting = []
        for channel in self._strangers:
            worker = by_pid.get(channel.peer_pid)
            if worker is not None and worker.channel is None:
                worker.channel = channel
                channel.send(self._setup(worker.id))
            elif worker is None and unborn and channel.closed is None:
                waiting.append(channel)
            else:
                channel.close("not a worker of this agent, or its second channel")
        self._strangers = waiting

    def _listen(self, worker: Worker) -> None:
        if worker.channel is None:
            return
        for message in worker.channel.receive():
            if message.get("kind") == "Hello":
                continue  # greeted already
            try:
                if self._is_for_us(worker, message):
                    continue
                event = from_worker(worker.id, message)
                self._note(worker, event)
            except (PeerError, KeyError, TypeError, ValueError) as error:
                worker.channel.close(f"worker {worker.id} says what it may not: {error}")
                return
            self._say(event)

    def _is_for_us(self, worker: Worker, message: Mapping[str, Any]) -> bool:
        match message.get("kind"):
            case "Alive":
                if worker.watch is not None:
                    busy, usual = float(message["busy_seconds"]), float(message["usual_seconds"])
                    worker.watch.beat(self._clock.seconds, busy, usual, bool(message.get("may_wait")))
            case "Struck":  # an injected fault is about to hit it
                self._say(event_to_plain(m.Killed(worker.id, float(message["time"]))))
            case _:
                return False
        return True

    def _note(self, worker: Worker, event: Plain) -> None:
        match event["kind"]:
            case "WorkerUp":
                worker.info = event["info"]
                self._metrics.worker(worker.id, up=1)
            case "WorkerLinked":
                worker.linked = True
            case "Resumed" | "ShardFilled":
                self._holds(worker, event["optimizer_bytes"])
            case "Progress":
                worker.computed = event["total"]
                seconds = float(event.get("micro_batch_seconds", 0.0))
                self._metrics.worker(worker.id, micro_batches=float(event["total"]), micro_batch_seconds=seconds)
                self._holds(worker, event.get("optimizer_bytes", 0))
            case "StepsDecided":
                for record in event["records"][-1:]:
                    self._metrics.decided(record_from_plain(record))

    def _holds(self, worker: Worker, optimizer_bytes: int) -> None:
        worker.optimizer_bytes = optimizer_bytes
        self._metrics.worker(worker.id, optimizer_bytes=float(optimizer_bytes))

    def _exit_seen(self, worker: Worker) -> None:
        if worker.exited is None and worker.process is not None:
            worker.exited = time.time()
            self._selector.unregister(worker.process.pidfd)

    def _gone(self, worker: Worker, reason: str, moment: float) -> None:
        if worker.channel is not None:
            worker.channel.close("its process has ended")
        del self._workers[worker.id]
        self._metrics.worker_gone(worker.id)
        notice = "exit"
        if worker.suspicion is not None:
            notice, reason = worker.suspicion.kind, f"{worker.suspicion.reason}: killed"
        self.exited.append({"worker": worker.id, "reason": reason, "time": moment, "computed": worker.computed})
        self._say(event_to_plain(m.WorkerExited(worker.id, reason, moment, notice)))
