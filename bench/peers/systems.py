"""What there is to say of one system in one set-up, and the processes of a peer from outside.

Standard library only: the systems' own files import this in their venvs too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.peers.accounting import Step, kept_steps
from bench.peers.step_lines import read_lines, start_ticks

ROOT = Path(__file__).resolve().parent.parent.parent
GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


Commands = Callable[[Path, Path], Sequence[Command]]  # (the venv's bin, the job's directory)


@dataclass(frozen=True, slots=True)
class SetUp:
    """A system as its documentation recommends it, or tuned for frequent faults."""

    system: str
    variant: str  # "recommended", "tuned"
    settings: str  # in words, for the page
    packages: tuple[str, ...]  # of its venv, pinned
    commands: Commands
    streams: int = 1  # orders in which samples are drawn: one, or one for each worker (sample modulo streams)

    @property
    def name(self) -> str:
        return f"{self.system}, {self.variant}"

    @property
    def directory(self) -> str:
        return f"{self.system}-{self.variant}".lower().replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that trains, named so that its number can't come to mean another."""

    pid: int
    ticks: int

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.ticks

    def kill(self) -> bool:
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return True


class Running(Protocol):
    """A job of any system, from outside."""

    def steps_done(self) -> int: ...

    def workers(self) -> Mapping[int, Worker]:
        """By slot, those that live."""

    def stop(self) -> None: ...

    def steps(self, until: float) -> list[Step]:
        """Those that count at that time."""

    def commit_times(self, until: float) -> list[float]:
        """Of all steps, also of those that were undone later."""

    def samples_in_vain(self, until: float) -> int:
        """Computed, and not in the result."""


class PeerJob:
    """The processes of a peer."""

    def __init__(self, set_up: SetUp, bin_directory: Path, directory: Path) -> None:
        self.directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(directory)}
        for number, command in enumerate(set_up.commands(bin_directory, directory)):
            with (directory / f"log-{number}").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command.arguments,
                        cwd=directory,
                        env={**os.environ, **common, **command.variables},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def steps_done(self) -> int:
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                raise SystemExit(f"process {number} ended, exit code {process.returncode}: {self._last_words(number)}")
        return sum(1 for line in read_lines(self.directory) if line["kind"] == "commit" and line["rank"] == 0)

    def _last_words(self, number: int) -> str:
        lines = (self.directory / f"log-{number}").read_text(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-3:])

    def workers(self) -> dict[int, Worker]:
        starts = [line for line in read_lines(self.directory) if line["kind"] == "start"]
        newest = {line["rank"]: Worker(line["pid"], line["ticks"]) for line in starts}
        return {rank: worker for rank, worker in sorted(newest.items()) if worker.alive()}

    def stop(self) -> None:
        """Ask the launchers, then kill what is left of all that they had started."""
        import psutil

        family = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(process.pid).children(recursive=True)
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        for member in family:  # psutil compares when it began, so it kills no other process
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, GRACE_SECONDS)

    def steps(self, until: float) -> list[Step]:
        return kept_steps(self._lines(until))

    def commit_times(self, until: float) -> list[float]:
        first: dict[tuple[int, object], float] = {}
        for line in self._lines(until):
            if line["kind"] == "commit":
                first.setdefault((line["step"], line["group"]), line["time"])
        return sorted(first.values())

    def samples_in_vain(self, until: float) -> int:
        steps = self.steps(until)
        end = max((step.time for step in steps), default=0.0)
        computed = sum(len(line["samples"]) for line in self._lines(end) if line["kind"] == "computed")
        return max(0, computed - sum(len(step.samples) for step in steps))

    def _lines(self, until: float) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.directory) if line["time"] <= until]
