"""The channel between a worker and its node agent."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest

from dataloader.errors import HostError, InternalError
from runtime.comm import local
from runtime.comm.local import Channel, LocalServer, connect_local, private_directory
from runtime.comm.loop import dispatch
from runtime.protocol import Ballot, Certificate, Header, Member, Plan, ShardPlan, plan_from_plain


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def server(selector):
    with private_directory() as directory:
        server = LocalServer(directory / "agent", selector)
        yield server
        server.shut()


def until(selector, condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        dispatch(selector, 0.01)


@pytest.fixture
def ends(server, selector):
    """(the worker's end, the agent's end)"""
    worker = connect_local(server.path, selector)
    found = []
    until(selector, lambda: found or found.extend(server.accepted()))
    yield worker, found[0]
    worker.close()
    found[0].close()


@pytest.fixture
def raw(selector):
    """(a bare socket, the channel at its other end)"""
    bare, sock = socket.socketpair()
    bare.settimeout(5)
    channel = Channel(sock, selector, limit_bytes=1000, unsent_limit_bytes=1 << 20)
    yield bare, channel
    channel.close()
    bare.close()


def read(selector, channel, count=1):
    messages = []
    until(selector, lambda: messages.extend(channel.receive()) or len(messages) >= count or channel.closed)
    return messages


def test_messages_arrive_in_order_both_ways(ends, selector):
    worker, agent = ends
    certificate = Certificate(4, (Header(0, 0.1, b"\xff" * 16, 2.5, 512, bytes(16)),))
    plan = Plan(Ballot(1, 2), (Member(3, 0),), 5, certificate, None, (ShardPlan(3, ()),), (3,), (3,), 40)
    assert agent.send({"kind": "plan", "plan": plan})
    for i in range(500):
        assert worker.send({"kind": "progress", "at": i, "raw": b"\x00\xff", "none": None})
    (got,) = read(selector, worker)
    assert plan_from_plain(got["plan"]) == plan
    messages = read(selector, agent, 500)
    assert [m["at"] for m in messages] == list(range(500))
    assert messages[0] == {"kind": "progress", "at": 0, "raw": b"\x00\xff", "none": None}
    assert agent.peer_pid == worker.peer_pid == os.getpid()


def test_long_messages_are_sent_in_parts(ends, selector):
    worker, agent = ends
    text = "x" * 5_000_000
    assert worker.send({"text": text})
    assert worker.unsent_bytes > 0
    assert worker.send({"after": 1})
    assert read(selector, agent, 2) == [{"text": text}, {"after": 1}]
    assert worker.unsent_bytes == 0


def test_the_end_is_told_with_its_reason_after_the_last_words(ends, selector):
    worker, agent = ends
    worker.send({"last": "words"})
    worker.close()
    assert not worker.send({"too": "late"})
    until(selector, lambda: agent.closed)
    assert agent.receive() == [{"last": "words"}]
    assert agent.closed == "the other end closed it"
    assert not agent.send({"too": "late"})


def test_the_last_words_arrive_even_while_one_writes(ends):
    worker, agent = ends
    worker.send({"last": "words"})
    worker.close()
    assert not agent.send({"x": 1})
    assert agent.closed
    assert agent.receive() == [{"last": "words"}]


def test_what_isn_t_plain_or_too_long_is_the_senders_mistake(raw):
    _, channel = raw
    with pytest.raises(InternalError, match="plain values only"):
        channel.send({"x": object()})
    with pytest.raises(InternalError, match="over the channel's 1,000"):
        channel.send({"x": "y" * 1000})
    assert channel.closed is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (struct.pack("!I", 1001), "over the channel's 1,000"),
        (struct.pack("!I", 2**32 - 1), "over the channel's 1,000"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the channel's 1,000"),
        (struct.pack("!I", 0), "malformed message"),
        (struct.pack("!I", 1) + b"\xc1", "malformed message"),
        (struct.pack("!I", 1) + b"\x05", "must be a map"),
        (struct.pack("!I", 3) + msgpack.packb({b"a": 1})[:3], "malformed message"),
        (struct.pack("!I", 4) + msgpack.packb({b"a": 1}), "must be a map|malformed message"),
    ],
    ids=["long", "longest", "http", "empty", "reserved", "no map", "cut", "raw key"],
)
def test_malformed_words_close_the_channel_with_a_reason(raw, selector, words, reason):
    bare, channel = raw
    good = msgpack.packb({"a": 1})
    bare.sendall(struct.pack("!I", len(good)) + good + words)
    until(selector, lambda: channel.closed)
    assert channel.receive() == [{"a": 1}]
    assert any(part in channel.closed for part in reason.split("|"))


def test_a_message_may_come_byte_by_byte_or_not_to_its_end(raw, selector):
    bare, channel = raw
    data = msgpack.packb({"key": "value"})
    for byte in struct.pack("!I", len(data)) + data:
        assert channel.receive() == []
        bare.sendall(bytes([byte]))
        dispatch(selector, 1)
    assert channel.receive() == [{"key": "value"}]
    bare.sendall(b"\0\0")
    bare.close()
    until(selector, lambda: channel.closed)
    assert channel.closed == "the other end closed it within a message"


def test_who_never_reads_loses_the_channel_and_not_our_memory(raw):
    _, channel = raw
    sent = 0
    while channel.send({"x": "y" * 900}):
        sent += 1
    assert sent > 1000
    assert "unread" in channel.closed
    assert channel.unsent_bytes == 0


def test_paths_that_can_t_be_are_refused_by_name(selector, tmp_path):
    with pytest.raises(HostError, match="too long"):
        LocalServer(tmp_path / ("x" * 100), selector)
    with pytest.raises(HostError, match="can't listen there"):
        LocalServer(Path("/tmp/no/such/folder/agent"), selector)
    with pytest.raises(HostError, match="no node agent listens there"):
        connect_local(Path("/tmp/no/such/folder/agent"), selector)
    assert not selector.get_map()


def test_the_directory_is_private_short_and_removed():
    with private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(os.fsencode(directory / "worker-12345.socket")) < local.PATH_LIMIT_BYTES
        with socket.socket(socket.AF_UNIX) as agent, private_directory() as empty:
            agent.bind(str(directory / "agent"))
            with private_directory() as other:  # these two are in use, so not swept
                assert len({directory, empty, other}) == 3
                assert (directory / "agent").is_socket()
                assert empty.is_dir()
    assert not directory.exists()


def test_what_a_killed_process_left_is_swept_but_nothing_else():
    code = (
        "import os, signal, sys, socket; from runtime.comm.local import private_directory\n"
        "with private_directory() as d:\n"
        "    socket.socket(socket.AF_UNIX).bind(str(d / 'agent')); print(d, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    left = Path(out.strip())
    assert left.name.startswith("everstep-sock-")
    assert left.is_dir()
    kept = left.parent / "everstep-sock-not-ours-test"
    kept.mkdir(exist_ok=True)
    (kept / "a file").touch()
    try:
        with private_directory():
            assert not left.exists()
            assert (kept / "a file").exists()
    finally:
        shutil.rmtree(kept)
