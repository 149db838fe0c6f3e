"""A TCP socket on its way to being a link: dialled or accepted, not yet authenticated.

It reads nothing but the fixed-size messages of the handshake, and never more than the next of them lacks. Driven by
readiness; never blocks; deadlines are its owner's business.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

from dataloader.errors import PeerError
from runtime.comm.handshake import Acceptor, Dialler

# A peer whose host is gone sends no reset. Links watch for that themselves (runtime/comm/silence.py), helped by the
# kernel's keep-alive, which a busy peer's kernel sends too; the kernel's own patience is for who never looks.
_KEEP_ALIVE_SECONDS = 1
_PATIENCE_SECONDS = 30
_SOCKET_BUFFER_BYTES = 4 << 20


def _kernel_limit(name: str) -> int:
    try:
        with open(f"/proc/sys/net/core/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def tune(sock: socket.socket) -> None:
    """Options of every link's socket; to be set before connect or listen, for the window scale to fit."""
    sock.setblocking(False)
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEP_ALIVE_SECONDS)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, _PATIENCE_SECONDS)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, _PATIENCE_SECONDS * 1000)
    # A size set by hand turns the kernel's own growing off, so it must be one that the kernel really grants.
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _kernel_limit(limit) >= _SOCKET_BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def reason_of(error: OSError | PeerError) -> str:
    if isinstance(error, PeerError):
        return str(error)
    return error.strerror or str(error)


class Attempt:
    """A socket on its way to being a link."""

    def __init__(
        self,
        sock: socket.socket,
        side: Dialler | Acceptor,
        deadline: float,
        *,
        proved: Callable[[Attempt], None],  # the handshake is complete (dialler) or wants its verdict (acceptor)
        failed: Callable[[Attempt, str], None],
        reached: Callable[[Attempt], None] = lambda attempt: None,  # the other host has answered a dial
    ) -> None:
        self.sock = sock
        self.side = side
        self.deadline = deadline
        self.over = False
        self._proved = proved
        self._failed = failed
        self._reached = reached
        self._connecting = isinstance(side, Dialler)
        self._said = b""

    @property
    def connecting(self) -> bool:
        return self._connecting

    @property
    def interest(self) -> int:
        return selectors.EVENT_WRITE if self._connecting else selectors.EVENT_READ

    def ready(self, mask: int) -> None:
        if self.over:
            return
        try:
            if self._connecting:
                self._connected()
            else:
                self._read()
        except (OSError, PeerError) as error:
            self._failed(self, reason_of(error))

    def say(self, message: bytes) -> None:
        """Handshake messages are so small that a fresh socket takes them whole; one that doesn't is no use."""
        if message and self.sock.send(message, socket.MSG_NOSIGNAL) != len(message):
            raise PeerError("its connection takes no bytes")

    def hung_up(self) -> bool:
        """The other end has closed already: it no longer waits for the verdict."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False

    def _connected(self) -> None:
        assert isinstance(self.side, Dialler)
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self._connecting = False
        self._reached(self)
        self.say(self.side.hello)

    def _read(self) -> None:
        while not self.over and self.side.needs:
            try:
                data = self.sock.recv(self.side.needs - len(self._said))
            except BlockingIOError:
                return
            if not data:
                raise PeerError("it hung up during the handshake (does it have another job's secret?)")
            self._said += data
            if len(self._said) == self.side.needs:
                message, self._said = self._said, b""
                self.say(self.side.receive(message))
                if not self.side.needs:
                    self._proved(self)
