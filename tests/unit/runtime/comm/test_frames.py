"""Frames on the wire: any cutting of the stream gives the same frames, any damage is a PeerError and nothing else."""

from __future__ import annotations

import random
import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from dataloader.errors import InternalError, PeerError
from runtime.comm import frames
from runtime.comm.buffers import PayloadBuffers
from runtime.comm.frames import PULSE, Decoder, encode, pack_header, pack_plain, unpack_plain
from runtime.protocol import Ballot, Frame, FrameKind

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
some_frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    ballot=st.builds(Ballot, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    step=st.integers(-(2**63), 2**63 - 1),
    shard=st.integers(-(2**31), 2**31 - 1),
    meta=plain,
    payload=st.none() | st.binary(max_size=300) | st.sampled_from([bytes(100_000), b"ab" * 70_000]),
)


def wire(*sent: Frame) -> bytes:
    return b"".join(bytes(part) for frame in sent for part in encode(frame))


def same(got: Frame, sent: Frame) -> bool:
    return (got.kind, got.ballot, got.step, got.shard, got.meta) == (
        sent.kind,
        sent.ballot,
        sent.step,
        sent.shard,
        sent.meta,
    ) and (got.payload is None if sent.payload is None else got.payload.tobytes() == sent.payload)


def one_line(error: PeerError) -> None:
    assert len(str(error).splitlines()) == 1


def feed_in_pieces(decoder: Decoder, data: bytes, rng: random.Random) -> list[Frame]:
    got: list[Frame] = []
    while data:
        cut = rng.choice([1, 2, 47, 48, 49, 1000, 65_535, 65_536, 200_000])
        got += decoder.feed(data[:cut])
        data = data[cut:]
    return got


@settings(max_examples=60, deadline=None)
@given(st.lists(some_frames, max_size=5), st.randoms(use_true_random=False))
def test_any_cutting_of_the_stream_gives_the_same_frames(sent, rng):
    decoder = Decoder()
    got = feed_in_pieces(decoder, wire(*sent), rng)
    assert len(got) == len(sent)
    assert all(map(same, got, sent))
    assert decoder.idle


def test_one_byte_at_a_time():
    sent = [
        Frame(FrameKind.GRADIENT, Ballot(1, 2), 3, 4, {"a": b"b"}, b"payload"),
        Frame(FrameKind.LOST, Ballot(0, 0), 0, 7),
    ]
    decoder = Decoder()
    got: list[Frame] = []
    for byte in wire(*sent):
        got += decoder.feed(bytes([byte]))
    assert all(map(same, got, sent))


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=400))
def test_noise_is_refused_or_not_yet_enough(noise):
    decoder = Decoder(limit_bytes=1 << 20)
    try:
        assert decoder.feed(noise) == []
    except PeerError as error:
        one_line(error)


@settings(max_examples=200, deadline=None)
@given(some_frames, st.data())
def test_no_damaged_frame_is_taken_in_or_waited_for(sent, data):
    """Wherever bits were flipped: the whole frames before are there, then comes the error, with all bytes at hand."""
    stream = bytearray(wire(sent, sent))
    first = data.draw(st.integers(0, len(stream) - 1))
    for at in {first, *data.draw(st.lists(st.integers(first, min(len(stream), first + 50) - 1), max_size=2))}:
        stream[at] ^= data.draw(st.integers(1, 255))
    decoder, got = Decoder(limit_bytes=1 << 20), []
    with pytest.raises(PeerError) as raised:
        got += decoder.feed(bytes(stream))
    one_line(raised.value)
    assert all(same(frame, sent) for frame in got)


def test_a_pulse_says_nothing_and_is_counted():
    some = Frame(FrameKind.RECORD, Ballot(1, 1), 1, 1)
    decoder = Decoder()
    got = decoder.feed(PULSE + wire(some) + PULSE + PULSE + wire(some) + PULSE[:10])
    assert len(got) == 2
    assert decoder.pulses == 3


def header(**changed: int | bytes) -> bytes:
    fields = {
        "magic": frames.MAGIC,
        "format": frames.FORMAT,
        "kind": 1,
        "flags": 1,
        "incarnation": 1,
        "number": 1,
        "step": 0,
        "shard": 0,
        "meta": 1,
        "payload": 0,
        "digest": xxh3_64_intdigest(b"\xc0"),
    }
    return pack_header(*{**fields, **changed}.values()) + b"\xc0"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"magic": b"HTTP"}, "not a frame"),
        ({"format": 1}, "not a frame"),
        ({"kind": 255}, "unknown kind 255"),
        ({"digest": 0}, "its digest is another"),
        ({"kind": 200}, "unknown kind 200"),
        ({"flags": 2}, "unknown flags"),
        ({"flags": 0, "payload": 1}, "unknown flags"),
        ({"meta": 0}, "outside the limits"),
        ({"meta": frames.META_LIMIT_BYTES + 1}, "outside the limits"),
        ({"meta": 2**32 - 1}, "outside the limits"),
        ({"payload": 1001}, "outside the limits"),
        ({"payload": 2**64 - 1}, "outside the limits"),
    ],
)
def test_a_wrong_header_is_refused_by_name(changed, message):
    assert Decoder(1000).feed(header()) != []
    with pytest.raises(PeerError, match=message):
        Decoder(1000).feed(header(**changed))


def test_a_length_alone_costs_no_memory():
    """What is announced is reserved by the kernel page by page, as it comes."""
    decoder = Decoder(limit_bytes=1 << 40)
    before = resident_bytes()
    decoder.feed(header(payload=4 << 30))
    decoder.feed(bytes(100_000))
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(1) + b"\x00",
        msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\xdd" + struct.pack("!I", 2**32 - 1),
        b"\xdf" + struct.pack("!I", 2**32 - 1),
        b"\xdb" + struct.pack("!I", 2**32 - 1) + b"abc",
        b"\xa2\xff\xfe",
        b"\x91" * 3000 + b"\xc0",
    ],
    ids=["nothing", "reserved", "extra", "number key", "extension", "list", "map", "text", "not utf-8", "deep"],
)
def test_malformed_plain_values_are_refused(data):
    with pytest.raises(PeerError, match="malformed message"):
        unpack_plain(data)


def test_a_timestamp_becomes_a_plain_float():
    assert type(unpack_plain(msgpack.packb(msgpack.Timestamp(5, 0)))) is float


def test_nested_lying_lengths_stay_cheap():
    tracemalloc.start()
    try:
        with pytest.raises(PeerError):
            unpack_plain((b"\xdd" + struct.pack("!I", 65_000)) * 400 + bytes(100_000))
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


def test_nothing_is_ever_unpickled():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    with pytest.raises(InternalError, match="Bomb is no plain value"):
        pack_plain({"a": Bomb()})


def test_a_payload_is_not_copied_when_encoded():
    payload = bytearray(b"before")
    parts = encode(Frame(FrameKind.GRADIENT, Ballot(1, 1), 0, 0, None, [payload]))
    payload[:] = b"after!"
    assert bytes(parts[1]) == b"after!"


def test_the_decoder_keeps_no_payload_alive():
    buffers = PayloadBuffers(1 << 20)
    decoder = Decoder(buffers=buffers)
    got = decoder.feed(wire(Frame(FrameKind.GRADIENT, Ballot(1, 1), 0, 0, None, bytes(1 << 17))))
    assert len(got) == 1
    assert not buffers._returned
    del got
    assert [storage.nbytes for storage in buffers._returned] == [1 << 17]
