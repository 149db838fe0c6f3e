"""The run directory: where what is, who may write it, and when a run may begin there.

    job.yaml        the whole job, defaults and absolute paths filled in
    lock            held (flock) by the job process for as long as it lives; inside: its pid, and since when
    ledger.jsonl    one record per decided step            events.jsonl   one per fault, decision and change
    status.json     who is a member, now                   cluster.json   how to reach the running job
    controller.json its small durable state                incarnations/  one file per controller that ever started
    checkpoints/    weights/model.safetensors              logs/          prometheus/targets.json

Rules of this room: whether a job lives is judged by its lock and by nothing else, since the kernel lets go of it
however the process dies. Files that others may read at any time change by rename. Nothing that isn't of a run is ever
removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dataloader.errors import HostError, UsageError
from elastic.config import JobConfig, dump_job, refuse_changes, stored_job
from elastic.records import fsync_directory

LOCK_TRIES = 20
LOCK_RETRY_SECONDS = 0.05  # whoever merely looks holds a lock for a moment
OWNER_BYTES = 64  # at most, in the lock


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The names in one run directory. Making one touches nothing."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def controller(self) -> Path:
        return self.path / "controller.json"

    @property
    def incarnations(self) -> Path:
        return self.path / "incarnations"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights" / "model.safetensors"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def job_log(self) -> Path:
        return self.path / "logs" / "job.log"

    @property
    def prometheus_targets(self) -> Path:
        return self.path / "prometheus" / "targets.json"

    def known(self) -> tuple[Path, ...]:
        """All that a run puts here."""
        return (
            self.job,
            self.lock,
            self.ledger,
            self.events,
            self.status,
            self.cluster,
            self.controller,
            self.incarnations,
            self.checkpoints,
            self.weights.parent,
            self.logs,
            self.prometheus_targets.parent,
        )


def open_run(path: Path) -> RunDirectory:
    """A directory that a run was begun in. Raises UsageError that names it."""
    run = RunDirectory(path)
    if not run.job.is_file():
        there = "has no job.yaml, so it is not a run directory" if path.is_dir() else "is not a directory"
        what = there if path.exists() else "is not there"
        raise UsageError(f"{path}: {what}; name the directory of a run, such as runs/NAME")
    return run


# --- the lock ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold(run: RunDirectory, inherited: int | None = None) -> Iterator[int]:
    """Own the run directory while the block runs; the lock's descriptor. Raises UsageError if somebody else does.

    The lock goes with the process: no child gets it through exec but the one that it is handed to, as `inherited`.
    """
    fd = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) if inherited is None else inherited
    try:
        os.set_inheritable(fd, False)
        if not _try_lock(fd):
            raise _busy(run, _owner(os.pread(fd, OWNER_BYTES, 0))[0])
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {time.time()!r}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run directory; its pid is None in the instant before it is written."""

    pid: int | None


def holder(run: RunDirectory) -> Holder | None:
    """Who holds the lock now; None if nobody does, that is, if no job lives here."""
    try:
        fd = os.open(run.lock, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Holder(_owner(os.pread(fd, OWNER_BYTES, 0))[0])
    else:
        return None
    finally:
        os.close(fd)


def last_held(run: RunDirectory) -> float:
    """When the last job here took the lock; 0 if nobody says. Not the file's own time, which a copy doesn't keep."""
    try:
        return _owner(run.lock.read_bytes())[1]
    except OSError:
        return 0.0


def _busy(run: RunDirectory, pid: int | None) -> UsageError:
    return UsageError(
        f"{run.path}: a job is running here{f' (pid {pid})' if pid else ''}; "
        f"watch it with `everstep attach {shlex.quote(str(run.path))}`, or choose another run.dir"
    )


def _try_lock(fd: int) -> bool:
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOCK_RETRY_SECONDS)
    return False


def _owner(lock: bytes) -> tuple[int | None, float]:
    """Who took it, and when, as is written in it."""
    try:
        pid, since = lock.split()
        return int(pid), float(since)
    except ValueError:
        return None, 0.0


# --- beginning -----------------------------------------------------------------------------------------------


def refuse(run: RunDirectory, resume: bool) -> None:
    """Raises UsageError if a run can't begin (or with `resume`: go on) here: a job lives here, a run is here, none is
    here to resume, or something else is; HostError where looking is forbidden. Changes nothing, so it may be asked
    before any work is done."""
    with _host_errors(run):
        there = holder(run)
        if there is not None:
            raise _busy(run, there.pid)
        if run.path.exists() and not run.path.is_dir():
            raise UsageError(f"{run.path}: is not a directory; choose another run.dir")
        if resume and not run.job.is_file():
            raise UsageError(f"{run.path}: no run to resume here; leave --resume away to begin one")
        if not resume and has_run(run):
            raise UsageError(
                f"{run.path}: has a run in it; go on with --resume, choose another run.name or run.dir, "
                "or remove the directory"
            )
        if run.path.is_dir() and not run.job.exists():
            strange = sorted(entry.name for entry in run.path.iterdir() if entry not in run.known())
            if strange:
                raise UsageError(f"{run.path}: holds {strange[0]!r} and no run; choose an empty or new run.dir")


@contextlib.contextmanager
def claim(run: RunDirectory, job: JobConfig, resume: bool) -> Iterator[int]:
    """Make the directory ready for the job process and write `job.yaml`. Held while the block runs, which hands the
    lock on to that process: nobody else can claim the directory in between.

    Raises UsageError as `refuse` does, ConfigError if the job is not the one that was begun here, and HostError if
    the directory can't be written.
    """
    refuse(run, resume)
    with contextlib.ExitStack() as stack:
        with _host_errors(run):
            run.path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(hold(run))
            if resume:
                refuse_changes(stored_job(run.job), job, run.path)
            else:
                _remove_contents(run)
            run.status.unlink(missing_ok=True)
            run.cluster.unlink(missing_ok=True)
            for directory in (run.logs, run.checkpoints, run.weights.parent, run.prometheus_targets.parent):
                directory.mkdir(exist_ok=True)
            write_atomic(run.job, dump_job(job).encode())
        yield lock


@contextlib.contextmanager
def _host_errors(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostError(f"{error.filename or run.path}: {error.strerror or error}; choose another run.dir") from None


def has_run(run: RunDirectory) -> bool:
    """Is there anything here that a new run would destroy? A job that ended before its first step left nothing."""
    if run.ledger.exists() and run.ledger.stat().st_size > 0:
        return True
    return any(d.is_dir() and any(d.iterdir()) for d in (run.checkpoints, run.weights.parent))


def remove_run(run: RunDirectory) -> None:
    """Delete a run that has ended, and the directory if nothing else is in it. Raises UsageError if a job lives here
    or if the directory is no run's."""
    if not run.path.exists():
        return
    open_run(run.path)
    with hold(run):
        _remove_contents(run)
    run.lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        run.path.rmdir()


def _remove_contents(run: RunDirectory) -> None:
    """Remove what runs make, but for the lock, which is held."""
    for entry in run.known():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != run.lock:
            entry.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace a file whole: readers see the old one or the new one. `durable`: also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)
