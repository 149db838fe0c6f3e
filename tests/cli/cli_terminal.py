"""The command as a user runs it, in a folder of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elastic.rundir import RunDirectory, holder

COMMAND = [sys.executable, str(Path(__file__).with_name("everstep_with_fake_job.py"))]


class Terminal:
    """Runs the command in a folder of its own; what it started is ended with the test."""

    def __init__(self, folder: Path, byte_code: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.environment["PYTHONPYCACHEPREFIX"] = str(byte_code)  # compiled once for all tests
        self.run = RunDirectory(folder / "runs" / "small")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, job: str = "") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env={**self.environment, "FAKE_JOB": job},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def __call__(self, *arguments: str, job: str = "") -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        process = self.start(*arguments, job=job)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def wait_for_steps(self, count: int) -> None:
        self.wait(lambda: self.run.ledger.exists() and self.run.ledger.read_bytes().count(b"\n") >= count)

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not until():
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.02)

    def go(self) -> None:
        """Let a held job go on."""
        (self.run.path / "go").touch()

    def job_pid(self) -> int | None:
        there = holder(self.run)
        return there.pid if there else None

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        pid = self.job_pid()
        if pid is not None:
            os.kill(pid, 9)
