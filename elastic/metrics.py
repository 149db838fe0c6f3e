"""What one node agent serves to Prometheus: the job as its controller last told it, and the agent's own workers.

Every series is made from the current state at the moment of a scrape, so nothing of a dead worker can linger and
nothing that was set once can vanish. The registry is the agent's own: no series about the Python process.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataloader.errors import HostError
from runtime.protocol import StepRecord

BIND_PATIENCE_SECONDS = 2.0  # the agent that had the port may be on its way out


class AgentMetrics(Collector):
    """Feed it from one thread; scrapes come on others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._node = -1
        self._last: Mapping[str, Any] = {}  # the newest step record
        self._status: Mapping[str, Any] = {}
        self._tally: Mapping[str, Any] = {}
        self._workers: dict[int, dict[str, float]] = {}

    # --- in -----------------------------------------------------------------------------------------------------

    def welcome(self, node: int) -> None:
        with self._lock:
            self._node = node

    def job(self, status: Mapping[str, Any], tally: Mapping[str, Any]) -> None:
        """What the controller says: `Controller.status()` and `Tally.plain()`."""
        with self._lock:
            self._status, self._tally = status, tally
            self._newer(status.get("last") or {})

    def decided(self, record: StepRecord) -> None:
        """A step record that passed through this agent: known here even while there is no controller."""
        with self._lock:
            self._newer({name: getattr(record, name) for name in record.__slots__})

    def worker(self, worker: int, **values: float) -> None:
        """Of a living worker: `micro_batches` computed in its life, `optimizer_bytes` held, `up` 0 or 1."""
        with self._lock:
            self._workers.setdefault(worker, {}).update(values)

    def worker_gone(self, worker: int) -> None:
        with self._lock:
            self._workers.pop(worker, None)

    def _newer(self, record: Mapping[str, Any]) -> None:
        if record and record["step"] >= self._last.get("step", -1):
            self._last = record

    # --- out ----------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            metrics = [*self._step(), *self._job(), *self._own()]
        yield from metrics

    def _step(self) -> Iterator[Metric]:
        """The last decided step."""
        last = self._last
        if not last:
            return
        seconds = float(last["seconds"])
        yield _gauge("everstep_step", "Steps decided so far", last["step"] + 1)
        yield _gauge("everstep_loss", "Mean loss per token of the last step", last["loss"])
        yield _gauge("everstep_grad_norm", "Global gradient norm of the last step, before clipping", last["grad_norm"])
        yield _gauge("everstep_learning_rate", "Learning rate of the last step", last["lr"])
        yield _gauge("everstep_step_seconds", "Wall-clock seconds of the last step", seconds)
        rate = last["tokens"] / seconds if seconds > 0 else 0.0
        yield _gauge("everstep_tokens_per_second", "Tokens of the last step by its seconds", rate)
        phases = GaugeMetricFamily("everstep_step_phase_seconds", "Seconds by phase of the last step", labels=["phase"])
        for phase, value in last["phases"].items():
            phases.add_metric([str(phase)], float(value))
        yield phases

    def _job(self) -> Iterator[Metric]:
        status, tally = self._status, self._tally
        if not status:
            return
        members = [m for m in status["members"] if m["role"] == "member"]
        yield _gauge("everstep_workers", "Workers that train", len(members))
        yield _gauge("everstep_nodes_leaving", "Nodes told to go and not gone", len(status.get("leaving", ())))
        yield _gauge("everstep_generation", "Version of the membership", status["generation"])
        yield _gauge(
            "everstep_shards_without_backup",
            "Shards of which only one complete copy is held",
            status.get("shards_without_backup", 0),
        )
        injected = CounterMetricFamily("everstep_faults_injected", "Faults injected, by kind", labels=["kind"])
        for kind, count in tally["injected"].items():
            injected.add_metric([kind], count)
        yield injected
        found = CounterMetricFamily("everstep_faults_detected", "Faults, by how they were noticed", labels=["notice"])
        for notice, count in tally["detected"].items():
            found.add_metric([notice], count)
        yield found
        yield CounterMetricFamily("everstep_pauses", "Recoveries that are over", value=tally["pauses"])
        yield CounterMetricFamily(
            "everstep_pause_seconds", "Seconds for which waiting workers stood still", value=tally["pause_seconds"]
        )

    def _own(self) -> Iterator[Metric]:
        """This node's workers."""
        yield _gauge("everstep_node", "This agent's node number", self._node)
        up = sum(values.get("up", 0.0) for values in self._workers.values())
        yield _gauge("everstep_node_workers", "Workers of this node that are up, standbys included", up)
        computed = CounterMetricFamily(
            "everstep_worker_micro_batches", "Micro-batches computed by a worker of this node", labels=["worker"]
        )
        held = GaugeMetricFamily(
            "everstep_worker_optimizer_bytes", "Optimizer state held by a worker of this node", labels=["worker"]
        )
        for worker, values in sorted(self._workers.items()):
            computed.add_metric([str(worker)], values.get("micro_batches", 0.0))
            held.add_metric([str(worker)], values.get("optimizer_bytes", 0.0))
        yield computed
        yield held


def _gauge(name: str, about: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=float(value))


class MetricsServer:
    """`/metrics` of one agent. Raises HostError that names metrics.port if the port is taken."""

    def __init__(self, metrics: AgentMetrics, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        self._server, self._thread = _bind(registry, host, port)
        self.port = int(self._server.server_port)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes its thread, which else looks twice a second
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _bind(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    deadline = time.monotonic() + BIND_PATIENCE_SECONDS
    while True:
        try:
            return start_http_server(port, addr=host, registry=registry)
        except OverflowError:
            raise HostError(f"metrics.port: {port} is beyond 65535; set it to 0 for a free one") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = error.strerror or str(error)
                raise HostError(
                    f"metrics.host: can't serve metrics at {host}:{port}: {why}; set metrics.host"
                ) from None
            if time.monotonic() > deadline:
                raise HostError(
                    f"metrics.port: {port} is taken on this machine; set another, or 0 for a free one"
                    " (an agent's is metrics.port + its place among the nodes)"
                ) from None
        time.sleep(0.1)
