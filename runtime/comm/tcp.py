"""The mesh over TCP: listens, dials, authenticates, and carries frames, all on one thread and one selector.

The control loop that it is made for::

    selector = selectors.DefaultSelector()
    mesh = TcpMesh(worker, instance=instance, secret=secret, host=host, selector=selector)
    agent = connect_local(path, selector)       # runtime/comm/local.py
    wake = Wake(selector)                       # runtime/comm/loop.py; the compute thread calls wake.set()
    while not done:
        for event in mesh.poll(seconds_until_next_deadline):   # the one wait; it also moves what the others wait for
            transaction.on(event)
        for message in agent.receive():
            transaction.told(message)
        for result in computed():               # a queue that the compute thread fills before wake.set()
            transaction.computed(result)

`poll` returns when anything on the selector was ready, so the list may be empty. A handler that computes for long
delays everybody: bytes then wait in the kernel.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from dataloader.errors import InternalError
from runtime.comm.buffers import PayloadBuffers
from runtime.comm.frames import PAYLOAD_LIMIT_BYTES
from runtime.comm.handshake import link_key
from runtime.comm.link import Address, ConnectFailed, Event, LinkCounters, LinkDown, LinkUp, Received
from runtime.comm.loop import dispatch
from runtime.comm.silence import LOOKS
from runtime.comm.tcp_door import Door
from runtime.comm.tcp_link import TcpLink
from runtime.protocol import Frame, WorkerId

_KEPT_BUFFER_BYTES = 256 << 20
SILENCE_SECONDS = 1.5


class TcpMesh:
    """One worker's TCP links; see `runtime.comm.link.Mesh` for what it promises.

    `host` is a numeric address of this machine that peers can reach; `secret` the job's, at least 16 bytes;
    `instance` 16 bytes that no other process has; payloads over `limit_bytes` are neither sent nor accepted.
    A link whose peer's host gives no sign of life for `silence_seconds` is down. `clock` gives seconds and dates the
    events. Raises HostError if it can't listen on `host`.
    """

    def __init__(
        self,
        worker: WorkerId,
        *,
        instance: bytes,
        secret: bytes,
        selector: selectors.BaseSelector,
        host: str = "127.0.0.1",
        limit_bytes: int = PAYLOAD_LIMIT_BYTES,
        handshake_seconds: float = 5.0,
        silence_seconds: float = SILENCE_SECONDS,
        strangers_limit: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._selector = selector
        self._limit_bytes = limit_bytes
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._looked = clock()  # at the links, for silent ones
        self._buffers = PayloadBuffers(_KEPT_BUFFER_BYTES)
        self._counters: dict[WorkerId, LinkCounters] = {}
        self._links: dict[WorkerId, TcpLink] = {}
        self._events: list[Event] = []
        self._damage_next = False
        self._door = Door(
            worker,
            instance,
            link_key(secret),
            host,
            selector=selector,
            handshake_seconds=handshake_seconds,
            reach_seconds=silence_seconds,
            strangers_limit=strangers_limit,
            clock=clock,
            linked=self._linked_instance,
            opened=self._link_up,
            failed=lambda peer, reason: self._events.append(ConnectFailed(peer, reason)),
        )

    @property
    def worker(self) -> WorkerId:
        return self._worker

    @property
    def address(self) -> Address:
        return self._door.address

    @property
    def counters(self) -> dict[WorkerId, LinkCounters]:
        return self._counters

    def peers(self) -> set[WorkerId]:
        return set(self._links)

    def unsent_bytes(self, peer: WorkerId) -> int:
        link = self._links.get(peer)
        return link.unsent_bytes if link else 0

    def socket_identity(self, peer: WorkerId) -> tuple[int, ...]:
        return self._links[peer].identity

    def connect(self, peer: WorkerId, address: Address) -> None:
        if peer == self._worker:
            raise InternalError(f"worker {peer} dials itself")
        if peer not in self._links:
            self._door.dial(peer, address)

    def send(self, peer: WorkerId, frame: Frame) -> bool:
        link = self._links.get(peer)
        if link is None:
            return False
        damaged, self._damage_next = self._damage_next, False
        link.send(frame, damaged)
        return not link.closed

    def close(self, peer: WorkerId) -> None:
        self._door.give_up(peer)
        if link := self._links.get(peer):
            link.close()
            self._link_down(link, "closed here", local=True)

    def poll(self, timeout_seconds: float) -> list[Event]:
        wait = 0.0 if self._events else max(0.0, timeout_seconds)
        deadline = self._door.next_deadline
        due = [] if deadline is None else [deadline]
        if self._links:
            due.append(self._looked + self._look_seconds)
        if due:
            wait = min(wait, max(0.0, min(due) - self._clock()))
        dispatch(self._selector, wait)
        if deadline is not None:
            self._door.expire(self._clock())
        self._look_at_links()
        events, self._events = self._events, []
        return events

    def bar(self, barred: Callable[[WorkerId], bool]) -> None:
        """An injected fault: these peers' dials come to nothing."""
        self._door.barred = barred

    def damage_next(self) -> None:
        """An injected fault: one bit of the next frame is flipped on the way."""
        self._damage_next = True

    def shut(self) -> None:
        self._door.shut()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._events.clear()

    @property
    def _look_seconds(self) -> float:
        return self._silence_seconds / LOOKS

    def _look_at_links(self) -> None:
        elapsed = self._clock() - self._looked
        if elapsed >= self._look_seconds:
            self._looked += elapsed
            for link in list(self._links.values()):
                link.look(elapsed)

    def _linked_instance(self, peer: WorkerId) -> bytes | None:
        link = self._links.get(peer)
        return link.instance if link else None

    def _link_up(self, sock: socket.socket, peer: WorkerId, instance: bytes) -> None:
        if old := self._links.get(peer):
            old.close()
            self._link_down(old, "the peer opened a new one")
        counters = self._counters.setdefault(peer, LinkCounters())
        counters.links_opened += 1
        self._events.append(LinkUp(peer, instance))
        self._links[peer] = TcpLink(
            sock,
            peer,
            instance,
            selector=self._selector,
            limit_bytes=self._limit_bytes,
            silence_seconds=self._silence_seconds,
            buffers=self._buffers,
            counters=counters,
            received=lambda peer, frame: self._events.append(Received(peer, frame)),
            broken=self._link_down,
        )

    def _link_down(self, link: TcpLink, reason: str, local: bool = False) -> None:
        del self._links[link.peer]
        self._counters[link.peer].links_closed += 1
        self._events.append(LinkDown(link.peer, reason, self._clock(), local))
