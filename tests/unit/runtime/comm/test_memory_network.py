"""The network of the in-memory twin: what a test can do to it."""

from __future__ import annotations

import pytest

from dataloader.errors import InternalError, PeerError
from runtime.comm.link import ConnectFailed, LinkDown, LinkUp, Received
from runtime.comm.memory import MemoryNetwork
from runtime.protocol import Ballot, Frame, FrameKind


def note(number, payload=None):
    return Frame(FrameKind.RECORD, Ballot(1, 1), number, 0, None, payload)


@pytest.fixture
def linked():
    network = MemoryNetwork(clock=lambda: 12.5)
    one, two = network.mesh(1), network.mesh(2)
    two.connect(1, one.address)
    one.poll()
    two.poll()
    return network, one, two


def test_a_cut_loses_what_is_under_way_until_it_heals(linked):
    network, one, two = linked
    two.send(1, note(1))
    assert network.in_flight(2, 1) == 1
    network.cut(1, 2)
    network.cut(1, 2)
    assert network.in_flight(2, 1) == 0
    assert two.send(1, note(2))  # it can't know yet
    assert one.poll() == [LinkDown(2, "cut", 12.5)]
    assert two.poll() == [LinkDown(1, "cut", 12.5)]
    two.connect(1, one.address)
    assert two.poll() == [ConnectFailed(1, "no way there")]
    network.heal(1, 2)
    assert two.poll() == []
    two.connect(1, one.address)
    assert [type(e) for e in two.poll() + one.poll()] == [LinkUp, LinkUp]


def test_a_stall_tells_nobody_and_loses_nothing(linked):
    network, one, two = linked
    two.send(1, note(1))
    network.stall(1, 2)
    two.send(1, note(2))
    assert one.poll() == two.poll() == []
    assert network.in_flight(2, 1) == 2
    network.drop(2)
    assert one.poll() == []
    network.heal(1, 2)
    assert [type(e) for e in one.poll()] == [Received, Received, LinkDown]


def test_a_dropped_worker_is_gone_for_all(linked):
    network, one, _ = linked
    three = network.mesh(3)
    three.connect(1, one.address)
    three.connect(2, ("memory", 2))
    network.drop(2)
    network.drop(2)
    assert [type(e) for e in three.poll()] == [LinkUp, LinkUp, LinkDown]
    assert three.peers() == {1}
    assert one.poll() == [LinkDown(2, "the peer closed it", 12.5), LinkUp(3, three.instance)]
    network.mesh(2)  # a new process may take the place


def test_buffers_are_read_at_delivery_so_that_early_reuse_shows(linked):
    _, one, two = linked
    payload = bytearray(b"right")
    two.send(1, note(1, payload))
    payload[:] = b"wrong"
    with pytest.raises(PeerError, match="damaged"):
        one.poll()


def test_without_a_wire_any_values_pass_by_reference():
    network = MemoryNetwork(wire=False)
    one, two = network.mesh(1), network.mesh(2)
    two.connect(1, one.address)
    two.poll()
    frame = note(1, {"any": object()})
    two.send(1, frame)
    events = one.poll()
    assert events[1].frame is frame
    assert one.counters[2].bytes_received == two.counters[1].bytes_sent == 0


def test_a_worker_is_on_the_network_once(linked):
    network, one, _ = linked
    with pytest.raises(InternalError, match="already"):
        network.mesh(1)
    one.connect(7, ("elsewhere", 7))
    assert one.poll() == [ConnectFailed(7, "no such host")]
