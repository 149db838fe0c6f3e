"""Worker processes: started by torch.distributed.elastic on one thread, watched through pidfds.

Rules of this room:
- one torchelastic context per worker, since a context kills its whole set when one fails;
- all are forked on one thread that lives as long as this process: workers are killed when the *thread* that forked
  them ends, and torchelastic would replace the signal handlers of a main thread;
- a process is signalled and watched through its pidfd, so never by a number that may be another's by now;
- whoever has exited is reaped, and why it did is said in one line.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.detector import Seen
from runtime.protocol import WorkerId

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

# -P: what lies in the current directory must not be taken for a package of ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "runtime.worker")
LAST_WORDS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """Where one worker's output goes."""

    stdout: Path
    stderr: Path
    error: Path

    @classmethod
    def of(cls, directory: Path, worker: WorkerId) -> WorkerLogs:
        stem = directory / f"worker-{worker}"
        return cls(*(stem.with_suffix(suffix) for suffix in (".out", ".err", ".error.json")))


class WorkerProcess:
    """One started worker. `pidfd` becomes readable when it has exited."""

    def __init__(self, worker: WorkerId, context: PContext, logs: WorkerLogs) -> None:
        self.worker = worker
        self.pid: int = context.pids()[0]
        self.pidfd = os.pidfd_open(self.pid)
        self._context, self._logs = context, logs

    def send(self, number: signal.Signals) -> None:
        """Nothing happens if it has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> str:
        """After it has exited: free what it held, and say why it ended."""
        os.close(self.pidfd)
        result = self._context.wait(timeout=0)
        if result is None or not result.is_failed():
            return "exit code 0"
        failure = result.failures[0]
        if failure.exitcode < 0:
            return failure.signal_name()
        said = _first_line(failure.message) if self._logs.error.exists() else _last_line(self._logs.stderr)
        return f"exit code {failure.exitcode}" + (f": {said}" if said else "")


def look_at(pid: int) -> Seen | None:
    """What the kernel says of a child; None once it has ended. Its name may hold anything, so look from behind."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        state, ticks = fields[0].decode(), int(fields[11]) + int(fields[12])
        return None if state in "ZX" else Seen(state, ticks / os.sysconf("SC_CLK_TCK"))
    return None


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that could not be started."""

    worker: WorkerId
    reason: str


class Forker:
    """The thread that starts workers. Results are collected, after `wake` was called."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[], Mapping[str, str]],
        logs: Path,
        wake: Callable[[], None],
    ) -> None:
        self._command, self._environment, self._logs, self._wake = command, environment, logs, wake
        self._wanted: queue.SimpleQueue[tuple[WorkerId, Mapping[str, str]] | None] = queue.SimpleQueue()
        self._started: deque[WorkerProcess | Failure] = deque()
        self._thread = threading.Thread(target=self._run, name="forker", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def start(self, worker: WorkerId, environment: Mapping[str, str]) -> None:
        """`environment`: of this worker, beside what all have."""
        self._wanted.put((worker, environment))

    def collect(self) -> list[WorkerProcess | Failure]:
        started: list[WorkerProcess | Failure] = []
        while self._started:
            started.append(self._started.popleft())
        return started

    def end(self) -> None:
        """Kills every worker that still lives: see the rules."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        common: Mapping[str, str] | None = None
        _start_processes()  # importing takes seconds: while the controller still thinks about whom to start
        while (wanted := self._wanted.get()) is not None:
            worker, own = wanted
            try:
                common = self._environment() if common is None else common
                self._started.append(self._fork(worker, {**common, **own}))
            except Exception as error:  # the thread's edge
                self._started.append(Failure(worker, f"can't be started: {type(error).__name__}: {error}"))
            self._wake()

    def _fork(self, worker: WorkerId, environment: dict[str, str]) -> WorkerProcess:
        logs = WorkerLogs.of(self._logs, worker)
        logs.error.unlink(missing_ok=True)
        program, *arguments = self._command
        context = _start_processes()(
            name="worker",
            entrypoint=program,
            args={0: tuple(arguments)},
            envs={0: environment},
            logs_specs=_logs_specs(logs),
        )
        return WorkerProcess(worker, context, logs)


def _start_processes() -> Callable[..., PContext]:
    """torch is imported here and not above: an agent introduces itself before it has it."""
    import logging

    from torch.distributed.elastic.multiprocessing import start_processes

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    return start_processes


def _logs_specs(logs: WorkerLogs) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class OneWorker(LogsSpecs):
        """Files of our own names; `record` in the worker finds the error file's in its environment."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            envs[0]["TORCHELASTIC_ERROR_FILE"] = str(logs.error)
            return LogsDest(
                stdouts={0: str(logs.stdout)}, stderrs={0: str(logs.stderr)}, error_files={0: str(logs.error)}
            )

        @property
        def root_log_dir(self) -> str:
            return str(logs.stdout.parent)

    return OneWorker()


def _first_line(message: Any) -> str:
    """Of what `record` wrote: text, or a map with more about it."""
    text = str(message.get("message", "")) if isinstance(message, Mapping) else str(message)
    return next(iter(text.splitlines()), "")


def _last_line(path: Path) -> str:
    """The last words on stderr, for a process that ended without an error file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
