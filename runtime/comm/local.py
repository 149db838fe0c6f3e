"""A worker and its node agent, over a unix socket: small messages, each a map of plain values.

    length 4 (big-endian) | msgpack map with string keys

Rules of the room:
- both ends use `Channel`, driven by the selector of their own control thread (`runtime.comm.loop`); it never blocks;
- lengths, and what may wait to be sent, are bounded; whoever breaks a bound loses the channel, not the process;
- the socket is in a private directory (0700) with a short path: the kernel allows 107 bytes, whatever the run's is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataloader.errors import HostError, InternalError, PeerError
from runtime.comm.frames import pack_plain, unpack_plain
from runtime.comm.outbox import Outbox

MESSAGE_LIMIT_BYTES = 16 << 20
UNSENT_LIMIT_BYTES = 64 << 20
PATH_LIMIT_BYTES = 100

_LENGTH = struct.Struct("!I")
_CHUNK_BYTES = 1 << 16
_TURN_BYTES = 1 << 20
_PREFIX = "everstep-sock-"


class Channel:
    """One end of the conversation. Once it is over `closed` says why; what had arrived before can still be read."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        unsent_limit_bytes: int = UNSENT_LIMIT_BYTES,
    ) -> None:
        self.closed: str | None = None
        self.peer_pid = _peer_pid(sock)
        self._sock = sock
        self._selector = selector
        self._limit_bytes = limit_bytes
        self._unsent_limit_bytes = unsent_limit_bytes
        self._outbox = Outbox()
        self._unread = bytearray()
        self._inbox: deque[dict[str, Any]] = deque()
        self._interest = selectors.EVENT_READ
        sock.setblocking(False)
        selector.register(sock, self._interest, self._ready)

    @property
    def unsent_bytes(self) -> int:
        return self._outbox.unsent_bytes

    def send(self, message: Mapping[str, Any]) -> bool:
        """Writes or queues it; False if the channel is closed. Raises InternalError if it isn't plain or too long."""
        data = pack_plain(message)
        if len(data) > self._limit_bytes:
            raise InternalError(f"message of {len(data):,} bytes is over the channel's {self._limit_bytes:,}")
        if self.closed is not None:
            return False
        was_empty = not self._outbox.unsent_bytes
        self._outbox.push([memoryview(_LENGTH.pack(len(data)) + data)])
        if was_empty:
            self._write()
        if self._outbox.unsent_bytes > self._unsent_limit_bytes:
            self.close(f"the other end leaves {self._outbox.unsent_bytes:,} bytes unread")
        return self.closed is None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived since the last call."""
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def close(self, reason: str = "closed here") -> None:
        if self.closed is None:
            self.closed = reason
            self._selector.unregister(self._sock)
            self._sock.close()
            self._outbox.clear()

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and self.closed is None:
            self._write()
        if mask & selectors.EVENT_READ and self.closed is None:
            self._read()

    def _write(self) -> None:
        try:
            self._outbox.write(self._sock, _TURN_BYTES)
        except OSError as error:
            self._read()  # what the other end said before it went
            self.close(error.strerror or str(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox.unsent_bytes else 0)
        if interest != self._interest:
            self._interest = interest
            self._selector.modify(self._sock, interest, self._ready)

    def _read(self) -> None:
        for _ in range(_TURN_BYTES // _CHUNK_BYTES):
            try:
                data = self._sock.recv(_CHUNK_BYTES)
                if not data:
                    raise PeerError("the other end closed it" + (" within a message" if self._unread else ""))
                self._unread += data
                self._split()
            except BlockingIOError:
                return
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            except PeerError as error:
                self.close(str(error))
                return
            if len(data) < _CHUNK_BYTES:
                return

    def _split(self) -> None:
        start = 0
        while len(self._unread) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._unread, start)
            if size > self._limit_bytes:
                raise PeerError(f"message of {size:,} bytes is over the channel's {self._limit_bytes:,}")
            end = start + _LENGTH.size + size
            if len(self._unread) < end:
                break
            message = unpack_plain(self._unread[start + _LENGTH.size : end])
            if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
                raise PeerError("a message must be a map with string keys")
            self._inbox.append(message)
            start = end
        del self._unread[:start]


class LocalServer:
    """The agent's end: listens at `path` until `shut`, and hands out a `Channel` per worker that comes."""

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        size = len(os.fsencode(path))
        if size > PATH_LIMIT_BYTES:
            raise HostError(f"{path}: a socket's path of {size} bytes is too long: use a shorter directory")
        self.path = path
        self._selector = selector
        self._accepted: deque[Channel] = deque()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(os.fsencode(path))
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise HostError(f"{path}: can't listen there: {error.strerror}") from error
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def accepted(self) -> list[Channel]:
        """The channels opened since the last call. From now on they are the caller's to read and to close."""
        channels = list(self._accepted)
        self._accepted.clear()
        return channels

    def shut(self) -> None:
        """Stops listening; channels that were handed out stay."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for channel in self.accepted():
            channel.close()
        self.path.unlink(missing_ok=True)

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._listener.accept()
            self._accepted.append(Channel(sock, self._selector))


def connect_local(path: Path, selector: selectors.BaseSelector, timeout_seconds: float = 10.0) -> Channel:
    """The worker's end. Raises HostError if nobody listens at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_seconds)
    try:
        sock.connect(os.fsencode(path))
    except OSError as error:
        sock.close()
        raise HostError(f"{path}: no node agent listens there: {error.strerror or error}") from error
    return Channel(sock, selector)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory for sockets: mode 0700, short path, removed at the end.

    A killed process can't remove its own, so each new one also removes those that nobody locks any more; of these it
    takes nothing but sockets.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime if runtime and len(runtime) < 40 and os.access(runtime, os.W_OK) else "/tmp")
    _sweep(base)
    path, lock = _make_locked(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make_locked(base: Path) -> tuple[Path, int]:
    while True:
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise HostError(f"{base}: can't make a directory for sockets there: {error.strerror}") from error
        lock = _lock(path)
        if lock is not None:
            return path, lock
        # Somebody swept it between its making and its locking.


def _lock(path: Path) -> int | None:
    """Locks a directory until its process dies; None if it is locked, gone, or somebody else's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.getuid() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sweep(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        lock = _lock(path)
        if lock is not None:
            with contextlib.suppress(OSError):  # not empty, or another sweeper was faster
                for entry in path.iterdir():
                    if entry.is_socket():
                        entry.unlink()
                path.rmdir()
            os.close(lock)


def _peer_pid(sock: socket.socket) -> int:
    """The process at the other end, as the kernel says."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", data)[0]
    return pid
