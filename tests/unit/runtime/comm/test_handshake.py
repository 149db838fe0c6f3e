"""The handshake as values: two right sides agree, and no single wrong byte passes."""

from __future__ import annotations

import pytest

from dataloader.errors import InternalError, PeerError
from runtime.comm.handshake import Acceptor, Dialler, Verdict, link_key

KEY = link_key(b"one job's secret")


def dialler(key: bytes = KEY, worker: int = 2, peer: int = 1, nonce: bytes = b"d" * 32) -> Dialler:
    return Dialler(key, worker, b"instance of two!", peer, nonce)


def acceptor(key: bytes = KEY, worker: int = 1, nonce: bytes = b"a" * 32) -> Acceptor:
    return Acceptor(key, worker, b"instance of one!", nonce)


def talk(two: Dialler, one: Acceptor, verdict: Verdict, change=lambda number, message: message) -> list[bytes]:
    """Runs it to the end; `change` may forge message 0 to 3 on the way. Returns the messages as sent."""
    hello = two.hello
    challenge = one.receive(change(0, hello))
    proof = two.receive(change(1, challenge))
    assert one.receive(change(2, proof)) == b""
    assert one.proved
    welcome = one.welcome(verdict)
    assert two.receive(change(3, welcome)) == b""
    return [hello, challenge, proof, welcome]


@pytest.mark.parametrize("verdict", Verdict)
def test_two_of_one_job_agree(verdict):
    two, one = dialler(), acceptor()
    messages = talk(two, one, verdict)
    assert [len(m) for m in messages] == [72, 72, 32, 33]
    assert two.verdict is verdict
    assert (one.peer, one.instance) == (2, b"instance of two!")
    assert (two.peer, two.instance) == (1, b"instance of one!")
    assert two.needs == one.needs == 0


def test_every_single_byte_counts():
    lengths = [72, 72, 32, 33]
    for number, length in enumerate(lengths):
        for place in range(length):

            def forge(i: int, message: bytes, number: int = number, place: int = place) -> bytes:
                if i != number:
                    return message
                return message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]

            with pytest.raises(PeerError):
                talk(dialler(), acceptor(), Verdict.LINKED, forge)


def test_another_secret_proves_nothing():
    other = link_key(b"another secret..")
    with pytest.raises(PeerError, match="secret"):
        talk(dialler(other), acceptor(), Verdict.LINKED)


def test_an_impostor_at_the_address_learns_only_the_dialler_s_own_proof():
    two, impostor = dialler(), acceptor(link_key(b"another secret.."))
    proof = two.receive(impostor.receive(two.hello))
    with pytest.raises(PeerError, match="secret"):
        impostor.receive(proof)
    with pytest.raises(PeerError, match="secret"):
        two.receive(impostor.welcome(Verdict.LINKED))


def test_a_recorded_handshake_can_t_be_replayed():
    hello, _, proof, _ = talk(dialler(), acceptor(), Verdict.LINKED)
    again = acceptor(nonce=b"b" * 32)
    again.receive(hello)
    with pytest.raises(PeerError):
        again.receive(proof)
    assert not again.proved


def test_one_s_own_messages_reflected_prove_nothing():
    two = dialler()
    with pytest.raises(PeerError, match="wrong role"):
        two.receive(two.hello)


def test_the_wrong_worker_at_an_address_is_noticed():
    with pytest.raises(PeerError, match="wants worker 1, not 3"):
        talk(dialler(), acceptor(worker=3), Verdict.LINKED)


def test_secrets_and_instances_have_a_size():
    with pytest.raises(InternalError, match="at least 16"):
        link_key(b"short")
    with pytest.raises(InternalError, match="16 and 32"):
        Dialler(KEY, 2, b"short", 1, bytes(32))
