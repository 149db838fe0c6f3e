"""The links of one worker to its peers: who dials whom, whom it should reach and can't, and what waits for a link.

The newer of two workers dials the older. Links are edited in place: a change of members closes those of who left and
opens those of who came; all others stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from runtime.comm.link import LinkDown, Mesh
from runtime.protocol import Frame, FrameKind, Plan, WorkerId
from runtime.step import StepTransaction

REDIAL_SECONDS = 0.2
REDIAL_WAITING_SECONDS = 0.5  # by who is no member yet, or has been cut off


class Tell(Protocol):
    """Say something to the agent."""

    def __call__(self, kind: str, /, **fields: object) -> None: ...


class Links:
    def __init__(self, mesh: Mesh, transaction: StepTransaction, tell: Tell) -> None:
        self.mesh, self.tx, self.tell = mesh, transaction, tell
        self.addresses: dict[WorkerId, tuple[str, int]] = {}
        self.redial: dict[WorkerId, float] = {}  # when
        self._first_round: set[WorkerId] | None = None  # older peers not tried yet, until the first round is over
        self._tried: set[WorkerId] = set()  # peers that it should have a link to, as it has dialled or had one
        self._unreached: tuple[WorkerId, ...] = ()  # as told
        self._queued: dict[WorkerId, list[Frame]] = {}

    def is_member(self, peer: WorkerId) -> bool:
        return self.tx.plan is not None and self.tx.plan.member(peer) is not None

    def send(self, to: WorkerId, frame: Frame) -> None:
        if to in self.mesh.peers():
            self.mesh.send(to, frame)
        else:
            self._queued.setdefault(to, []).append(frame)

    # --- what is wanted -----------------------------------------------------------------------------------------

    def learn(self, peers: Sequence[tuple[WorkerId, str, int]]) -> None:
        """Dial every older peer, by its (worker, host, port)."""
        first = not self.addresses
        self.addresses = {peer: (host, port) for peer, host, port in peers}
        older = {peer for peer in self.addresses if peer < self.tx.worker} - self.mesh.peers()
        if first:
            self._first_round = set(older)
        for peer in sorted(older):
            self.mesh.connect(peer, self.addresses[peer])
        self._tell_if_all_tried()

    def edit(self, plan: Plan, before: Plan | None) -> None:
        """Close only the links of those who left, open only those of who came."""
        gone = set(before.ids()) - set(plan.ids()) if before is not None else set()
        for peer in gone:
            self.mesh.close(peer)
        self._queued.clear()
        for peer in plan.ids():
            if peer < self.tx.worker and peer not in self.mesh.peers() and peer in self.addresses:
                self.mesh.connect(peer, self.addresses[peer])

    def dial_again(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer, due in self.redial.items() if due <= now]:
            del self.redial[peer]
            wanted = self.tx.plan is None or self.is_member(peer)
            if wanted and peer not in self.mesh.peers() and peer in self.addresses:
                self.mesh.connect(peer, self.addresses[peer])

    # --- what happens -------------------------------------------------------------------------------------------

    def up(self, peer: WorkerId) -> None:
        self.redial.pop(peer, None)
        for frame in self._queued.pop(peer, []):
            self.mesh.send(peer, frame)
        self._has_tried(peer)
        self._tell_reach()

    def not_reached(self, peer: WorkerId) -> None:
        if self.is_member(peer):  # who can't be reached for long has to go, or the step would wait for ever
            self.redial[peer] = time.monotonic() + REDIAL_SECONDS
            self.tell("LinkLost", peer=peer, time=time.time(), dialled=True)
        elif self.tx.plan is None:
            self.redial[peer] = time.monotonic() + REDIAL_WAITING_SECONDS
        self._has_tried(peer)
        self._tell_reach()

    def down(self, event: LinkDown) -> None:
        """Told to the agent and to all: nobody may sit out a time-out that somebody else has seen the reason for."""
        if event.local:
            return
        peer = event.peer
        if self.is_member(peer):
            self.tell("LinkLost", peer=peer, time=time.time() - (time.monotonic() - event.time))
            for other in self.mesh.peers():
                self.mesh.send(other, Frame(FrameKind.LOST, self.tx.promise, self.tx.step, peer))
        if self.tx.plan is None:
            self.redial[peer] = time.monotonic() + REDIAL_WAITING_SECONDS
            self._tell_reach()

    def down_elsewhere(self, reporter: WorkerId, peer: WorkerId) -> None:
        if peer != self.tx.worker and peer in self.mesh.peers() and self.is_member(peer):
            self.tell("LinkLost", worker=reporter, peer=peer, time=time.time())

    # --- what is told -------------------------------------------------------------------------------------------

    def _has_tried(self, peer: WorkerId) -> None:
        self._tried.add(peer)
        if self._first_round is not None and peer in self._first_round:
            self._first_round.discard(peer)
            self._tell_if_all_tried()

    def _tell_if_all_tried(self) -> None:
        if self._first_round is not None and not self._first_round:
            self._first_round = None
            self.tell("WorkerLinked")
            self._tell_reach()

    def _tell_reach(self) -> None:
        """Whom this worker can't reach though it should: it can't join those. A member tells of lost links instead."""
        peers = self.mesh.peers()
        self._tried |= peers
        lacking = (self._tried & self.addresses.keys()) - peers
        if self.tx.plan is not None:
            lacking &= set(self._unreached)
        if self._first_round is None and lacking != set(self._unreached):
            self._unreached = tuple(sorted(lacking))
            self.tell("WorkerLinked", unreached=self._unreached)
