"""Frames on the wire: a fixed header, meta as msgpack, the payload as raw bytes.

    magic 4 | format 1 | kind 1 | flags 2 | incarnation 8 | number 8 | step 8 | shard 4 | meta bytes 4 | payload bytes 8
    | digest of meta and payload 8 | digest of all that 8

Rules of the room:
- big-endian header of 64 bytes; flag bit 0 says that there is a payload, so None and an empty one stay apart;
- the digests are xxh3_64: TCP's own sum lets one damaged segment in 65,536 pass. The header has one of its own, since
  a reader that believed a damaged length would wait for bytes that never come;
- a length is believed only up to its limit, and memory is touched only as bytes arrive;
- a header of kind 0 alone is a *pulse*: it says nothing, and makes the peer's kernel answer (runtime/comm/silence.py);
- meta holds plain values only: msgpack without extension types. Nothing here is pickled;
- a malformed frame is a PeerError, a frame that can't be sent is an InternalError (the caller's mistake).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, NoReturn

import msgpack
from xxhash import xxh3_64, xxh3_64_intdigest

from dataloader.errors import InternalError, PeerError
from runtime.comm.buffers import PayloadBuffers
from runtime.protocol import Ballot, Frame, FrameKind, to_plain

MAGIC = b"EVSF"
FORMAT = 2
HEADER = struct.Struct("!4sBBHQQqiIQQQ")
PAYLOAD_LIMIT_BYTES = 16 << 30  # runtime/shards/payloads.py refuses a job that could need more
META_LIMIT_BYTES = 4 << 20
STAGING_BYTES = 1 << 16

_DIGEST_BYTES = 8
_PULSE_KIND = 0
_HAS_PAYLOAD = 1
_KINDS = {int(kind): kind for kind in FrameKind}
_ELEMENTS_LIMIT = 1 << 16  # of one list or map: bounds what a lying length makes the reader allocate


def pack_plain(value: Any) -> bytes:
    """Plain values (and dataclasses made of them) as msgpack. Raises InternalError for anything else."""
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True, default=_plain_dataclass)
    except (TypeError, ValueError, OverflowError) as error:
        raise InternalError(f"a message must hold plain values only: {error}") from error
    if len(data) > _ELEMENTS_LIMIT:  # only then can it break the reader's limits, so the check is rare
        try:
            unpack_plain(data)
        except PeerError as error:
            raise InternalError(f"a message that its reader would refuse: {error}") from error
    return data


def unpack_plain(data: bytes | bytearray | memoryview) -> Any:
    """The value of one msgpack message; lists, not tuples. Raises PeerError if it is malformed."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            timestamp=1,  # the one extension that has no hook: it becomes a plain float
            max_array_len=_ELEMENTS_LIMIT,
            max_map_len=_ELEMENTS_LIMIT,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise PeerError(f"malformed message: {type(error).__name__} {error}".splitlines()[0]) from error


def _plain_dataclass(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not allowed")


def pack_header(*fields: Any) -> bytes:
    """All fields but the header's own digest, which is put behind them. Raises struct.error."""
    head = HEADER.pack(*fields, 0)[:-_DIGEST_BYTES]
    return head + xxh3_64_intdigest(head).to_bytes(_DIGEST_BYTES, "big")


PULSE = pack_header(MAGIC, FORMAT, _PULSE_KIND, 0, 0, 0, 0, 0, 0, 0, 0)


def encode(frame: Frame, limit_bytes: int = PAYLOAD_LIMIT_BYTES) -> list[memoryview]:
    """The frame as flat byte views to be written one after another: header and meta first, then the payload's.

    The payload (None, one C-contiguous buffer, or a list of them) is not copied, so it must not change until it is
    written. Raises InternalError if it is over `limit_bytes` or no such buffer.
    """
    views = list(_views(frame.payload))
    payload_bytes = sum(map(len, views))
    meta = pack_plain(frame.meta)
    if payload_bytes > limit_bytes:
        raise InternalError(f"frame payload of {payload_bytes:,} bytes is over the link's {limit_bytes:,}")
    if len(meta) > META_LIMIT_BYTES:
        raise InternalError(f"frame meta of {len(meta):,} bytes is over {META_LIMIT_BYTES:,}")
    flags = 0 if frame.payload is None else _HAS_PAYLOAD
    incarnation, number = frame.ballot
    digest = xxh3_64(meta)
    for view in views:
        digest.update(view)
    try:
        header = pack_header(
            *(MAGIC, FORMAT, frame.kind, flags, incarnation, number, frame.step, frame.shard),
            *(len(meta), payload_bytes, digest.intdigest()),
        )
    except struct.error as error:
        raise InternalError(
            f"frame field out of range: {error} in {frame.ballot}, {frame.step}, {frame.shard}"
        ) from error
    return [memoryview(header + meta), *views]


def _views(payload: Any) -> Iterator[memoryview]:
    for part in payload if isinstance(payload, (list, tuple)) else () if payload is None else (payload,):
        try:
            view = memoryview(part)
            if view.nbytes:
                yield view.cast("B")
        except TypeError as error:
            raise InternalError(f"a payload must be made of C-contiguous buffers: {error}") from error


class Decoder:
    """Bytes in, frames out: ``count = sock.recv_into(decoder.target())``, then ``decoder.advance(count, frames)``.

    Small pieces are read many at a time through one staging buffer; the bulk of a payload is read in place. A
    received payload is one writable flat memoryview, aligned to 64 bytes.
    """

    def __init__(self, limit_bytes: int = PAYLOAD_LIMIT_BYTES, buffers: PayloadBuffers | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._buffers = PayloadBuffers(0) if buffers is None else buffers
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._direct = False
        # The piece that comes next: its size, what takes it when it is whole, and if it is not all there yet, the part
        # that is. A piece that lies whole in the staging buffer is taken from there.
        self._size = HEADER.size
        self._taker: Callable[[Decoder, memoryview], None] = Decoder._take_header
        self._piece: memoryview | None = None
        self._have = 0
        self._head: tuple[FrameKind, Ballot, int, int] | None = None
        self._meta: Any = None
        self._digest = (0, xxh3_64())  # as it should be, and of what has come
        self.pulses = 0
        self._payload_bytes: int | None = None
        self._frames: list[Frame] = []

    @property
    def idle(self) -> bool:
        """Between two frames."""
        return self._head is None and self._piece is None

    def target(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        self._direct = self._size - self._have >= STAGING_BYTES
        return self._begun()[self._have :] if self._direct else self._staging

    def advance(self, count: int, frames: list[Frame]) -> None:
        """Takes the `count` bytes that were put into the last `target`; appends the frames they complete to `frames`.

        Raises PeerError where they are malformed, after it has appended what came before. The stream ends there.
        """
        self._frames = frames
        try:
            if self._direct:
                self._fill(count)
            else:
                self._split(count)
        finally:
            self._frames = []  # or the last payload would be kept alive from here

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """`target` and `advance` for bytes that are at hand already."""
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest:
            target = self.target()
            count = min(len(rest), len(target))
            target[:count] = rest[:count]
            self.advance(count, frames)
            rest = rest[count:]
        return frames

    def _split(self, count: int) -> None:
        at = 0
        while at < count:
            taken = min(count - at, self._size - self._have)
            data = self._staging[at : at + taken]
            if taken == self._size and self._taker is not Decoder._take_payload:
                self._taker(self, data)
            else:
                self._begun()[self._have : self._have + taken] = data
                self._fill(taken)
            at += taken

    def _begun(self) -> memoryview:
        if self._piece is None:
            payload = self._taker is Decoder._take_payload
            self._piece = self._buffers.take(self._size) if payload else memoryview(bytearray(self._size))
        return self._piece

    def _fill(self, count: int) -> None:
        self._have += count
        if self._have == self._size:
            piece = self._begun()
            self._piece, self._have = None, 0
            self._taker(self, piece)

    def _take_header(self, data: memoryview) -> None:
        magic, version, kind, flags, incarnation, number, step, shard, *rest = HEADER.unpack(data)
        meta_bytes, payload_bytes, digest, digest_of_header = rest
        if magic != MAGIC or version != FORMAT:
            raise PeerError(f"not a frame of format {FORMAT}: it begins with {bytes(data[:5])!r}")
        if digest_of_header != xxh3_64_intdigest(data[:-_DIGEST_BYTES]):
            raise PeerError("a frame's header was damaged on the way")
        if kind == _PULSE_KIND:
            self.pulses += 1
            return
        if flags & ~_HAS_PAYLOAD or (payload_bytes and not flags):
            raise PeerError(f"frame with unknown flags {flags:#x}")
        if payload_bytes > self._limit_bytes or not 0 < meta_bytes <= META_LIMIT_BYTES:
            raise PeerError(f"frame of {meta_bytes:,} + {payload_bytes:,} bytes is outside the limits")
        if kind not in _KINDS:
            raise PeerError(f"frame of unknown kind {kind}")
        self._head = (_KINDS[kind], Ballot(incarnation, number), step, shard)
        self._payload_bytes = payload_bytes if flags else None
        self._digest = (digest, xxh3_64())
        self._size, self._taker = meta_bytes, Decoder._take_meta

    def _take_meta(self, data: memoryview) -> None:
        self._digest[1].update(data)
        self._meta = bytes(data)  # believed only once all of the frame is here
        if self._payload_bytes:
            self._size, self._taker = self._payload_bytes, Decoder._take_payload
        else:
            self._take_payload(None if self._payload_bytes is None else memoryview(bytearray()))

    def _take_payload(self, payload: memoryview | None) -> None:
        assert self._head is not None
        kind, ballot, step, shard = self._head
        due, digest = self._digest
        if payload:
            digest.update(payload)
        if digest.intdigest() != due:
            raise PeerError("a frame was damaged on the way: its digest is another")
        self._frames.append(Frame(kind, ballot, step, shard, unpack_plain(self._meta), payload))
        self._head = self._meta = None
        self._size, self._taker = HEADER.size, Decoder._take_header
