"""TCP alone: strangers at the door, peers that misbehave or die, and what else shares the selector."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time

import pytest
from xxhash import xxh3_64_intdigest

from dataloader.errors import HostError, InternalError
from runtime.comm.frames import encode, pack_header
from runtime.comm.handshake import Dialler, link_key
from runtime.comm.link import ConnectFailed, LinkDown, LinkUp, Received

SECRET = b"the secret of this very job, 32+"
STRANGER = b"s" * 16


class Knock:
    """A bare socket at a mesh's door."""

    def __init__(self, mesh):
        self.sock = socket.create_connection(mesh.address, timeout=5)

    def send(self, data):
        self.sock.sendall(data)

    def dead(self):
        """Whether the mesh has hung up. Skips what it said before."""
        self.sock.settimeout(0.01)
        try:
            while self.sock.recv(4096):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def read(self, size, net):
        """Exactly `size` bytes, while the net goes on turning."""
        data = b""
        self.sock.setblocking(False)
        while len(data) < size:
            net.turn()
            try:
                data += self.sock.recv(size - len(data))
            except BlockingIOError:
                continue
        self.sock.settimeout(5)
        return data

    def prove(self, net, worker=9, peer=1, secret=SECRET, instance=STRANGER):
        """The whole handshake, by hand."""
        side = Dialler(link_key(secret), worker, instance, peer, os.urandom(32))
        self.send(side.hello)
        self.send(side.receive(self.read(72, net)))
        side.receive(self.read(side.needs, net))
        return side.verdict


def refused(mesh):
    """How many strangers have been turned away."""
    return mesh._door.refused


@pytest.fixture
def knock(tcp_net):
    """Knocks at worker 1's door."""
    made = []

    def make():
        made.append(Knock(tcp_net.meshes[1]))
        return made[-1]

    yield make
    for one in made:
        one.sock.close()


@pytest.fixture
def undisturbed(tcp_net, note):
    """Workers 1 and 2 are linked; at the end they still are, on the same sockets, and have heard of nothing else."""
    one, two = tcp_net.pair()
    before = one.socket_identity(2), two.socket_identity(1)
    yield one
    two.send(1, note(77))
    tcp_net.until(lambda: any(f.step == 77 for f in tcp_net.frames(1)))
    assert (one.socket_identity(2), two.socket_identity(1)) == before
    assert all(isinstance(e, Received) and e.peer == 2 for e in tcp_net.log[1])
    assert one.peers() == {2}


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100), os.urandom(10_000), b"\x16\x03\x01" * 30, bytes(72)],
    ids=["http", "random", "tls", "zeros"],
)
def test_garbage_is_turned_away_and_disturbs_nobody(tcp_net, undisturbed, knock, words):
    stranger = knock()
    stranger.send(words)
    tcp_net.until(stranger.dead)
    assert refused(undisturbed) == 1


def test_a_port_scan_disturbs_nobody(tcp_net, undisturbed, knock):
    for _ in range(50):
        knock().sock.close()
    tcp_net.until(lambda: refused(undisturbed) == 50)


def test_a_reset_before_it_is_accepted_disturbs_nobody(tcp_net, undisturbed, knock):
    for _ in range(10):
        stranger = knock()
        stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        stranger.sock.close()
    tcp_net.rest()


def test_who_says_nothing_or_little_meets_the_deadline(tcp_net, tcp_mesh, note):
    now = [100.0]
    one = tcp_net.meshes[1] = tcp_mesh(1, clock=lambda: now[0])
    tcp_net.log[1] = []
    silent, slow = Knock(one), Knock(one)
    hello = Dialler(link_key(SECRET), 9, STRANGER, 1, bytes(32)).hello
    for i in range(40):  # a byte now and then keeps nobody's place
        slow.send(hello[i : i + 1])
        tcp_net.turn()
        now[0] += 0.12
    assert not silent.dead()
    assert not slow.dead()
    now[0] += 0.25
    tcp_net.until(lambda: silent.dead() and slow.dead())
    assert refused(one) == 2
    silent.sock.close()
    slow.sock.close()


def test_the_deadline_ends_a_long_wait_by_itself(tcp_net, tcp_mesh):
    one = tcp_net.meshes[1] = tcp_mesh(1, handshake_seconds=0.05)
    tcp_net.log[1] = []
    stranger = Knock(one)
    began = time.monotonic()
    while refused(one) == 0:
        one.poll(5)
    assert time.monotonic() - began < 2
    assert stranger.dead()
    stranger.sock.close()


def test_many_strangers_don_t_keep_a_peer_out(tcp_net, undisturbed, tcp_mesh, knock):
    """More than may wait: the oldest go, and a worker of the job gets in between."""
    strangers = [knock() for _ in range(100)]
    tcp_net.rest()
    assert refused(undisturbed) == 100 - 64
    three = tcp_mesh(3)
    three.connect(1, undisturbed.address)
    while not three.peers():
        three.poll(0.001)
        tcp_net.turn()
    tcp_net.until(lambda: 3 in undisturbed.peers())
    assert not strangers[-1].dead()
    three.shut()
    tcp_net.until(lambda: 3 not in undisturbed.peers())
    tcp_net.log[1].clear()


def test_another_job_s_worker_is_turned_away_and_told_why(tcp_net, undisturbed, tcp_mesh):
    other = tcp_net.meshes[5] = tcp_mesh(5, secret=b"another job's secret")
    tcp_net.log[5] = []
    other.connect(1, undisturbed.address)
    tcp_net.until(lambda: tcp_net.log[5])
    (event,) = tcp_net.log[5]
    assert isinstance(event, ConnectFailed)
    assert "another job's secret?" in event.reason
    assert refused(undisturbed) == 1


def test_a_wrong_proof_gets_no_answer(tcp_net, undisturbed, knock):
    stranger = knock()
    stranger.send(Dialler(link_key(SECRET), 9, STRANGER, 1, bytes(32)).hello)
    assert len(stranger.read(72, tcp_net)) == 72
    stranger.send(bytes(32))
    tcp_net.until(stranger.dead)


def test_a_replayed_handshake_opens_nothing(tcp_net, undisturbed, knock):
    nonce = os.urandom(32)
    side = Dialler(link_key(SECRET), 9, STRANGER, 1, nonce)
    first = knock()
    first.send(side.hello)
    proof = side.receive(first.read(72, tcp_net))
    first.sock.close()
    tcp_net.until(lambda: refused(undisturbed) == 1)
    second = knock()
    second.send(side.hello)
    second.read(72, tcp_net)
    second.send(proof)
    tcp_net.until(second.dead)
    assert refused(undisturbed) == 2


def test_a_peer_that_dies_after_each_part_of_the_handshake(tcp_net, undisturbed, knock):
    """Between the accepting and the first message, after it, and after the proof: nothing comes of it."""
    knock().sock.close()
    tcp_net.until(lambda: refused(undisturbed) == 1)
    said_hello = knock()
    said_hello.send(Dialler(link_key(SECRET), 9, STRANGER, 1, bytes(32)).hello)
    said_hello.read(72, tcp_net)
    said_hello.sock.close()
    tcp_net.until(lambda: refused(undisturbed) == 2)
    proved = knock()
    side = Dialler(link_key(SECRET), 9, STRANGER, 1, bytes(32))
    proved.send(side.hello)
    proof = side.receive(proved.read(72, tcp_net))
    proved.send(proof)
    proved.sock.close()
    tcp_net.until(lambda: refused(undisturbed) == 3)


def test_a_peer_that_dies_before_its_first_frame_is_up_and_down(tcp_net, knock):
    one = tcp_net.mesh(1)
    stranger = knock()
    stranger.prove(tcp_net)
    stranger.sock.close()
    tcp_net.until(lambda: len(tcp_net.log[1]) == 2)
    tcp_net.rest()
    assert [type(e) for e in tcp_net.log[1]] == [LinkUp, LinkDown]
    assert tcp_net.log[1][0] == LinkUp(9, STRANGER)
    assert one.counters[9].links_closed == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (bytes(64), "not a frame"),
        (pack_header(b"EVSF", 2, 1, 1, 1, 1, 0, 0, 1, 1 << 40, 0), "outside the limits"),
        (pack_header(b"EVSF", 2, 99, 1, 1, 1, 0, 0, 1, 0, 0), "unknown kind 99"),
        (pack_header(b"EVSF", 2, 1, 0, 1, 1, 0, 0, 1, 0, xxh3_64_intdigest(b"\xc1")) + b"\xc1", "malformed message"),
        (pack_header(b"EVSF", 2, 1, 0, 1, 1, 0, 0, 1, 0, 0) + b"\xc0", "damaged on the way"),
    ],
    ids=["noise", "too long", "unknown kind", "bad meta", "bad digest"],
)
def test_a_proved_peer_that_talks_nonsense_loses_its_link_only(tcp_net, knock, note, words, reason):
    one, two = tcp_net.pair()
    before = one.socket_identity(2)
    rogue = knock()
    rogue.prove(tcp_net)
    good = b"".join(map(bytes, encode(note(5))))
    rogue.send(good + words)
    tcp_net.until(lambda: any(isinstance(e, LinkDown) for e in tcp_net.log[1]))
    assert [type(e) for e in tcp_net.log[1]] == [LinkUp, Received, LinkDown]
    assert reason in tcp_net.log[1][-1].reason
    assert rogue.dead()
    assert one.socket_identity(2) == before
    assert one.peers() == {2}
    assert two.peers() == {1}


def test_a_link_that_ends_within_a_frame_says_so(tcp_net, knock, note):
    tcp_net.mesh(1)
    rogue = knock()
    rogue.prove(tcp_net)
    rogue.send(b"".join(map(bytes, encode(note(5, bytes(200_000)))))[:150_000])
    rogue.sock.close()
    tcp_net.until(lambda: len(tcp_net.log[1]) == 2)
    assert tcp_net.log[1][-1].reason == "the peer closed it within a frame"


def test_a_peer_that_lost_its_end_may_dial_again(tcp_net, knock):
    """The same process proves itself anew while the old link still looks alive here: the new one replaces it."""
    one = tcp_net.mesh(1)
    first, second = knock(), knock()
    first.prove(tcp_net)
    old = one.socket_identity(9)
    second.prove(tcp_net)
    tcp_net.until(lambda: len(tcp_net.log[1]) == 3)
    assert [type(e) for e in tcp_net.log[1]] == [LinkUp, LinkDown, LinkUp]
    assert one.socket_identity(9) != old
    assert first.dead()
    assert not second.dead()


def test_a_second_process_with_a_linked_worker_s_id_is_refused(tcp_net, tcp_mesh, note):
    one, _ = tcp_net.pair()
    before = one.socket_identity(2)
    impostor = tcp_mesh(2, instance=b"another process!")
    impostor.connect(1, one.address)
    events = []
    while not events:
        tcp_net.turn()
        events += impostor.poll(0.001)
    impostor.shut()
    assert isinstance(events[0], ConnectFailed)
    assert "another process" in events[0].reason
    assert one.socket_identity(2) == before
    assert tcp_net.log[1] == tcp_net.log[2] == []


def test_a_dial_that_gave_way_fails_if_the_other_never_arrives(tcp_net, tcp_mesh):
    """Worker 2 is dialling 1 at an address where nobody answers, so it keeps 1's dial out; 1 must hear of a failure."""
    now = [0.0]
    one = tcp_net.meshes[1] = tcp_mesh(1, clock=lambda: now[0])
    two = tcp_net.meshes[2] = tcp_mesh(2, clock=lambda: now[0])
    tcp_net.log = {1: [], 2: []}
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        two.connect(1, deaf.getsockname())
        one.connect(2, two.address)
        tcp_net.rest()
        assert tcp_net.log == {1: [], 2: []}
        now[0] += 5.1
        tcp_net.until(lambda: tcp_net.log[1] and tcp_net.log[2])
    for worker in (1, 2):
        (event,) = tcp_net.log[worker]
        assert isinstance(event, ConnectFailed)
    one.connect(2, two.address)
    tcp_net.until(lambda: one.peers() and two.peers())


def test_the_wrong_worker_at_an_address(tcp_net):
    one, two, three = (tcp_net.mesh(worker) for worker in (1, 2, 3))
    three.connect(2, one.address)
    tcp_net.until(lambda: tcp_net.log[3])
    tcp_net.rest()
    assert isinstance(tcp_net.log[3][0], ConnectFailed)
    assert one.peers() == two.peers() == three.peers() == set()
    assert refused(one) == 1


@pytest.mark.parametrize("address", [("no.such.host.invalid", 80), ("127.0.0.1", 1), ("::1", 1), ("256.0.0.1", 1)])
def test_bad_addresses_fail_without_waiting(tcp_net, address):
    one = tcp_net.mesh(1)
    began = time.monotonic()
    one.connect(2, address)
    tcp_net.until(lambda: tcp_net.log[1])
    assert time.monotonic() - began < 1
    (event,) = tcp_net.log[1]
    assert isinstance(event, ConnectFailed)
    assert event.reason


def test_a_host_that_isn_t_here_is_refused_by_name(tcp_mesh):
    for host in ("192.0.2.1", "localhost.invalid", ""):
        with pytest.raises(HostError, match="can't listen on"):
            tcp_mesh(1, host=host)
    with pytest.raises(InternalError, match="secret"):
        tcp_mesh(1, secret=b"short")


def test_a_large_payload_on_one_link_doesn_t_hold_up_another(tcp_net, note):
    one, two = tcp_net.pair()
    three = tcp_net.mesh(3)
    three.connect(1, one.address)
    tcp_net.until(lambda: 3 in one.peers() and three.peers())
    tcp_net.log[1].clear()
    for i in range(8):
        two.send(1, note(i, bytes(8 << 20)))
    three.send(1, note(99))
    tcp_net.until(lambda: tcp_net.frames(1, 3))
    assert len(tcp_net.frames(1, 2)) < 8
    tcp_net.until(lambda: len(tcp_net.frames(1, 2)) == 8)


def test_a_peer_that_doesn_t_read_blocks_nobody(tcp_net, note):
    one, _ = tcp_net.pair()
    three = tcp_net.mesh(3)
    three.connect(1, one.address)
    tcp_net.until(lambda: 3 in one.peers() and three.peers())
    frozen = tcp_net.meshes.pop(2)
    for i in range(10):
        assert one.send(2, note(i, bytes(8 << 20)))
        assert one.send(3, note(i))
    tcp_net.until(lambda: len(tcp_net.frames(3)) == 10)
    assert one.unsent_bytes(2) > 40 << 20
    tcp_net.meshes[2] = frozen
    tcp_net.until(lambda: len(tcp_net.frames(2)) == 10)
    assert one.unsent_bytes(2) == 0


def test_what_else_is_on_the_selector_is_served(tcp_mesh):
    with selectors.DefaultSelector() as selector:
        mesh = tcp_mesh(1, selector=selector)
        a, b = socket.socketpair()
        heard = []
        selector.register(b, selectors.EVENT_READ, lambda mask: heard.append(b.recv(10)))
        a.send(b"hello")
        began = time.monotonic()
        assert mesh.poll(5) == []
        assert heard == [b"hello"]
        assert time.monotonic() - began < 1
        mesh.shut()
        mesh.shut()
        selector.unregister(b)
        assert not selector.get_map()
        a.close()
        b.close()


def test_running_out_of_file_descriptors_is_survived(tcp_net, undisturbed, tcp_mesh, knock):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [knock() for _ in range(3)]
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, hard))
    try:
        undisturbed.poll(0.01)
        began = time.monotonic()
        for _ in range(5):
            undisturbed.poll(0.02)
        assert time.monotonic() - began > 0.08  # it waits: no busy loop over a door that can't be opened
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for stranger in strangers:
        stranger.send(bytes(72))
    tcp_net.until(lambda: refused(undisturbed) == 3)


CHILD = """
import selectors, sys
from runtime.comm.tcp import TcpMesh
mesh = TcpMesh(2, instance=b"2" * 16, secret=bytes.fromhex(sys.argv[1]), selector=selectors.DefaultSelector())
mesh.connect(1, ("127.0.0.1", int(sys.argv[2])))
while True:
    mesh.poll(1)
"""


def test_a_killed_process_is_noticed_at_once(tcp_net):
    one = tcp_net.mesh(1)
    child = subprocess.Popen([sys.executable, "-c", CHILD, SECRET.hex(), str(one.address[1])])
    try:
        tcp_net.until(lambda: one.peers() == {2}, seconds=30)
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        tcp_net.until(lambda: not one.peers())
    finally:
        child.kill()
        child.wait()
    down = tcp_net.log[1][-1]
    assert isinstance(down, LinkDown)
    assert 0 <= down.time - killed < 1
