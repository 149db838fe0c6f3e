"""Two hosts as the kernel has them: network namespaces, joined by a cable (veth) that can be cut, lossy or pulled out.

    host "a", 10.77.n.1 ──── cable ──── 10.77.n.2, host "b"

Needs root and `ip` and `tc` of iproute2. What a killed test left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

CLONE_NEWNET = 0x40000000
PREFIX = "everstep-host-"
DROP_ALL = "1,6 0 0 2"


def missing() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(lacking)} of iproute2" if lacking else ""


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """While the block runs; or skip the test, with the reason."""
    if reason := missing():
        pytest.skip(reason)
    opened = TwoHosts()
    try:
        yield opened
    finally:
        opened.close()


class TwoHosts:
    """Both hosts; `close` removes them."""

    def __init__(self) -> None:
        _sweep()
        self.names = {end: f"{PREFIX}{os.getpid()}-{end}" for end in "ab"}
        subnet = f"10.77.{os.getpid() % 250}"
        self.addresses = {"a": f"{subnet}.1", "b": f"{subnet}.2"}
        for name in self.names.values():
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", self.names["a"], "type", "veth", "peer", "cable", "netns", self.names["b"])
        for end, name in self.names.items():
            ip("-n", name, "addr", "add", f"{self.addresses[end]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
            there = self.addresses["b" if end == "a" else "a"]  # Ray asks which address it would go out by
            ip("-n", name, "route", "add", "default", "via", there)
            tc(name, "qdisc", "add", "dev", "cable", "clsact")

    @contextlib.contextmanager
    def on(self, end: str) -> Iterator[None]:
        """Sockets that this thread makes belong to that host."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(Path("/run/netns") / self.names[end])
            yield
        finally:
            _setns(here)
            os.close(here)

    def command(self, end: str, words: Sequence[str]) -> list[str]:
        """That command, to be run on that host."""
        return ["ip", "netns", "exec", self.names[end], *words]

    def runs(self, end: str, pid: int) -> bool:
        """Whether that process runs on that host."""
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat(f"/run/netns/{self.names[end]}"))

    # --- what can happen to the cable ------------------------------------------------------------------------------

    def cut(self, frm: str = "ab") -> None:
        """Nothing that `frm` sends arrives."""
        self._filter(frm, DROP_ALL)

    def lose(self, fraction: float, frm: str = "ab") -> None:
        """So many of the packets that `frm` sends don't arrive."""
        # load a random number; greater than the threshold: pass (0), else drop (2)
        self._filter(frm, f"4,32 0 0 4294963256,37 0 1 {int(fraction * 0xFFFFFFFF)},6 0 0 0,6 0 0 2")

    def heal(self) -> None:
        for name in self.names.values():
            tc(name, "filter", "del", "dev", "cable", "egress", check=False)

    def vanish(self) -> None:
        """Pull the cable out of host b, for good: no packet says so."""
        ip("-n", self.names["b"], "link", "del", "cable")

    def _filter(self, ends: str, bytecode: str) -> None:
        self.heal()
        for end in ends:
            tc(self.names[end], "filter", "add", "dev", "cable", "egress", "bpf", "da", "bytecode", bytecode)

    def close(self) -> None:
        for name in self.names.values():
            ip("netns", "del", name, check=False)


def ip(*words: str, check: bool = True) -> None:
    _run(["ip", *words], check)


def tc(name: str, *words: str, check: bool = True) -> None:
    _run(["ip", "netns", "exec", name, "tc", *words], check)


def _run(command: list[str], check: bool) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _sweep() -> None:
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            ip("netns", "del", path.name, check=False)


def _enter(path: Path) -> None:
    there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(there)
    finally:
        os.close(there)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def until(condition: Callable[[], Any], turn: Callable[[], None], seconds: float = 20.0) -> float:
    """Turn until something is so; the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        turn()
    return time.monotonic() - begun
