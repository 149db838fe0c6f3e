"""Links between simulated workers: one FIFO lane per direction and link, each pair with delays of its own.

A mesh promises what runtime/comm/link.py says. Besides that a link can be cut (what is under way is lost, both ends
notice later, each in its own time), a pair can be blocked (no new link until the block is lifted), a direction can be
partitioned (nothing passes until it is mended, then everything does; no end notices) or late, and of a dead worker's
last frames any number may still arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from runtime.comm.link import ConnectFailed, LinkCounters, LinkDown, LinkUp, Received
from runtime.protocol import Frame, FrameKind, WorkerId
from tests.sim.values import arrived

if TYPE_CHECKING:
    from tests.sim.engine import Engine
    from tests.sim.worker import SimWorker

POINT_OF = {
    FrameKind.CONTRIBUTION: "contributed",
    FrameKind.GRADIENT: "reduced",
    FrameKind.RECORD: "vote",
    FrameKind.PARAMETERS: "publish",
    FrameKind.SNAPSHOT: "fill",
    FrameKind.LOST: "lost",
}
FOREVER = float("inf")


class Lane:
    """One direction of one link. Frames that would arrive after ``lost_after`` are lost."""

    __slots__ = ("base", "last", "lost_after", "receiver", "sender")

    def __init__(self, sender: SimWorker, receiver: SimWorker, base: float) -> None:
        self.sender, self.receiver, self.base = sender, receiver, base
        self.last = 0.0
        self.lost_after = FOREVER


class SimMesh:
    """One worker's end of all its links."""

    def __init__(self, network: Network, owner: SimWorker) -> None:
        self.network, self.owner = network, owner
        self.counters: dict[WorkerId, LinkCounters] = {}
        self.out: dict[WorkerId, Lane] = {}  # what this end takes for its links
        self.into: dict[WorkerId, Lane] = {}
        self.dialing: set[WorkerId] = set()
        self._peers: set[WorkerId] = set()
        self.damages = False  # the next frame

    def peers(self) -> set[WorkerId]:
        return self._peers

    def connect(self, peer: WorkerId, address: object) -> None:
        if peer not in self.out and peer not in self.dialing:
            self.dialing.add(peer)
            self.network.dial(self.owner, peer)

    def send(self, peer: WorkerId, frame: Frame) -> bool:
        lane = self.out.get(peer)
        if lane is None:
            return False
        self.owner.at(POINT_OF[frame.kind])
        if frame.kind is FrameKind.PARAMETERS and self.owner.ahead:
            self.owner.at("ahead")
        self.put(lane, frame)
        return True

    def put(self, lane: Lane, frame: Frame) -> None:
        if self.owner.stopped:  # in the middle of what it was doing: the rest follows when it goes on
            self.owner.backlog.append((self.put, (lane, frame)))
            return
        if self.damages:
            self.damages, self.owner.impaired, lane.receiver.impaired = False, True, True
            self.network.cut(self.owner, lane.receiver)
        self.network.carry(lane, frame)

    def close(self, peer: WorkerId) -> None:
        self.dialing.discard(peer)
        lane = self.out.get(peer)
        if lane is not None:
            lane.lost_after = min(lane.lost_after, self.network.engine.now)
            self.gone(peer)
            self.network.tell_down(lane, "closed there")

    def here(self, peer: WorkerId, out: Lane, into: Lane) -> None:
        self.dialing.discard(peer)
        self.out[peer], self.into[peer] = out, into
        self._peers.add(peer)
        self.counters.setdefault(peer, LinkCounters()).links_opened += 1

    def gone(self, peer: WorkerId) -> None:
        self.out.pop(peer, None)
        self.into.pop(peer, None)
        self._peers.discard(peer)
        self.counters.setdefault(peer, LinkCounters()).links_closed += 1


class Network:
    def __init__(
        self, engine: Engine, base_seconds: Callable[[WorkerId], float], workers: dict[WorkerId, SimWorker]
    ) -> None:
        self.engine, self.base_seconds, self.workers = engine, base_seconds, workers
        self.bases: dict[tuple[WorkerId, WorkerId], float] = {}
        self.slow: dict[tuple[WorkerId, WorkerId], float] = {}  # factor
        self.late: dict[tuple[WorkerId, WorkerId], float] = {}  # seconds more
        self.partitioned: Counter[tuple[WorkerId, WorkerId]] = Counter()  # directions in which nothing passes
        self.parked: dict[tuple[WorkerId, WorkerId], list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self.blocked: set[frozenset[WorkerId]] = set()
        self.severed: set[frozenset[WorkerId]] = set()  # blocked for good: healing doesn't help
        self.calm = False  # healed: nothing is slow, held or blocked any more

    # --- frames -----------------------------------------------------------------------------------------------

    def carry(self, lane: Lane, frame: Frame) -> None:
        if self.partitioned and (lane.sender.id, lane.receiver.id) in self.partitioned:
            self.park(lane, self.carry, lane, frame)
            return
        arrival = max(lane.last + 1e-9, self.engine.now + self.delay(lane))
        lane.last = arrival
        self.engine.at(arrival, self.deliver, lane, frame)

    def delay(self, lane: Lane) -> float:
        random = self.engine.random.random
        seconds = lane.base * (0.2 + 1.6 * random())
        if self.calm:
            return seconds
        if random() < 0.01:
            seconds *= 30.0 * random()
        if self.slow or self.late:
            key = (lane.sender.id, lane.receiver.id)
            seconds = seconds * self.slow.get(key, 1.0) + self.late.get(key, 0.0)
        return seconds

    def deliver(self, lane: Lane, frame: Frame) -> None:
        receiver = lane.receiver
        if self.engine.now > lane.lost_after or receiver.mesh.into.get(lane.sender.id) is not lane:
            return
        if frame.payload is not None:
            payload = arrived(frame.payload)
            frame = Frame(frame.kind, frame.ballot, frame.step, frame.shard, frame.meta, payload)
        receiver.frame(lane.sender.id, frame)

    def base(self, sender: SimWorker, receiver: SimWorker) -> float:
        key = (sender.id, receiver.id)
        known = self.bases.get(key)
        if known is None:
            known = self.bases[key] = self.base_seconds(sender.id)
        return known

    # --- partitions -------------------------------------------------------------------------------------------

    def part(self, pairs: Iterable[tuple[WorkerId, WorkerId]]) -> None:
        """From now on nothing passes in these directions."""
        self.partitioned.update(pairs)

    def mend(self, pairs: Iterable[tuple[WorkerId, WorkerId]]) -> None:
        """What one partition did; where another still holds, nothing passes yet."""
        for pair in pairs:
            self.partitioned[pair] -= 1
            if self.partitioned[pair] <= 0:
                del self.partitioned[pair]
                for call, arguments in self.parked.pop(pair, ()):
                    call(*arguments)

    def mend_all(self) -> None:
        while self.partitioned:
            self.mend(list(self.partitioned))

    def park(self, lane: Lane, call: Callable[..., None], *arguments: Any) -> None:
        self.parked.setdefault((lane.sender.id, lane.receiver.id), []).append((call, arguments))

    def apart(self, pair: frozenset[WorkerId]) -> bool:
        """Whether no link can be made between these two."""
        there, back = tuple(pair), tuple(pair)[::-1]
        return pair in self.blocked or pair in self.severed or there in self.partitioned or back in self.partitioned

    # --- links ------------------------------------------------------------------------------------------------

    def dial(self, dialer: SimWorker, peer: WorkerId) -> None:
        base = self.bases.get((dialer.id, peer), 0.001)
        self.engine.after(self.engine.jitter(0.002 + 2 * base), self.dialed, dialer, peer)

    def dialed(self, dialer: SimWorker, peer: WorkerId) -> None:
        if not dialer.alive or peer not in dialer.mesh.dialing:
            return
        other = self.workers.get(peer)
        pair = frozenset((dialer.id, peer))
        if other is None or not other.alive or self.apart(pair):
            dialer.mesh.dialing.discard(peer)
            dialer.receive(dialer.on_link, ConnectFailed(peer, "refused"))
            return
        there = Lane(dialer, other, self.base(dialer, other))
        back = Lane(other, dialer, self.base(other, dialer))
        back.last = self.engine.now + self.engine.jitter(back.base)  # nothing comes before this end knows
        self.engine.at(back.last, self.up, dialer, other, there, back)
        self.up(other, dialer, back, there)

    def up(self, end: SimWorker, peer: SimWorker, out: Lane, into: Lane) -> None:
        """One end learns that there is a link; one that it had before is over."""
        if not end.alive:
            return
        if peer.id in end.mesh.out:
            self.down(end, end.mesh.into[peer.id], "replaced")
        if out.lost_after != FOREVER or into.lost_after < self.engine.now:  # broken before it was of use
            if peer.id in end.mesh.dialing:
                end.mesh.dialing.discard(peer.id)
                end.receive(end.on_link, ConnectFailed(peer.id, "broken at once"))
            return
        end.mesh.here(peer.id, out, into)
        end.receive(end.on_link, LinkUp(peer.id, b""))

    def cut(self, a: SimWorker, b: SimWorker) -> bool:
        """Break the link between two live workers. Each end notices in its own time. False if there was none."""
        found = False
        for end, other in ((a, b), (b, a)):
            out = end.mesh.out.get(other.id)
            if out is not None and out.lost_after == FOREVER:
                out.lost_after = self.engine.now
                self.tell_down(out, "cut")
                found = True
        return found

    def died(self, worker: SimWorker) -> None:
        """Of what it sent last, any part may still arrive."""
        random = self.engine.random
        for lane in worker.mesh.out.values():
            span = max(0.0, lane.last - self.engine.now)
            share = random.choice((0.0, 1.0, random.random()))
            lane.lost_after = min(lane.lost_after, self.engine.now + span * share)
            self.tell_down(lane, "reset by peer")

    def tell_down(self, lane: Lane, reason: str) -> None:
        """The receiving end notices after the last frame that it still gets."""
        if (lane.sender.id, lane.receiver.id) in self.partitioned:
            self.park(lane, self.tell_down, lane, reason)
            return
        notice = max(self.engine.now, min(lane.lost_after, lane.last)) + self.engine.jitter(0.001 + lane.base)
        self.engine.at(notice, self.down, lane.receiver, lane, reason)

    def down(self, end: SimWorker, into: Lane, reason: str) -> None:
        peer = into.sender.id
        if end.alive and end.mesh.into.get(peer) is into:
            end.mesh.gone(peer)
            end.receive(end.on_link, LinkDown(peer, reason, self.engine.now))


__all__ = ["Network", "Received", "SimMesh"]
