"""What every mesh promises (runtime/comm/link.py), held against all of them."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from dataloader.errors import InternalError
from runtime.comm.link import ConnectFailed, LinkDown, LinkUp, Received, total
from runtime.protocol import Ballot, Certificate, Frame, FrameKind, Header, to_plain

HEADER = Header(3, 0.1, b"\x00\xff" * 8, float("inf"), 512, bytes(16))


def ups(log):
    return [e.peer for e in log if isinstance(e, LinkUp)]


def downs(log):
    return [e for e in log if isinstance(e, LinkDown)]


def test_a_dial_links_both_ends(net):
    one, two = net.mesh(1), net.mesh(2)
    two.connect(1, one.address)
    assert two.peers() == set()  # nothing happens but in poll
    net.until(lambda: one.peers() == {2} and two.peers() == {1})
    net.rest()
    assert net.log == {
        1: [LinkUp(2, (2).to_bytes(16, "big"))],
        2: [LinkUp(1, (1).to_bytes(16, "big"))],
    }


@pytest.mark.parametrize(
    "payload",
    [
        None,
        b"",
        b"x",
        bytes(range(256)) * 1000,
        np.arange(300_000, dtype=np.float32),
        [np.arange(1000, dtype=np.float32), b"", memoryview(np.ones((7, 9)))],
        [],
        [np.full(2, i, np.int64) for i in range(200)],
    ],
    ids=["none", "empty", "byte", "bytes", "array", "list", "empty list", "many"],
)
def test_a_frame_arrives_as_it_was_sent(net, payload):
    _, two = net.pair()
    meta = {
        "certificate": Certificate(7, (HEADER, HEADER)),
        "text": "né",
        "nested": [(1, 2), {"a": None}],
        "big": 2**63,
    }
    frame = Frame(FrameKind.PARAMETERS, Ballot(2**40, 3), 2**50, -1, meta, payload)
    assert two.send(1, frame)
    net.until(lambda: net.log[1])
    ((event,),) = [net.log[1]]
    assert isinstance(event, Received)
    assert event.peer == 2
    got = event.frame
    assert (got.kind, got.ballot, got.step, got.shard) == (frame.kind, frame.ballot, frame.step, frame.shard)
    assert got.meta == to_plain(meta)
    if payload is None:
        assert got.payload is None
    else:
        parts = payload if isinstance(payload, list) else [payload]
        assert got.payload.tobytes() == b"".join(memoryview(p).tobytes() for p in parts)


@pytest.mark.parametrize("count", [1, 100, 1_000_000])
def test_torch_and_numpy_can_look_into_a_received_payload(net, count):
    _, two = net.pair()
    two.send(1, Frame(FrameKind.GRADIENT, Ballot(1, 1), 0, 0, None, np.arange(count, dtype=np.float32)))
    net.until(lambda: net.log[1])
    (got,) = net.frames(1)
    tensor = torch.frombuffer(got.payload, dtype=torch.float32)
    assert tensor.data_ptr() % 64 == 0
    tensor += 1  # writable, without a warning
    assert np.array_equal(np.frombuffer(got.payload, np.float32), np.arange(1, count + 1, dtype=np.float32))


def test_payloads_are_the_receivers_own_for_as_long_as_it_keeps_them(net, note):
    _, two = net.pair()
    for i in range(6):
        two.send(1, note(i, np.full(100_000, i, np.int32)))
        net.until(lambda i=i: len(net.frames(1)) == i + 1)
        if i % 2:  # let every second one go
            net.log[1][-1] = Received(2, note(i))
    kept = [f for f in net.frames(1) if f.payload is not None]
    assert [set(np.frombuffer(f.payload, np.int32)) for f in kept] == [{0}, {2}, {4}]


def test_order_is_kept_on_a_link_whatever_the_sizes(net, note):
    one, two = net.pair()
    sizes = [0, 2_000_000, 1, 5_000_000, 0, 70_000, 65_536, 65_488, 3]
    for i, size in enumerate(sizes):
        assert two.send(1, note(i, bytes([i]) * size))
        assert one.send(2, note(i))
    net.until(lambda: len(net.frames(1)) == len(sizes) == len(net.frames(2)))
    assert [(f.step, f.payload.nbytes, set(f.payload)) for f in net.frames(1)] == [
        (i, size, {i} if size else set()) for i, size in enumerate(sizes)
    ]
    assert [f.step for f in net.frames(2)] == list(range(len(sizes)))
    assert two.unsent_bytes(1) == 0


def test_dialling_a_linked_peer_does_nothing(net):
    one, two = net.pair()
    before = one.socket_identity(2), two.socket_identity(1)
    for _ in range(3):
        two.connect(1, one.address)
        one.connect(2, two.address)
        net.rest()
    assert (one.socket_identity(2), two.socket_identity(1)) == before
    assert net.log == {1: [], 2: []}


def test_dialling_twice_before_it_is_up_gives_one_link(net):
    one, two = net.mesh(1), net.mesh(2)
    two.connect(1, one.address)
    two.connect(1, one.address)
    net.until(lambda: one.peers() and two.peers())
    net.rest()
    assert ups(net.log[1]) == [2]
    assert ups(net.log[2]) == [1]


@pytest.mark.parametrize("first", [1, 2])
def test_when_both_dial_one_link_remains(net, note, first):
    one, two = net.mesh(1), net.mesh(2)
    for worker in (first, 3 - first):
        net.meshes[worker].connect(3 - worker, net.meshes[3 - worker].address)
    net.until(lambda: one.peers() and two.peers())
    net.rest()
    assert ups(net.log[1]) == [2]
    assert ups(net.log[2]) == [1]
    assert len(net.log[1]) == len(net.log[2]) == 1
    assert one.send(2, note(1))
    assert two.send(1, note(2))
    net.until(lambda: len(net.frames(1)) == len(net.frames(2)) == 1)


def test_a_dial_to_nobody_fails_once(net):
    one, two = net.mesh(1), net.mesh(2)
    address = two.address
    net.shut(2)
    one.connect(2, address)
    net.until(lambda: net.log[1])
    net.rest()
    (event,) = net.log[1]
    assert isinstance(event, ConnectFailed)
    assert event.peer == 2
    assert event.reason
    assert one.peers() == set()


def test_dialling_oneself_is_a_bug(net):
    one = net.mesh(1)
    with pytest.raises(InternalError, match="dials itself"):
        one.connect(1, one.address)


def test_closing_a_link_is_seen_once_at_both_ends(net, note):
    one, two = net.pair()
    one.close(2)
    one.close(2)
    assert one.peers() == set()
    assert not one.send(2, note())
    net.until(lambda: not two.peers())
    net.rest()
    assert [(d.peer, d.local) for d in downs(net.log[1])] == [(2, True)]
    assert [(d.peer, d.local) for d in downs(net.log[2])] == [(1, False)]
    assert downs(net.log[2])[0].reason
    assert not two.send(1, note())
    with pytest.raises(KeyError):
        two.socket_identity(1)


def test_what_a_peer_said_before_it_died_comes_first(net, note):
    one, two = net.pair()
    payload = bytes(200_000)
    for i in range(3):
        assert two.send(1, note(i, payload))
    net.shut(2)
    net.until(lambda: not one.peers())
    assert [f.step for f in net.frames(1)] == [0, 1, 2]
    assert isinstance(net.log[1][-1], LinkDown)
    assert len(downs(net.log[1])) == 1


def test_what_a_peer_said_before_it_died_arrives_even_while_one_writes(net, note):
    one, two = net.pair()
    for i in range(3):
        assert two.send(1, note(i))
    net.shut(2)
    for _ in range(3):  # over TCP the first write provokes a reset, and a later one meets it
        one.send(2, note(9))
    net.until(lambda: downs(net.log[1]))
    assert [f.step for f in net.frames(1)] == [0, 1, 2]
    assert len(downs(net.log[1])) == 1


def test_sending_to_a_stranger_is_refused_and_harmless(net, note):
    one = net.mesh(1)
    assert not one.send(5, note())
    assert one.unsent_bytes(5) == 0
    one.close(5)
    assert one.poll(0) == []


def test_a_link_can_be_opened_again(net, note):
    one, two = net.pair()
    old = one.socket_identity(2)
    two.close(1)
    net.until(lambda: not one.peers())
    two.connect(1, one.address)
    net.until(lambda: one.peers() and two.peers())
    assert one.socket_identity(2) != old
    two.send(1, note(4))
    net.until(lambda: net.frames(1))
    assert [type(e) for e in net.log[1]] == [LinkDown, LinkUp, Received]
    assert (one.counters[2].links_opened, one.counters[2].links_closed) == (2, 1)


def test_surviving_links_keep_their_sockets_through_joins_and_losses(net, note):
    first = [net.mesh(worker) for worker in (1, 2, 3)]
    for mesh in first:
        for older in first[: mesh.worker - 1]:
            mesh.connect(older.worker, older.address)
    net.until(lambda: all(len(mesh.peers()) == 2 for mesh in first))
    before = {(a.worker, b.worker): a.socket_identity(b.worker) for a in first for b in first if a is not b}
    four = net.mesh(4)
    for mesh in first:
        four.connect(mesh.worker, mesh.address)
    net.until(lambda: len(four.peers()) == 3)
    net.shut(2)
    net.until(lambda: all(2 not in mesh.peers() for mesh in net.meshes.values()))
    for a, b in ((1, 3), (3, 1)):
        assert net.meshes[a].socket_identity(b) == before[a, b]
        counters = net.meshes[a].counters[b]
        assert (counters.links_opened, counters.links_closed) == (1, 0)
    one = net.meshes[1]
    assert (total(one.counters).links_opened, total(one.counters).links_closed) == (3, 1)


def test_bytes_are_counted_the_same_at_both_ends(net, note):
    one, two = net.pair()
    for i in range(5):
        two.send(1, note(i, bytes(100_000 * i)))
    net.until(lambda: len(net.frames(1)) == 5)
    assert two.counters[1].bytes_sent == one.counters[2].bytes_received > 1_000_000
    assert one.counters[2].bytes_sent == two.counters[1].bytes_received == 0


def test_a_frame_that_cant_be_sent_is_the_callers_mistake_and_leaves_the_link_alone(net, note):
    _, two = net.pair()
    for bad in (
        note(payload=bytes(9 << 20)),
        note(meta={"x": object()}),
        note(meta={"x": 2**64}),
        note(payload=np.zeros((4, 4))[:, 1]),
        note(payload="text"),
        note(number=2**70),
        note(meta=bytes(5 << 20)),
        note(meta=[0] * 70_000),
    ):
        with pytest.raises(InternalError):
            two.send(1, bad)
    assert two.send(1, note(1))
    net.until(lambda: net.frames(1))
    assert net.frames(1)[0].step == 1


def test_polling_and_shutting_an_idle_mesh(net):
    mesh = net.mesh(1)
    assert mesh.poll(0) == []
    assert mesh.poll(0.01) == []


@pytest.mark.parametrize("seed", range(12))
def test_random_lives(net, note, seed):
    """Dials from both sides, closing, sending, dying, in any order: the promises hold, and in the end all link."""
    rng = random.Random(seed)
    workers = [1, 2, 3, 4]
    for worker in workers:
        net.mesh(worker)
    sent = Counter()
    for _ in range(150):
        a, b = rng.sample(sorted(net.meshes), 2)
        match rng.choice("ddddsssssstttttc"):
            case "d":
                net.meshes[a].connect(b, net.meshes[b].address)
                if rng.random() < 0.5:
                    net.meshes[b].connect(a, net.meshes[a].address)
            case "s":
                sent[a, b] += 1
                net.meshes[a].send(b, note(sent[a, b], bytes(rng.choice([0, 10, 300_000]))))
            case "t":
                net.log[a] += net.meshes[a].poll(0)
            case "c":
                net.meshes[a].close(b)
    net.rest()
    if seed % 2:
        net.shut(rng.choice(workers))
    alive = sorted(net.meshes)
    for a in alive:
        for b in alive:
            if b < a:
                net.meshes[a].connect(b, net.meshes[b].address)
    net.until(lambda: all(net.meshes[a].peers() == set(alive) - {a} for a in alive))
    net.rest()
    for worker in alive:
        assert net.meshes[worker].peers() == set(alive) - {worker}
        check_log(net.log[worker], net.meshes[worker].peers())
        opened = Counter(ups(net.log[worker]))
        closed = Counter(d.peer for d in downs(net.log[worker]))
        for peer, counters in net.meshes[worker].counters.items():
            assert (counters.links_opened, counters.links_closed) == (opened[peer], closed[peer])


def check_log(log, peers):
    """Per peer: up, frames in the order sent, down; and again."""
    state: dict[int, int | None] = {}  # peer -> last frame received on its link; None without link
    for event in log:
        last = state.get(event.peer)
        match event:
            case LinkUp():
                assert last is None, log
                state[event.peer] = 0
            case LinkDown():
                assert last is not None, log
                state[event.peer] = None
            case Received():
                assert last is not None, log
                assert event.frame.step > last
                state[event.peer] = event.frame.step
    assert {peer for peer, last in state.items() if last is not None} == peers
