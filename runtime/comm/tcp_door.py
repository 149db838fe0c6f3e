"""Where TCP links begin: listens, dials, and lets in only who knows the job's secret.

Rules of the room:
- a host must answer a dial within `reach_seconds`, its process, which may be busy, within `handshake_seconds`;
- at most one attempt per peer is dialled; at most `strangers_limit` accepted ones are unproved at a time, the oldest
  goes first; every attempt has a deadline;
- if two workers dial each other, the dial of the higher id stays. The lower one's is answered DUPLICATE and waits for
  the other to arrive, so that either a link or one failure comes of every dial;
- a proved peer that dials although a link to it is here has lost its end: the new link replaces the old one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Callable

from dataloader.errors import HostError
from runtime.comm.handshake import NONCE_BYTES, Acceptor, Dialler, Verdict
from runtime.comm.link import Address
from runtime.comm.tcp_attempt import Attempt, reason_of, tune
from runtime.protocol import WorkerId

_ACCEPTED_PER_TURN = 16
_LISTENER_REST_SECONDS = 0.2  # when the process has no file descriptor left


class Door:
    """One worker's listener and all its attempts at links. Raises HostError if it can't listen on `host`."""

    def __init__(
        self,
        worker: WorkerId,
        instance: bytes,
        key: bytes,
        host: str,
        *,
        selector: selectors.BaseSelector,
        handshake_seconds: float,
        reach_seconds: float,
        strangers_limit: int,
        clock: Callable[[], float],
        linked: Callable[[WorkerId], bytes | None],  # the instance that this worker has a link to, if any
        opened: Callable[[socket.socket, WorkerId, bytes], None],  # takes the socket over, still registered
        failed: Callable[[WorkerId, str], None],  # a dial came to nothing
    ) -> None:
        self._worker = worker
        self._instance = instance
        self._key = key
        self._selector = selector
        self._handshake_seconds = handshake_seconds
        self._reach_seconds = min(reach_seconds, handshake_seconds)
        self._strangers_limit = strangers_limit
        self._clock = clock
        self._linked = linked
        self._opened = opened
        self._failed = failed
        self._strangers: list[Attempt] = []  # accepted, not proved; oldest first
        self._dials: dict[WorkerId, Attempt] = {}
        self._yielded: dict[WorkerId, float] = {}  # own dial given up for the peer's -> when that is overdue
        self._rests_until: float | None = None
        self.refused = 0  # strangers that did not prove themselves
        self.barred: Callable[[WorkerId], bool] = lambda peer: False  # turned away although they prove themselves
        self._listener = _listen(host)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> Address:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def next_deadline(self) -> float | None:
        """When `expire` should be called, by the clock."""
        if not (self._strangers or self._dials or self._yielded or self._rests_until is not None):
            return None  # as nearly always; `poll` asks every time
        deadlines = [attempt.deadline for attempt in [*self._strangers[:1], *self._dials.values()]]
        deadlines += self._yielded.values()
        if self._rests_until is not None:
            deadlines.append(self._rests_until)
        return min(deadlines, default=None)

    def expire(self, now: float) -> None:
        while self._strangers and self._strangers[0].deadline <= now:
            self._stranger_failed(self._strangers[0], "too slow")
        for dial in [dial for dial in self._dials.values() if dial.deadline <= now]:
            limit = self._reach_seconds if dial.connecting else self._handshake_seconds
            self._dial_failed(dial, f"no answer within {limit:g} s")
        for peer in [peer for peer, deadline in self._yielded.items() if deadline <= now]:
            del self._yielded[peer]
            self._failed(peer, "it was dialling, too, and its dial did not arrive")
        if self._rests_until is not None and self._rests_until <= now:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def shut(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it may be resting, or closed already
            self._selector.unregister(self._listener)
        self._listener.close()
        for attempt in [*self._strangers, *self._dials.values()]:
            self._end(attempt)
        self._yielded.clear()
        self._rests_until = None

    # --- dialling ---------------------------------------------------------------------------------------------

    def dial(self, peer: WorkerId, address: Address) -> None:
        if peer in self._dials or peer in self._yielded:
            return
        sock = None
        try:
            family, target = _numeric(address)
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            tune(sock)
            code = sock.connect_ex(target)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            if sock is not None:
                sock.close()
            self._failed(peer, f"{address[0]}:{address[1]}: {reason_of(error)}")
            return
        side = Dialler(self._key, self._worker, self._instance, peer, os.urandom(NONCE_BYTES))
        self._dials[peer] = self._begin(sock, side, self._dial_proved, self._dial_failed)

    def give_up(self, peer: WorkerId) -> None:
        """Ends the dial to the peer, if there is one, without a word."""
        self._yielded.pop(peer, None)
        if dial := self._dials.get(peer):
            self._end(dial)

    def _host_answered(self, attempt: Attempt) -> None:
        attempt.deadline = self._clock() + self._handshake_seconds

    def _dial_proved(self, attempt: Attempt) -> None:
        side = attempt.side
        assert isinstance(side, Dialler)
        if side.verdict is Verdict.LINKED:
            self._hand_over(attempt)
        elif side.verdict is Verdict.DUPLICATE:
            self._end(attempt)
            self._yielded[side.peer] = self._clock() + self._handshake_seconds
        else:
            self._dial_failed(attempt, f"it is linked to another process that calls itself worker {self._worker}")

    def _dial_failed(self, attempt: Attempt, reason: str) -> None:
        self._end(attempt)
        self._failed(attempt.side.peer, reason)

    # --- accepting --------------------------------------------------------------------------------------------

    def _accept(self, mask: int) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone before it was accepted
            except OSError:  # no file descriptor left: established links must not pay for that with a busy loop
                self._selector.unregister(self._listener)
                self._rests_until = self._clock() + _LISTENER_REST_SECONDS
                return
            try:
                tune(sock)
            except OSError:  # gone already
                sock.close()
                continue
            # A right peer needs a round trip or two. Whoever has waited longest is the least likely to be one.
            if len(self._strangers) >= self._strangers_limit:
                self._stranger_failed(self._strangers[0], "too many strangers")
            side = Acceptor(self._key, self._worker, self._instance, os.urandom(NONCE_BYTES))
            self._strangers.append(self._begin(sock, side, self._stranger_proved, self._stranger_failed))

    def _stranger_proved(self, attempt: Attempt) -> None:
        side = attempt.side
        assert isinstance(side, Acceptor)
        if attempt.hung_up() or self.barred(side.peer):
            self._stranger_failed(attempt, "gone")
            return
        verdict = self._judge(side)
        attempt.say(side.welcome(verdict))
        if verdict is Verdict.LINKED:
            self._hand_over(attempt)
        else:
            self._end(attempt)

    def _judge(self, side: Acceptor) -> Verdict:
        linked = self._linked(side.peer)
        if linked is not None and linked != side.instance:
            return Verdict.OTHER_INSTANCE
        if side.peer in self._dials and self._worker > side.peer:
            return Verdict.DUPLICATE
        return Verdict.LINKED

    def _stranger_failed(self, attempt: Attempt, reason: str) -> None:
        self.refused += 1
        self._end(attempt)

    # --- attempts ---------------------------------------------------------------------------------------------

    def _begin(
        self,
        sock: socket.socket,
        side: Dialler | Acceptor,
        proved: Callable[[Attempt], None],
        failed: Callable[[Attempt, str], None],
    ) -> Attempt:
        patience = self._reach_seconds if isinstance(side, Dialler) else self._handshake_seconds
        attempt = Attempt(
            sock, side, self._clock() + patience, proved=proved, failed=failed, reached=self._host_answered
        )

        def ready(mask: int) -> None:
            before = attempt.interest
            attempt.ready(mask)
            if not attempt.over and attempt.interest != before:
                self._selector.modify(sock, attempt.interest, ready)

        self._selector.register(sock, attempt.interest, ready)
        return attempt

    def _end(self, attempt: Attempt, *, keep_socket: bool = False) -> None:
        attempt.over = True
        if attempt in self._strangers:
            self._strangers.remove(attempt)
        if self._dials.get(attempt.side.peer) is attempt:
            del self._dials[attempt.side.peer]
        if not keep_socket:
            self._selector.unregister(attempt.sock)
            attempt.sock.close()

    def _hand_over(self, attempt: Attempt) -> None:
        self._end(attempt, keep_socket=True)
        self.give_up(attempt.side.peer)  # one's own dial to the same peer
        self._opened(attempt.sock, attempt.side.peer, attempt.side.instance)


def _numeric(address: Address) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """Numbers only: looking a name up would block the control thread, and a name may mean another host elsewhere."""
    host, port = address
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, target


def _listen(host: str) -> socket.socket:
    sock = None
    try:
        family, target = _numeric((host, 0))
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        tune(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(128)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise HostError(
            f"links: can't listen on {host!r} ({reason_of(error)}): give this machine's numeric address"
        ) from error
    return sock
