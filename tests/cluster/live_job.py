"""Real jobs on a real Ray, each started by its test, and what they leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.local_job import local_job
from elastic.config import load_job
from elastic.record_lines import read_events, read_ledger
from elastic.rundir import RunDirectory, claim

MARK = "EVERSTEP_TEST_SITE"  # in the environment of all that a site starts
SCRATCH = ("everstep-ray-*", "everstep-sock-*")


class Site:
    def __init__(self, path: Path) -> None:
        self.path, self.mark = path, secrets.token_hex(8)
        self.scratch_before = scratch()
        self.jobs: list[LiveJob] = []

    def job(self, name: str, *settings: str, address: str = "local", resume: bool = False, **env: str) -> LiveJob:
        started = LiveJob(self, name, settings, address, resume, env)
        self.jobs.append(started)
        return started

    def popen(self, command: list[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        environment = {**os.environ, **env, MARK: self.mark}
        return subprocess.Popen(command, env=environment, cwd=self.path, start_new_session=True, **options)

    def living(self) -> dict[int, str]:
        """What this site has started and is still there: pid -> what it is."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
                except OSError:
                    continue
        return found

    def assert_nothing_is_left(self, within_seconds: float) -> None:
        eventually(lambda: not self.living(), within_seconds, lambda: f"still there: {self.living()}")
        left = scratch() - self.scratch_before - others()
        assert not left, f"still there: {left}"

    def close(self) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in self.jobs:
            job.process.wait()


class LiveJob:
    """`python -m elastic.job`, as `everstep run` starts it."""

    def __init__(
        self, site: Site, name: str, settings: tuple[str, ...], address: str, resume: bool, env: Mapping[str, str]
    ) -> None:
        self.run = RunDirectory(site.path / name)
        job = load_job(site.path / "job.yaml", [f"run.dir={self.run.path}", *settings])
        with claim(self.run, job, resume):
            pass
        command = [sys.executable, "-P", "-m", "elastic.job", str(self.run.path), "--address", address]
        self.begun = time.time()
        with self.run.job_log.open("ab") as log:
            self.process = site.popen(
                command + ["--resume"] * resume, env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def status(self) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads(self.run.status.read_bytes())
        except (OSError, ValueError):
            return {"step": -1, "members": [], "state": "starting"}
        return value

    def step(self) -> int:
        return int(self.status()["step"])

    def wait_for_step(self, step: int, within_seconds: float = 90.0) -> None:
        eventually(lambda: self.step() >= step or self.process.poll() is not None, within_seconds, self.story)
        assert self.process.poll() is None, self.story()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run.events) if kind in (None, e["kind"]) and e["time"] >= self.begun]

    def wait_until_settled(self, *nodes: int, within_seconds: float = 60.0) -> None:
        """Members on exactly these nodes, and a filled backup of every shard, so that one more death loses nothing."""

        def settled() -> bool:
            status = self.status()
            whole = status["state"] == "training" and status["shards_without_backup"] == 0
            return whole and tuple(sorted(m["node"] for m in self.members())) == nodes

        eventually(settled, within_seconds, self.story)

    def members(self) -> list[dict[str, Any]]:
        return [m for m in self.status()["members"] if m["role"] == "member"]

    def wait_for_event(self, kind: str, count: int = 1, within_seconds: float = 60.0) -> dict[str, Any]:
        eventually(lambda: len(self.events(kind)) >= count, within_seconds, self.story)
        return self.events(kind)[count - 1]

    def end(self, within_seconds: float = 60.0) -> int:
        try:
            return self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def targets(self) -> list[str]:
        """Where Prometheus is told to look."""
        listed = json.loads(self.run.prometheus_targets.read_text())
        return [target for entry in listed for target in entry["targets"]]

    def ledger(self) -> list[Any]:
        return read_ledger(self.run.ledger)

    def last_line(self) -> str:
        return self.run.job_log.read_text().strip().splitlines()[-1]

    def story(self) -> str:
        """For a failing test: what the job says of itself."""
        texts = [f"state {self.status()}"[:2000]]
        for path in sorted(self.run.logs.iterdir()):
            texts.append(f"--- {path.name}\n{path.read_text()[-1500:]}")
        texts.append("\n".join(str(e)[:300] for e in self.events()[-25:]))
        return "\n".join(texts)


def assert_same_as_alone(site: Site, job: LiveJob, settings: tuple[str, ...], steps: int) -> None:
    """The first steps have the bits that one worker gets that nothing happens to."""
    alone = load_job(site.path / "job.yaml", [*settings, "cluster.nodes=1", "cluster.workers_per_node=1"])
    with local_job(alone, site.path / "alone") as running:
        running.until(lambda: len(running.records) >= steps, 120.0)
        digests = {step: record.digest for step, record in running.records.items()}
    ours = {record.step: record.digest for record in job.ledger()}
    assert len(ours) >= steps
    assert all(ours[step] == digests[step] for step in range(steps))


def scrape(target: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def eventually(true: Callable[[], bool], within_seconds: float, story: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_seconds} s: {story()}")
        time.sleep(0.05)


def scratch() -> set[Path]:
    return {path for pattern in SCRATCH for path in Path("/tmp").glob(pattern)}


def others() -> set[Path]:
    """Of jobs that somebody else runs on this machine: locked by a living process."""
    held = set()
    for path in scratch():
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.add(path)
        finally:
            os.close(descriptor)
    return held
