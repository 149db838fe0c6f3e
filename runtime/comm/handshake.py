"""How two workers convince each other that they are of one job, before either reads anything else.

    dialler  -> acceptor   HELLO      who I am, whom I want, my nonce          72 bytes
    acceptor -> dialler    CHALLENGE  who I am, whom I talk to, my nonce       72 bytes
    dialler  -> acceptor   PROOF      MAC over both                            32 bytes
    acceptor -> dialler    WELCOME    verdict, MAC over all of the above       33 bytes

Rules of the room:
- values only: bytes in, bytes out; sockets, deadlines and randomness are the caller's;
- every message has a fixed size, so nothing a stranger says is ever a length;
- the MAC is HMAC-SHA256 under a key derived from the job's secret. Each side's covers its role, both identities and
  both nonces: a recorded or reflected message proves nothing. The acceptor shows no MAC before it has seen a right one;
- links are authenticated, not encrypted: the network between a job's nodes must be one where nobody rewrites packets.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum

from dataloader.errors import InternalError, PeerError

INSTANCE_BYTES = 16
NONCE_BYTES = 32
VERSION = 1

_MAGIC = b"EVSL"
_INTRODUCTION = struct.Struct(f"!4sBB2xqq{INSTANCE_BYTES}s{NONCE_BYTES}s")
_MAC_BYTES = 32
_WELCOME = struct.Struct(f"!B{_MAC_BYTES}s")
_DIALLER, _ACCEPTOR = 1, 2


class Verdict(IntEnum):
    """What the acceptor makes of a dialler that has proved itself."""

    LINKED = 1
    DUPLICATE = 2  # the acceptor is dialling, too, and by the rule its dial is the one to keep
    OTHER_INSTANCE = 3  # another process with this worker id is linked already


def link_key(secret: bytes) -> bytes:
    """The key of this purpose, so that nothing signed here is of use elsewhere. Raises InternalError if too short."""
    if len(secret) < 16:
        raise InternalError(f"job secret of {len(secret)} bytes: it needs at least 16")
    return hmac.digest(secret, b"everstep worker link", "sha256")


def _introduction(role: int, worker: int, peer: int, instance: bytes, nonce: bytes) -> bytes:
    if len(instance) != INSTANCE_BYTES or len(nonce) != NONCE_BYTES:
        raise InternalError(f"instance and nonce must have {INSTANCE_BYTES} and {NONCE_BYTES} bytes")
    return _INTRODUCTION.pack(_MAGIC, VERSION, role, worker, peer, instance, nonce)


def _read_introduction(data: bytes, role: int) -> tuple[int, int, bytes]:
    """(its worker id, whom it addresses, its instance)."""
    magic, version, its_role, worker, peer, instance, _ = _INTRODUCTION.unpack(data)
    if magic != _MAGIC:
        raise PeerError("it doesn't speak this protocol")
    if version != VERSION:
        raise PeerError(
            f"it speaks version {version} of the link protocol, not {VERSION}: install one Everstep everywhere"
        )
    if its_role != role:
        raise PeerError("it answers in the wrong role")
    return worker, peer, instance


class Dialler:
    """The dialling side. Send `hello`; then feed it exactly `needs` bytes at a time until `verdict` is set."""

    def __init__(self, key: bytes, worker: int, instance: bytes, peer: int, nonce: bytes) -> None:
        self.hello = _introduction(_DIALLER, worker, peer, instance, nonce)
        self.needs = _INTRODUCTION.size
        self.peer = peer
        self.instance = b""
        self.verdict: Verdict | None = None
        self._key = key
        self._worker = worker
        self._said = self.hello

    def receive(self, data: bytes) -> bytes:
        """Takes the next message, returns what to send in reply. Raises PeerError: hang up."""
        if not self.instance:
            worker, addressee, instance = _read_introduction(data, _ACCEPTOR)
            if (worker, addressee) != (self.peer, self._worker):
                raise PeerError(f"worker {worker} answers at the address of worker {self.peer}")
            self._said += data
            self.instance, self.needs = instance, _WELCOME.size
            proof = _mac(self._key, _DIALLER, self._said)
            self._said += proof
            return proof
        verdict, mac = _WELCOME.unpack(data)
        if not hmac.compare_digest(mac, _mac(self._key, _ACCEPTOR, self._said + bytes([verdict]))):
            raise PeerError("it doesn't know the job's secret")
        try:
            self.verdict = Verdict(verdict)
        except ValueError as error:
            raise PeerError(f"unknown verdict {verdict}") from error
        self.needs = 0
        return b""


class Acceptor:
    """The accepting side. Feed it exactly `needs` bytes at a time until `proved`; then send `welcome(verdict)`."""

    def __init__(self, key: bytes, worker: int, instance: bytes, nonce: bytes) -> None:
        self.needs = _INTRODUCTION.size
        self.peer = -1  # what it claims; true once `proved`
        self.instance = b""
        self.proved = False
        self._key = key
        self._me = (worker, instance, nonce)
        self._said = b""

    def receive(self, data: bytes) -> bytes:
        """Takes the next message, returns what to send in reply. Raises PeerError: hang up, say nothing."""
        worker, instance, nonce = self._me
        if not self._said:
            self.peer, addressee, self.instance = _read_introduction(data, _DIALLER)
            if addressee != worker or self.peer == worker:
                raise PeerError(f"worker {self.peer} wants worker {addressee}, not {worker}")
            challenge = _introduction(_ACCEPTOR, worker, self.peer, instance, nonce)
            self._said, self.needs = data + challenge, _MAC_BYTES
            return challenge
        if not hmac.compare_digest(data, _mac(self._key, _DIALLER, self._said)):
            raise PeerError("it doesn't know the job's secret")
        self._said += data
        self.proved, self.needs = True, 0
        return b""

    def welcome(self, verdict: Verdict) -> bytes:
        """The last message; only after `proved`."""
        return _WELCOME.pack(verdict, _mac(self._key, _ACCEPTOR, self._said + bytes([verdict])))


def _mac(key: bytes, role: int, said: bytes) -> bytes:
    return hmac.digest(key, bytes([role]) + said, "sha256")
