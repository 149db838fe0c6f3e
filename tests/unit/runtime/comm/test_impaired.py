"""Injected faults of links: what is held, how long, and what the other end sees."""

from __future__ import annotations

from typing import Any

import pytest

from dataloader.errors import InternalError
from runtime.comm.impaired import inject
from runtime.comm.link import ConnectFailed, LinkDown, LinkUp
from runtime.comm.memory import MemoryNetwork


def steps(net: Any, worker: int) -> list[int]:
    return [frame.step for frame in net.frames(worker)]


@pytest.mark.parametrize(("way", "held"), [(None, {1, 2}), ("both", {1, 2}), ("in", {1}), ("out", {2})])
def test_what_a_partition_holds_arrives_in_order_when_it_heals(
    impaired_net, time_of_faults, note, way: str, held: set[int]
) -> None:
    net, time = impaired_net, time_of_faults
    one, two = net.pair()
    one.partition([2], way, seconds=1.0)
    for number in range(3):
        one.send(2, note(number))
        two.send(1, note(number, b"payload"))
    net.rest()
    for worker in (1, 2):
        assert steps(net, worker) == ([] if worker in held else [0, 1, 2])
    assert (one.unsent_bytes(2) > 0) == (2 in held)
    time.now += 1.1
    net.until(lambda: steps(net, 1) == steps(net, 2) == [0, 1, 2])
    assert one.unsent_bytes(2) == 0
    one.send(2, note(3))
    net.until(lambda: steps(net, 2) == [0, 1, 2, 3])
    assert not [event for log in net.log.values() for event in log if isinstance(event, LinkDown)]


@pytest.mark.parametrize("way", ["both", "in", "out"])
def test_a_link_that_is_held_for_long_is_a_silent_one(impaired_net, time_of_faults, note, way):
    net, time = impaired_net, time_of_faults
    one, two = net.pair()
    one.partition(None, way)
    one.send(2, note(1))
    net.rest()
    time.now += 1.4
    net.rest()
    assert one.peers() == {2}
    time.now += 0.2
    net.until(lambda: net.log[1] and not two.peers())
    (down,) = [event for event in net.log[1] if isinstance(event, LinkDown)]
    assert (down.reason, down.local) == ("silent for 1.5 s", False)
    assert not one.send(2, note(2))


def test_no_link_can_be_opened_until_it_heals(impaired_net, time_of_faults, note):
    net, time = impaired_net, time_of_faults
    one, two = net.pair()
    one.partition(None)
    net.rest()
    time.now += 1.6
    net.until(lambda: not one.peers() and not two.peers())
    one.connect(2, two.address)
    two.connect(1, one.address)
    net.until(lambda: isinstance(net.log[2][-1], ConnectFailed))
    assert not any(isinstance(event, ConnectFailed) for event in net.log[1])  # it hangs
    time.now += 1.6
    net.until(lambda: isinstance(net.log[1][-1], ConnectFailed))
    one.connect(2, two.address)
    net.rest()
    one.heal()
    net.until(lambda: isinstance(net.log[1][-1], LinkUp) and isinstance(net.log[2][-1], LinkUp))
    one.send(2, note(9))
    net.until(lambda: steps(net, 2) == [9])


def test_only_those_meant_are_cut(impaired_net, note):
    net = impaired_net
    one, two = net.pair()
    three = net.mesh(3)
    three.connect(1, one.address)
    net.until(lambda: one.peers() == {2, 3} and three.peers() == {1})
    inject(one, {"kind": "partition-node", "peer": None, "way": None, "seconds": None, "spared": [1, 3]})
    for peer in (2, 3):
        one.send(peer, note(1))
    net.until(lambda: steps(net, 3) == [1])
    net.rest()
    assert steps(net, 2) == []
    assert two.peers() == {1}
    inject(one, {"kind": "partition-node", "seconds": 0.0})
    net.until(lambda: steps(net, 2) == [1])


def test_a_delay_keeps_the_order(impaired_net, time_of_faults, note):
    net, time = impaired_net, time_of_faults
    one, _ = net.pair()
    inject(one, {"kind": "delay-worker", "peer": 2, "seconds": 0.5})
    one.send(2, note(1))
    time.now += 0.3
    one.send(2, note(2))
    one.delay(None, 0.0)
    one.send(2, note(3))
    net.rest()
    assert steps(net, 2) == []
    time.now += 0.3
    net.until(lambda: steps(net, 2) == [1])
    net.rest()
    assert steps(net, 2) == [1]
    time.now += 0.3
    net.until(lambda: steps(net, 2) == [1, 2, 3])


@pytest.mark.parametrize("payload", [None, b"x", bytes(300_000), [b"ab", bytes(70_000)]])
def test_a_flipped_bit_breaks_the_link_and_is_never_taken_in(impaired_net, note, payload):
    net = impaired_net
    one, two = net.pair()
    one.send(2, note(1))
    inject(one, {"kind": "corrupt-worker", "what": "link"})
    one.send(2, note(2, payload))
    net.until(lambda: not two.peers() and not one.peers())
    assert steps(net, 2) == [1]
    assert "damaged on the way" in net.log[2][-1].reason
    one.connect(2, two.address)
    net.until(lambda: one.peers() == {2})
    one.send(2, note(3, payload))
    net.until(lambda: steps(net, 2) == [1, 3])


def test_a_peer_that_dies_while_it_is_cut_off_is_down(impaired_net, time_of_faults, note):
    net, time = impaired_net, time_of_faults
    one, two = net.pair()
    one.partition(None, "in")
    two.send(1, note(1))
    net.rest()
    net.shut(2)
    net.until(lambda: not one.peers())
    assert [type(event) for event in net.log[1]] == [LinkDown]
    time.now += 5.0
    net.rest()
    assert len(net.log[1]) == 1


def test_what_is_no_fault_of_links_is_a_bug(impaired_net, note):
    net = impaired_net
    one, _ = net.pair()
    with pytest.raises(InternalError, match="no fault of links"):
        inject(one, {"kind": "kill-worker"})
    with pytest.raises(InternalError, match="way is one of"):
        one.partition(None, "sideways")
    with pytest.raises(InternalError, match="take no faults"):
        inject(MemoryNetwork().mesh(1), {"kind": "delay-worker"})
