"""Ray itself: a local one that lives as long as this process, or a cluster that is there already.

Rules of this room:
- a local Ray has a private directory (token, sockets, logs), removed at the end; what killed jobs left is swept;
- its CPUs are numbers, not cores: as many as the job asks for, and room for nodes that join later;
- token authentication is on before Ray is imported, which reads it once; so Ray is imported in functions, and this
  room's other modules after one of them. The token never leaves its file;
- the current directory is not on anyone's import path.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dataloader.errors import HostError, UsageError
from elastic.cluster.fate import start_sweeper
from elastic.config import JobConfig

PREFIX = "everstep-ray-"
NEEDED = ("raylet", "gcs_server")
BASE_LIMIT_BYTES = 24  # Ray puts sockets some 80 bytes below, and the kernel allows 107
KNOCK_SECONDS = 10.0
KILL_PATIENCE_SECONDS = 3.0
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's least: no data goes through it
SPARE_NODES = 1000  # a later node always finds logical CPUs
# Of a Ray that is ours alone. The first tells a dead actor within 10 to 35 ms, where Ray otherwise waits one to two
# seconds; the rest keep workers at normal priority, start no process that nobody asked for, and leave memory to the
# kernel: Ray would kill the agent, and with it all workers of its node.
SYSTEM_CONFIG = {
    "timeout_ms_task_wait_for_death_info": 0,
    "worker_niceness": 0,
    "memory_monitor_refresh_ms": 0,
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A connection to Ray. `token_path`, `processes`: the token, and what must live, of a local Ray."""

    address: str
    namespace: str
    local: bool
    token_path: str | None
    processes: tuple[psutil.Process, ...] = ()

    def contact(self) -> dict[str, Any]:
        """How others of this user reach it."""
        auth = {"token_path": self.token_path} if self.token_path is not None else {}
        return {"address": self.address, "namespace": self.namespace, **auth}

    def broken(self) -> str:
        """The name of a process of a local Ray that is dead, so that Ray won't work any more; empty if all live."""
        return next((name for name, process in zip(NEEDED, self.processes, strict=False) if _is_dead(process)), "")

    def kill(self) -> None:
        """What a broken local Ray can't do: end all that it has started. They die with their raylet (fate.py)."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def local_ray(namespace: str, cpus: int) -> Iterator[Engine]:
    """Start Ray; it ends with the block, and with this process however that ends. Raises HostError."""
    with _private_directory() as directory, _surroundings(directory):
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_USAGE_STATS_ENABLED="0")
        os.environ.pop("RAY_ADDRESS", None)
        import ray

        with _starting("a local Ray can't be started"):
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(directory),
                _system_config=SYSTEM_CONFIG,
            )
        needed = _needed_processes()
        sweeper = start_sweeper(needed[0].pid)
        try:
            yield Engine(_address(), namespace, True, str(token), needed)
        finally:
            ray.shutdown()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sweeper.wait(KILL_PATIENCE_SECONDS)


@contextlib.contextmanager
def connected_ray(address: str, namespace: str, token_path: str | None = None) -> Iterator[Engine]:
    """Connect to a Ray that is there; the block's end only disconnects. Raises HostError if none answers."""
    if token_path is not None:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=token_path)
    elif _token_at_hand():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if address != "auto":
        _knock(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    failure = f"no Ray cluster to be reached at {address}"
    with tempfile.TemporaryDirectory() as empty, _surroundings(Path(empty)), _starting(failure):
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield Engine(_address(), namespace, False, token_path)
    finally:
        ray.shutdown()


def open_ray(address: str, namespace: str, job: JobConfig) -> contextlib.AbstractContextManager[Engine]:
    """`address`: local, auto, or a cluster's."""
    if address == "local":
        return local_ray(namespace, cpus_per_node(job) * (job.cluster.nodes + SPARE_NODES))
    return connected_ray(address, namespace)


def cpus_per_node(job: JobConfig) -> int:
    """Logical CPUs of one agent's workers."""
    workers = job.cluster.workers_per_node + math.ceil(job.cluster.standbys / job.cluster.nodes)
    return workers * job.train.threads_per_worker


@contextlib.contextmanager
def _starting(failure: str) -> Iterator[None]:
    """Whatever cuts Ray's start short, nothing of it is left. Ray raises all that its processes run into (HostError
    here), and answers a SIGTERM with SystemExit; what it was about to start then, it doesn't know of any more."""
    import ray

    before = set(psutil.Process().children())
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would cut this short too
        ray.shutdown()
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=KILL_PATIENCE_SECONDS)
        if isinstance(error, Exception):
            raise HostError(f"{failure}: {_one_line(error)}") from error
        raise


def _knock(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UsageError(f"--address {address}: write it as HOST:PORT of the cluster's head, or auto, or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise HostError(f"no Ray cluster answers at {address}: {error}") from None


def _needed_processes() -> tuple[psutil.Process, ...]:
    """In the order of NEEDED. Ray has started them as our children."""
    children = {child.name(): child for child in psutil.Process().children()}
    return tuple(children[name] for name in NEEDED)


def _is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _token_at_hand() -> bool:
    named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return named or (Path.home() / ".ray" / "auth_token").exists()


@contextlib.contextmanager
def _surroundings(directory: Path) -> Iterator[None]:
    """Ray puts the current directory on the import path of all that it starts, so it starts in an empty one."""
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(directory)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    """Mode 0700, a short path, removed at the end; locked, so that others know that somebody lives here."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > BASE_LIMIT_BYTES:
        base = Path("/tmp")
    _sweep(base)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    except OSError as error:
        raise HostError(f"{base}: can't make a directory for Ray there: {error.strerror}") from error
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _sweep(base: Path) -> None:
    """Remove our own directories whose job was killed. A new one is locked within an instant of its making."""
    for directory in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid() and (directory / "token").exists():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _one_line(error: BaseException) -> str:
    lines: Mapping[str, None] = dict.fromkeys(line.strip() for line in str(error).splitlines() if line.strip())
    return next(iter(lines), type(error).__name__)
