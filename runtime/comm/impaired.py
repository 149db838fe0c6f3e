"""A mesh whose network can be made bad on command: fault injection on real processes.

    partition   frames to and from given peers are held, and arrive in order once it heals, as over TCP. A link that is
                held for as long as a silent host would be noticed ends as one (runtime/comm/silence.py); until it heals
                neither end can open another
    delay       each frame to given peers leaves so many seconds later
    corrupt     one bit of the next frame that is sent is flipped on the way

With nothing armed it is the mesh inside: the same events, calls and buffers. One end is enough: what it holds looks to
the other end as if the network had it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataloader.errors import InternalError
from runtime.comm.frames import HEADER
from runtime.comm.link import Address, ConnectFailed, Event, LinkCounters, LinkDown, Mesh, Received
from runtime.comm.tcp import SILENCE_SECONDS, TcpMesh
from runtime.protocol import Frame, WorkerId

WAYS = ("in", "out", "both")


@dataclass(frozen=True, slots=True)
class Partition:
    """`peers` are cut off; None: all. But never those in `spared`, who may share the host."""

    peers: frozenset[WorkerId] | None
    spared: frozenset[WorkerId]
    way: str
    until: float

    def cuts(self, peer: WorkerId, way: str) -> bool:
        """In that way; "": in any, as a handshake needs both."""
        meant = peer not in self.spared and (self.peers is None or peer in self.peers)
        return meant and (way == "" or self.way in (way, "both"))


@dataclass(slots=True)
class Held:
    """What is held of one link."""

    incoming: deque[Received] = field(default_factory=deque)
    outgoing: deque[tuple[float, Frame]] = field(default_factory=deque)  # due, frame
    cut_since: float | None = None


class ImpairedMesh:
    """See `runtime.comm.link.Mesh`; `silence_seconds` as the mesh inside has it."""

    def __init__(
        self,
        mesh: TcpMesh,
        *,
        silence_seconds: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mesh = mesh
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._partitions: list[Partition] = []
        self._delays: dict[WorkerId | None, float] = {}  # None: of all the others
        self._held: dict[WorkerId, Held] = {}
        self._dials: dict[WorkerId, tuple[float, Address]] = {}  # that hang; until when
        self._silenced: set[WorkerId] = set()  # links just ended here, as silent ones
        mesh.bar(self._is_cut)

    # --- what can be armed --------------------------------------------------------------------------------------

    def partition(
        self,
        peers: Iterable[WorkerId] | None,
        way: str | None = None,
        seconds: float | None = None,
        spared: Iterable[WorkerId] = (),
    ) -> None:
        """`way`: "in", "out" or both; for `seconds`, or until `heal`."""
        if way is not None and way not in WAYS:
            raise InternalError(f"a partition's way is one of {', '.join(WAYS)}, not {way!r}")
        until = float("inf") if seconds is None else self._clock() + seconds
        cut = None if peers is None else frozenset(peers)
        self._partitions.append(Partition(cut, frozenset(spared), way or "both", until))

    def heal(self) -> None:
        self._partitions.clear()

    def delay(self, peers: Collection[WorkerId] | None, seconds: float) -> None:
        """0: not any more."""
        if peers is None:
            self._delays = {None: seconds}
        else:
            self._delays |= dict.fromkeys(peers, seconds)

    def corrupt_next(self) -> None:
        self._mesh.damage_next()

    # --- the mesh -------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerId:
        return self._mesh.worker

    @property
    def address(self) -> Address:
        return self._mesh.address

    @property
    def counters(self) -> dict[WorkerId, LinkCounters]:
        return self._mesh.counters

    def peers(self) -> set[WorkerId]:
        return self._mesh.peers()

    def socket_identity(self, peer: WorkerId) -> tuple[int, ...]:
        return self._mesh.socket_identity(peer)

    def unsent_bytes(self, peer: WorkerId) -> int:
        held = self._held.get(peer)
        waiting = sum(_size(frame) for _, frame in held.outgoing) if held is not None else 0
        return waiting + self._mesh.unsent_bytes(peer)

    def connect(self, peer: WorkerId, address: Address) -> None:
        if not self._is_cut(peer):
            self._mesh.connect(peer, address)
        elif peer not in self._mesh.peers() and peer not in self._dials:
            self._dials[peer] = (self._clock() + self._silence_seconds, address)

    def send(self, peer: WorkerId, frame: Frame) -> bool:
        delay = self._delays.get(peer, self._delays.get(None, 0.0))
        held = self._held.get(peer)
        if not (delay or (held is not None and held.outgoing) or self._is_cut(peer, "out")):
            return self._mesh.send(peer, frame)
        if peer not in self._mesh.peers():
            return False
        self._hold(peer).outgoing.append((self._clock() + delay, frame))
        return True

    def close(self, peer: WorkerId) -> None:
        self._dials.pop(peer, None)
        self._held.pop(peer, None)
        self._mesh.close(peer)

    def poll(self, timeout_seconds: float) -> list[Event]:
        if not (self._partitions or self._held or self._dials):
            return self._mesh.poll(timeout_seconds)
        events: list[Event] = []
        self._pass_time(events)
        wait = 0.0 if events else max(0.0, min([timeout_seconds, *self._waits()]))
        for event in self._mesh.poll(wait):
            self._take(event, events)
        return events

    def shut(self) -> None:
        self._held.clear()
        self._dials.clear()
        self._mesh.shut()

    # --- what is held -----------------------------------------------------------------------------------------------

    def _is_cut(self, peer: WorkerId, way: str = "") -> bool:
        if not self._partitions:
            return False
        now = self._clock()
        return any(now < partition.until and partition.cuts(peer, way) for partition in self._partitions)

    def _hold(self, peer: WorkerId) -> Held:
        return self._held.setdefault(peer, Held())

    def _pass_time(self, events: list[Event]) -> None:
        """Whatever is due: dials fail or are made, what may pass passes, links that were held for too long end."""
        now = self._clock()
        self._partitions = [partition for partition in self._partitions if now < partition.until]
        for peer, (until, address) in list(self._dials.items()):
            if not self._is_cut(peer):
                del self._dials[peer]
                self._mesh.connect(peer, address)
            elif now >= until:
                del self._dials[peer]
                events.append(ConnectFailed(peer, f"no answer within {self._silence_seconds:g} s"))
        for peer in self._mesh.peers():
            if self._is_cut(peer) and self._hold(peer).cut_since is None:
                self._hold(peer).cut_since = now
        for peer, held in list(self._held.items()):
            self._let_pass(peer, held, now, events)
            if not self._is_cut(peer):
                held.cut_since = None
                if not held.outgoing:
                    del self._held[peer]
            elif held.cut_since is not None and now >= held.cut_since + self._silence_seconds:
                del self._held[peer]
                self._silenced.add(peer)
                self._mesh.close(peer)

    def _let_pass(self, peer: WorkerId, held: Held, now: float, events: list[Event]) -> None:
        if not self._is_cut(peer, "in"):
            events += held.incoming
            held.incoming.clear()
        if not self._is_cut(peer, "out"):
            while held.outgoing and held.outgoing[0][0] <= now:
                self._mesh.send(peer, held.outgoing.popleft()[1])

    def _waits(self) -> list[float]:
        """Until something is due."""
        now = self._clock()
        times = [partition.until for partition in self._partitions]
        times += [until for until, _ in self._dials.values()]
        for peer, held in self._held.items():
            if held.cut_since is not None:
                times.append(held.cut_since + self._silence_seconds)
            if held.outgoing and not self._is_cut(peer, "out"):
                times.append(held.outgoing[0][0])
        return [time - now for time in times]

    def _take(self, event: Event, events: list[Event]) -> None:
        match event:
            case Received(peer) if self._is_cut(peer, "in") or (peer in self._held and self._held[peer].incoming):
                self._hold(peer).incoming.append(event)
            case LinkDown(peer, _, noticed, True) if peer in self._silenced:
                self._silenced.discard(peer)
                events.append(LinkDown(peer, f"silent for {self._silence_seconds:.1f} s", noticed))
            case LinkDown(peer):
                self._held.pop(peer, None)
                events.append(event)
            case _:
                events.append(event)


def inject(mesh: Mesh, fault: Mapping[str, Any]) -> None:
    """Do to the links what an injected fault asks: its `kind` (elastic/faults.py), `peer`, `way`, `seconds`.

    `spared`: workers that a partition of all doesn't mean, as those of the same node. One of 0 seconds heals all.
    """
    if not isinstance(mesh, ImpairedMesh):
        raise InternalError("these links take no faults")
    peer, seconds = fault.get("peer"), fault.get("seconds")
    peers = None if peer is None else (peer,)
    match fault["kind"]:
        case "partition-worker" | "partition-node" if seconds == 0.0:
            mesh.heal()
        case "partition-worker" | "partition-node":
            mesh.partition(peers, fault.get("way"), seconds, fault.get("spared") or ())
        case "delay-worker":
            mesh.delay(peers, seconds or 0.0)
        case "corrupt-worker":
            mesh.corrupt_next()
        case other:
            raise InternalError(f"{other!r} is no fault of links")


def _size(frame: Frame) -> int:
    """What it would be on the wire, roughly."""
    parts = frame.payload if isinstance(frame.payload, (list, tuple)) else (frame.payload,)
    return HEADER.size + sum(memoryview(part).nbytes for part in parts if part is not None)
