"""An established TCP link: frames in and out of one authenticated socket, driven by readiness, never blocking."""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable

from dataloader.errors import PeerError
from runtime.comm.buffers import PayloadBuffers
from runtime.comm.frames import PULSE, Decoder, encode
from runtime.comm.link import LinkCounters
from runtime.comm.outbox import Outbox
from runtime.comm.silence import Silence
from runtime.comm.tcp_attempt import reason_of
from runtime.protocol import Frame, WorkerId

# Bytes that one link may move per turn of the control loop, so that the others get theirs.
_TURN_BYTES = 4 << 20
# A link that broke while writing may still hold what the peer said before: at most this much is read of it.
_DRAIN_BYTES = 64 << 20
_TCP_INFO = struct.Struct("=3xB20xI112xI")  # of the kernel's struct tcp_info: probes, unacked, segs_in
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpLink:
    """An established link. `broken` is called once, when it is down for another reason than `close`."""

    def __init__(
        self,
        sock: socket.socket,
        peer: WorkerId,
        instance: bytes,
        *,
        selector: selectors.BaseSelector,
        limit_bytes: int,
        silence_seconds: float,
        buffers: PayloadBuffers,
        counters: LinkCounters,
        received: Callable[[WorkerId, Frame], None],
        broken: Callable[[TcpLink, str], None],
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.instance = instance
        self.closed = False
        self._selector = selector
        self._limit_bytes = limit_bytes
        self._counters = counters
        self._received = received
        self._broken = broken
        self._outbox = Outbox()
        self._decoder = Decoder(limit_bytes, buffers)
        self._silence = Silence(silence_seconds)
        self._interest = selectors.EVENT_READ
        selector.modify(sock, self._interest, self.ready)

    @property
    def unsent_bytes(self) -> int:
        return self._outbox.unsent_bytes

    @property
    def identity(self) -> tuple[int, ...]:
        """(socket inode, local port, remote port)."""
        return (os.fstat(self.sock.fileno()).st_ino, self.sock.getsockname()[1], self.sock.getpeername()[1])

    def send(self, frame: Frame, damaged: bool = False) -> None:
        """Writes at once if nothing is queued before it. Raises InternalError if the frame can't be encoded.

        `damaged`, an injected fault: one bit of it is flipped on the way.
        """
        was_empty = not self._outbox.unsent_bytes
        parts = encode(frame, self._limit_bytes)
        if damaged:
            parts[-1] = _with_a_bit_flipped(parts[-1])
        self._outbox.push(parts)
        if was_empty:
            self._write()

    def look(self, elapsed_seconds: float) -> None:
        """Is the peer's host still there? To be called every so often; ends the link if it is silent for too long."""
        if self.closed:
            return
        probes, unacked, heard = _TCP_INFO.unpack(
            self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        asked = bool(probes or unacked)
        self._silence.look(elapsed_seconds, heard, asked)
        if self._silence.too_long:
            self._read(_DRAIN_BYTES)
            self._vanished()
        elif self._silence.seconds and not asked and not self._outbox.unsent_bytes:
            self._send_pulse()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._selector.unregister(self.sock)
            self.sock.close()
            self._outbox.clear()

    def ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not self.closed:
            self._write()
        if mask & selectors.EVENT_READ and not self.closed:
            self._read(_TURN_BYTES)

    def _send_pulse(self) -> None:
        try:
            count = self.sock.send(PULSE, socket.MSG_NOSIGNAL)
        except OSError:
            return  # no room, or broken: whoever reads or writes next is told
        if count < len(PULSE):
            self._outbox.push([memoryview(PULSE)[count:]])
            self._write()

    def _vanished(self) -> None:
        """What is still under way must not arrive later, when the network is back."""
        if not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._down(f"silent for {self._silence.seconds:.1f} s")

    def _write(self) -> None:
        try:
            self._counters.bytes_sent += self._outbox.write(self.sock, _TURN_BYTES)
        except OSError as error:
            self._read(_DRAIN_BYTES)
            self._down(reason_of(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox.unsent_bytes else 0)
        if interest != self._interest:
            self._interest = interest
            self._selector.modify(self.sock, interest, self.ready)

    def _read(self, budget_bytes: int) -> None:
        while budget_bytes > 0:
            target = self._decoder.target()
            broken: str | None = None
            frames: list[Frame] = []
            try:
                count = self.sock.recv_into(target)
                if not count:
                    raise PeerError("the peer closed it" + ("" if self._decoder.idle else " within a frame"))
                pulses = self._decoder.pulses
                self._decoder.advance(count, frames)
                self._counters.bytes_received += count - (self._decoder.pulses - pulses) * len(PULSE)
            except BlockingIOError:
                return
            except (OSError, PeerError) as error:
                broken = reason_of(error)
            for frame in frames:
                self._received(self.peer, frame)
            if broken is not None:
                self._down(broken)
                return
            if count < len(target):
                return  # nothing more is there: asking again would only say so
            budget_bytes -= count

    def _down(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._broken(self, reason)


def _with_a_bit_flipped(part: memoryview) -> memoryview:
    """A copy: the sender's own bytes stay as they are."""
    damaged = bytearray(part)
    damaged[len(damaged) // 2] ^= 1
    return memoryview(damaged)
