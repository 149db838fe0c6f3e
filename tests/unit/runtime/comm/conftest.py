"""Nets of meshes, over TCP or in memory, that tests drive by hand: everybody is polled until something is so."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.comm.impaired import ImpairedMesh
from runtime.comm.link import Event, Mesh, Received
from runtime.comm.memory import MemoryNetwork
from runtime.comm.tcp import TcpMesh
from runtime.protocol import Ballot, Frame, FrameKind

LIMIT_BYTES = 8 << 20
SECRET = b"the secret of this very job, 32+"


class Net:
    """Meshes by worker id, each with the log of all its events."""

    def __init__(self, make: Callable[[int], Mesh]) -> None:
        self._make = make
        self.meshes: dict[int, Mesh] = {}
        self.log: dict[int, list[Event]] = {}

    def mesh(self, worker: int) -> Any:
        self.meshes[worker] = self._make(worker)
        self.log[worker] = []
        return self.meshes[worker]

    def pair(self) -> tuple[Any, Any]:
        """Workers 1 and 2, linked; their logs begin after that."""
        one, two = self.mesh(1), self.mesh(2)
        two.connect(1, one.address)
        self.until(lambda: one.peers() == {2} and two.peers() == {1})
        self.log[1].clear()
        self.log[2].clear()
        return one, two

    def turn(self) -> None:
        for worker, mesh in list(self.meshes.items()):
            self.log[worker] += mesh.poll(0.001)

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it never came to that: {self.log}"
            self.turn()

    def rest(self, turns: int = 20) -> None:
        """Enough turns for whatever is under way on this machine to arrive."""
        for _ in range(turns):
            self.turn()

    def shut(self, worker: int) -> None:
        self.meshes.pop(worker).shut()

    def frames(self, worker: int, peer: int | None = None) -> list[Frame]:
        return [e.frame for e in self.log[worker] if isinstance(e, Received) and peer in (None, e.peer)]


def note(number: int = 0, payload: Any = None, meta: Any = None) -> Frame:
    return Frame(FrameKind.RECORD, Ballot(1, 1), number, 0, meta, payload)


@pytest.fixture(name="note")
def note_fixture() -> Callable[..., Frame]:
    return note


def tcp_mesh(worker: int, **options: Any) -> TcpMesh:
    given: dict[str, Any] = {
        "instance": worker.to_bytes(16, "big"),
        "secret": SECRET,
        "selector": selectors.DefaultSelector(),
        "limit_bytes": LIMIT_BYTES,
    }
    return TcpMesh(worker, **{**given, **options})


@pytest.fixture(name="tcp_mesh")
def tcp_mesh_fixture() -> Callable[..., TcpMesh]:
    return tcp_mesh


def _shut(net: Net) -> None:
    for worker, mesh in list(net.meshes.items()):
        net.shut(worker)
        mesh = mesh._mesh if isinstance(mesh, ImpairedMesh) else mesh
        if isinstance(mesh, TcpMesh):
            assert not mesh._selector.get_map(), "it left something on the selector"
            mesh._selector.close()


@pytest.fixture
def tcp_net() -> Iterator[Net]:
    net = Net(tcp_mesh)
    yield net
    _shut(net)


@pytest.fixture(params=["tcp", "impaired", "memory"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    make: dict[str, Callable[[int], Mesh]] = {
        "tcp": tcp_mesh,
        "impaired": lambda worker: ImpairedMesh(tcp_mesh(worker)),
        "memory": MemoryNetwork(limit_bytes=LIMIT_BYTES).mesh,
    }
    net = Net(make[request.param])
    yield net
    _shut(net)


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time_of_faults() -> Time:
    return Time()


@pytest.fixture
def impaired_net(time_of_faults: Time) -> Iterator[Net]:
    """Injected faults go by the test's clock, the links' own watch by the real one."""
    net = Net(lambda worker: ImpairedMesh(tcp_mesh(worker), clock=time_of_faults))
    yield net
    _shut(net)
