"""`everstep run`: from a job file to a job process, and what the command itself checks before it starts one.

Everything that can be refused is refused here, in the foreground and before anything is started: the job file, a busy
run directory, the data. Then the job lives in a session of its own, so that neither Ctrl-C nor a closed terminal
reaches it unless a viewer passes it on.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dataloader.corpus import prepare as prepare_data
from dataloader.dataset import read_index
from dataloader.errors import ConfigError
from elastic.config import JobConfig
from elastic.rundir import RunDirectory, claim, refuse
from elastic.view import RunView, counted
from elastic.watch import Child, Follower, Outcome, Signals, follow, wait_until_up
from runtime.config import ModelConfig

# The interpreter's arguments. -P: what lies where the command was given must not be taken for a package of ours.
JOB_PROCESS = ("-P", "-m", "elastic.job")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DataProgress:
    """How far the preparation of the data is: a bar on a terminal, one line per phase elsewhere, nothing if it is
    there already and at hand at once."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> DataProgress:
        console = Console()
        if console.is_terminal:
            columns = (TextColumn("data: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """`dataloader`'s progress report."""
        if self._bar is None:
            if phase != self._phase:
                print(f"data: {phase}", flush=True)
        elif phase != self._phase or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(phase, total=total, completed=done)
        else:
            self._bar.update(self._task, total=total, completed=done)
        self._phase = phase


def with_data(job: JobConfig) -> JobConfig:
    """The job with its data prepared and pinned by path, and with what the tokenizer decides filled in.

    Raises DataError, HostError, and ConfigError for a vocabulary that is too small for the data.
    """
    with DataProgress() as progress:
        path = prepare_data(job.data, progress)
    updates: dict[str, object] = {"data": job.data.model_copy(update={"source": None, "path": path})}
    if isinstance(job.model, ModelConfig):
        vocab_size = read_index(path).vocab_size
        if job.model.vocab_size is not None and job.model.vocab_size < vocab_size:
            raise ConfigError(
                f"model.vocab_size: {job.model.vocab_size} is less than the {vocab_size} ids of {path}; "
                "leave it away, and it is the tokenizer's"
            )
        filled = {
            "vocab_size": job.model.vocab_size or vocab_size,
            "max_seq_len": job.model.max_seq_len or job.data.seq_len,
        }
        updates["model"] = job.model.model_copy(update=filled)
    return job.model_copy(update=updates)


def greeting(job: JobConfig, address: str) -> str:
    """What begins now and takes a while."""
    cluster = job.cluster
    workers, nodes = counted(cluster.workers, "worker"), counted(cluster.nodes, "node")
    standbys = f" and {counted(cluster.standbys, 'standby')}" if cluster.standbys else ""
    ray = "a local Ray" if address == "local" else f"the Ray cluster at {address}"
    return f"starting {workers}{standbys} in {nodes} on {ray}; the first step takes some 15 s"


def start_job(run: RunDirectory, resume: bool, address: str, lock: int) -> Child:
    """Start the job process of a claimed run directory; it takes over the lock."""
    command = [sys.executable, *JOB_PROCESS, str(run.path), "--address", address, "--lock", str(lock)]
    if resume:
        command.append("--resume")
    with run.job_log.open("ab") as log, _signals_blocked():
        log_start = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
    return Child(process, log_start)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """For the child: what comes before it can handle a signal waits until it does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_job(job: JobConfig, resume: bool, detach: bool, address: str) -> tuple[RunDirectory, Outcome]:
    """Check, prepare, start and watch one job. Raises what the checks raise; the job's own end is the outcome's.

    With `detach`, returns as soon as the job is up.
    """
    run = RunDirectory(job.run_dir)
    refuse(run, resume)
    job = with_data(job)
    with Signals() as signals:
        with claim(run, job, resume) as lock:
            view = RunView(job.run.name, job.train.steps)
            follower = Follower(run, view, from_end=resume)
            child = start_job(run, resume, address, lock)
        if not detach:
            return run, follow(run, view, child, signals, follower, greeting(job, address))
        outcome = wait_until_up(run, view, child, signals, follower)
        return run, outcome or Outcome("detached", "", 0)
