"""Links inside one process: the twin of the TCP mesh for tests and simulators, with a network that can be broken.

Rules of the room:
- no sockets, threads or waiting: what is sent is there at the receiver's next `poll`, sender by sender in FIFO order;
- with ``wire=True`` frames pass through the codec of the real wire (meta becomes plain, a list of buffers becomes one
  aligned memoryview). Buffers are read at delivery and not at `send`: whoever overwrites one too early is found out;
- with ``wire=False`` frames pass by reference, any values in them, and byte counters stay 0;
- a mesh learns of things only through `poll`, like over TCP: a link is no link for it before its `LinkUp`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from dataloader.errors import InternalError
from runtime.comm.frames import PAYLOAD_LIMIT_BYTES, Decoder, encode
from runtime.comm.link import Address, ConnectFailed, Event, LinkCounters, LinkDown, LinkUp, Received
from runtime.protocol import Frame, WorkerId

_HOST = "memory"
_Pair: TypeAlias = frozenset[WorkerId]
_Item: TypeAlias = LinkUp | LinkDown | Frame | list[memoryview]


class _Line:
    """One link: per end the queue of what that end has not seen yet."""

    def __init__(self, serial: int, pair: _Pair, limit_bytes: int) -> None:
        self.serial = serial
        self.pair = pair
        self.alive = True
        self.queues: dict[WorkerId, deque[_Item]] = {end: deque() for end in pair}
        self.decoders = {end: Decoder(limit_bytes) for end in pair}

    def other(self, end: WorkerId) -> WorkerId:
        (other,) = self.pair - {end}
        return other


class MemoryNetwork:
    """All the meshes of one test, and the wires between them."""

    def __init__(
        self,
        *,
        wire: bool = True,
        limit_bytes: int = PAYLOAD_LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wire = wire
        self.limit_bytes = limit_bytes
        self.clock = clock
        self.meshes: dict[WorkerId, MemoryMesh] = {}
        self._lines: dict[_Pair, _Line] = {}  # those alive
        self._cut: set[_Pair] = set()
        self._stalled: set[_Pair] = set()
        self._serial = 0

    def mesh(self, worker: WorkerId, instance: bytes | None = None) -> MemoryMesh:
        """A worker's end. Raises InternalError if that worker is there already."""
        if worker in self.meshes:
            raise InternalError(f"worker {worker} is on this network already")
        mesh = MemoryMesh(self, worker, worker.to_bytes(16, "big") if instance is None else instance)
        self.meshes[worker] = mesh
        return mesh

    def cut(self, a: WorkerId, b: WorkerId) -> None:
        """Their link breaks for both, what is under way is lost, and no dial goes through until `heal`."""
        pair = frozenset((a, b))
        self._cut.add(pair)
        if line := self._lines.get(pair):
            for queue in line.queues.values():
                kept = [item for item in queue if isinstance(item, (LinkUp, LinkDown))]
                queue.clear()
                queue.extend(kept)
            self.end_line(line, dict.fromkeys(pair, "cut"))

    def stall(self, a: WorkerId, b: WorkerId) -> None:
        """Nothing arrives between the two, and nothing tells them, until `heal`: a frozen peer or a silent net."""
        self._stalled.add(frozenset((a, b)))

    def heal(self, a: WorkerId, b: WorkerId) -> None:
        """Undoes `cut` and `stall`. A link that was cut stays down until somebody dials."""
        self._cut.discard(frozenset((a, b)))
        self._stalled.discard(frozenset((a, b)))

    def drop(self, worker: WorkerId) -> None:
        """The worker dies. What it has sent still arrives, then its links are down."""
        if mesh := self.meshes.get(worker):
            mesh.shut()

    def in_flight(self, sender: WorkerId, receiver: WorkerId) -> int:
        """Frames that the sender has sent on a living link and the receiver has not polled."""
        line = self._lines.get(frozenset((sender, receiver)))
        items = line.queues[receiver] if line else ()
        return sum(not isinstance(item, (LinkUp, LinkDown)) for item in items)

    # --- for the meshes ---------------------------------------------------------------------------------------

    def open_line(self, dialler: MemoryMesh, peer: WorkerId) -> str | None:
        """None if there is a link now, else why not."""
        pair = frozenset((dialler.worker, peer))
        acceptor = self.meshes.get(peer)
        if acceptor is None:
            return "nobody listens there"
        if pair in self._cut or pair in self._stalled:
            return "no way there"
        if pair not in self._lines:
            self._serial += 1
            line = self._lines[pair] = _Line(self._serial, pair, self.limit_bytes)
            for mesh, other in ((dialler, acceptor), (acceptor, dialler)):
                line.queues[mesh.worker].append(LinkUp(other.worker, other.instance))
                mesh.attach(line)
        return None

    def end_line(self, line: _Line, reasons: dict[WorkerId, str]) -> None:
        """The link is no more; each end named learns it after what it has still to read."""
        if line.alive:
            line.alive = False
            del self._lines[line.pair]
            for end, reason in reasons.items():
                line.queues[end].append(LinkDown(line.other(end), reason, self.clock()))

    def stalled(self, line: _Line) -> bool:
        return line.pair in self._stalled


class MemoryMesh:
    """One worker's end; see `runtime.comm.link.Mesh`. `poll` never waits."""

    def __init__(self, network: MemoryNetwork, worker: WorkerId, instance: bytes) -> None:
        self.instance = instance
        self._network = network
        self._worker = worker
        self._counters: dict[WorkerId, LinkCounters] = {}
        self._lines: list[_Line] = []  # in order of opening, until this end has seen them go
        self._links: dict[WorkerId, _Line] = {}  # what this end believes to be linked
        self._events: list[Event] = []

    @property
    def worker(self) -> WorkerId:
        return self._worker

    @property
    def address(self) -> Address:
        return _HOST, self._worker

    @property
    def counters(self) -> dict[WorkerId, LinkCounters]:
        return self._counters

    def peers(self) -> set[WorkerId]:
        return set(self._links)

    def unsent_bytes(self, peer: WorkerId) -> int:
        return 0

    def socket_identity(self, peer: WorkerId) -> tuple[int, ...]:
        return (self._links[peer].serial,)

    def connect(self, peer: WorkerId, address: Address) -> None:
        if peer == self._worker:
            raise InternalError(f"worker {peer} dials itself")
        if peer in self._links:
            return
        reason = "no such host" if address != (_HOST, peer) else self._network.open_line(self, peer)
        if reason:
            self._events.append(ConnectFailed(peer, reason))

    def send(self, peer: WorkerId, frame: Frame) -> bool:
        line = self._links.get(peer)
        if line is None:
            return False
        item: _Item = frame
        if self._network.wire:
            item = encode(frame, self._network.limit_bytes)
            self._counters[peer].bytes_sent += sum(map(len, item))
        if line.alive:  # else it is lost on the way, which this end can't know yet
            line.queues[peer].append(item)
        return True

    def close(self, peer: WorkerId) -> None:
        for line in [line for line in self._lines if line.other(self._worker) == peer]:
            self._network.end_line(line, {peer: "the peer closed it"})
            self._lines.remove(line)
        if self._links.pop(peer, None):
            self._counters[peer].links_closed += 1
            self._events.append(LinkDown(peer, "closed here", self._network.clock(), local=True))

    def poll(self, timeout_seconds: float = 0.0) -> list[Event]:
        events, self._events = self._events, []
        for line in list(self._lines):
            if not self._network.stalled(line):
                queue = line.queues[self._worker]
                while queue:
                    events += self._arrive(line, queue.popleft())
        return events

    def shut(self) -> None:
        for line in self._lines:
            peer = line.other(self._worker)
            self._network.end_line(line, {peer: "the peer closed it"})
        self._network.meshes.pop(self._worker, None)
        self._lines.clear()
        self._links.clear()
        self._events.clear()

    def attach(self, line: _Line) -> None:
        """For the network: a link to this end has been opened."""
        self._lines.append(line)

    def _arrive(self, line: _Line, item: _Item) -> list[Event]:
        peer = line.other(self._worker)
        counters = self._counters.setdefault(peer, LinkCounters())
        if isinstance(item, LinkUp):
            self._links[peer] = line
            counters.links_opened += 1
            return [item]
        if isinstance(item, LinkDown):
            self._lines.remove(line)
            del self._links[peer]
            counters.links_closed += 1
            return [item]
        if isinstance(item, Frame):
            return [Received(peer, item)]
        frames: list[Frame] = []
        for part in item:
            counters.bytes_received += len(part)
            frames += line.decoders[self._worker].feed(part)
        return [Received(peer, frame) for frame in frames]
