"""Links between workers: the one interface that the step protocol sees, whatever carries the bytes.

A *mesh* is one worker's end of all its links. It says what happened as values (events) and does what it is told; it
decides nothing. When to dial, dial again or let go is the business of whoever owns the mesh.

What every mesh promises (tests/unit/runtime/comm/test_mesh.py holds them all to it):
- per established link: one `LinkUp`, then `Received` in the order sent, then one `LinkDown`. Frames that arrived
  before the link broke come before its `LinkDown`;
- at most one link per peer. If both ends dial, the dial of the higher worker id is kept, and both see one `LinkUp`;
- `connect` to a peer that is linked or being dialled does nothing; a dial that fails gives one `ConnectFailed`;
- nothing that happens on one link, or before a stranger has proved itself, touches another link or its socket;
- `send` never blocks. Large payloads are written straight from the caller's buffers: they must stay unchanged until
  the frame is out, that is until the step protocol lets them be overwritten (the receiver's answer shows that it has
  the frame, or its link is down), or until `unsent_bytes` is 0;
- a received payload is one writable memoryview, aligned to 64 bytes, the receiver's own for as long as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from runtime.protocol import Frame, WorkerId

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LinkUp:
    peer: WorkerId
    instance: bytes  # that process's own id: a worker id is one process for life


@dataclass(frozen=True, slots=True)
class LinkDown:
    peer: WorkerId
    reason: str
    time: float  # by the mesh's clock, when it was noticed
    local: bool = False  # this end closed it


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    peer: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    peer: WorkerId
    frame: Frame


Event: TypeAlias = LinkUp | LinkDown | ConnectFailed | Received


@dataclass(slots=True)
class LinkCounters:
    """What passed between this worker and one peer, over all their links."""

    links_opened: int = 0
    links_closed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


def total(counters: dict[WorkerId, LinkCounters]) -> LinkCounters:
    """The sum over peers."""
    return LinkCounters(
        links_opened=sum(c.links_opened for c in counters.values()),
        links_closed=sum(c.links_closed for c in counters.values()),
        bytes_sent=sum(c.bytes_sent for c in counters.values()),
        bytes_received=sum(c.bytes_received for c in counters.values()),
    )


class Mesh(Protocol):
    """One worker's links. Not thread-safe: it belongs to the control thread."""

    @property
    def worker(self) -> WorkerId: ...

    @property
    def address(self) -> Address:
        """Where peers dial this worker."""
        ...

    @property
    def counters(self) -> dict[WorkerId, LinkCounters]:
        """By peer, also of peers that are gone."""
        ...

    def connect(self, peer: WorkerId, address: Address) -> None:
        """Starts to dial; `LinkUp` or `ConnectFailed` follows. By custom the higher worker id dials the lower."""
        ...

    def send(self, peer: WorkerId, frame: Frame) -> bool:
        """Writes or queues the frame. False if there is no link to that peer (any more): the frame is dropped."""
        ...

    def close(self, peer: WorkerId) -> None:
        """Ends the link (`LinkDown` with ``local``) or gives the dial up; what is still queued is dropped."""
        ...

    def peers(self) -> set[WorkerId]:
        """The peers with an established link."""
        ...

    def unsent_bytes(self, peer: WorkerId) -> int:
        """What is queued for the peer and not yet taken by the kernel."""
        ...

    def socket_identity(self, peer: WorkerId) -> tuple[int, ...]:
        """Names the socket under the link: equal as long as, and only if, it is the same. KeyError without a link."""
        ...

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Waits until something happens, at most `timeout_seconds`; moves bytes; returns what happened, in order."""
        ...

    def shut(self) -> None:
        """Ends everything at once, without events. The mesh is of no use afterwards."""
        ...
