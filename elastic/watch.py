"""A viewer: follows the files of a run until the job process is gone, and passes Ctrl-C on to it.

Rules of this room: a viewer holds nothing. It learns what happens from files only, judges whether the job lives by
its lock (or, of a child, by the child), and can come and go at any time without the job noticing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from elastic.record_lines import Tail, read_events
from elastic.rundir import RunDirectory, holder, last_held
from elastic.screen import Screen, screen_for
from elastic.view import RunView

POLL_SECONDS = 0.1
JOB_EXIT_CODES = (0, 2, 3, 130)
STOPPING = "stopping at the next step with a checkpoint; Ctrl-C again ends at once"
ENDING = "ending at once"
EXIT_CODES = {"done": 0, "stopped": 130, "failed": 3, "detached": 0}

State: TypeAlias = Literal["done", "stopped", "failed", "detached"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended, for this viewer. `reason` is one line, for a failure."""

    state: State
    reason: str
    exit_code: int


class Signals:
    """Counts what the terminal asks for while the block runs; nothing is done inside a handler."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.hung_up = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._noted)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _noted(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.hung_up = True
        else:
            self.interrupts += 1


# --- the job process, as a viewer sees it --------------------------------------------------------------------


class Child:
    """The job process that this process started; its own part of the log begins at byte `log_start`."""

    def __init__(self, process: subprocess.Popen[bytes], log_start: int) -> None:
        self.process, self.log_start = process, log_start
        self._passed_on = 0

    def alive(self) -> bool:
        return self.process.poll() is None

    def pass_on(self, interrupts: int) -> list[str]:
        """Tell the job of those that it hasn't heard of; what each will lead to. The first asks it to stop with a
        checkpoint, the next to end: another signal, as two of one kind that wait to be handled would count as one."""
        first, self._passed_on = self._passed_on, max(interrupts, self._passed_on)
        for number in range(first, interrupts):
            if self.alive():
                self.process.send_signal(signal.SIGTERM if number else signal.SIGINT)
        return [ENDING if number else STOPPING for number in range(first, interrupts)]


# --- following -----------------------------------------------------------------------------------------------


class Follower:
    """Feeds a view and a screen from the run's files. `from_end`: what is there already is taken in silently."""

    def __init__(self, run: RunDirectory, view: RunView, from_end: bool) -> None:
        self._run, self._view = run, view
        self._ledger, self._events = Tail(run.ledger), Tail(run.events)
        if from_end:
            self.take_in()
            view.ended, view.faults = None, 0

    def take_in(self) -> None:
        """Bring the view up to date and show nothing."""
        for record in self._ledger.read():
            self._view.record(record)
        for event in self._events.read():
            self._view.event(event)

    def step(self, screen: Screen) -> None:
        """Take in what is new, steps and events in the order of their times."""
        self._view.status(read_status(self._run) or {})
        new = [(_time(r), 0, r) for r in self._ledger.read()] + [(_time(e), 1, e) for e in self._events.read()]
        for _, is_event, line in sorted(new, key=lambda entry: entry[:2]):
            if is_event:
                self._view.event(line)
                if not (line.get("kind") == "run_ended" and line.get("state") == "failed"):
                    screen.event(line)
            else:
                self._view.record(line)
                screen.record(line)
        screen.refresh()


def follow(
    run: RunDirectory, view: RunView, job: Child, signals: Signals, follower: Follower, greeting: str = ""
) -> Outcome:
    """Watch one's own job until it is gone."""
    with screen_for(view) as screen:
        if greeting:
            screen.say(greeting)
        while True:
            alive = job.alive()
            follower.step(screen)
            if not alive:
                break
            if signals.hung_up:
                return Outcome("detached", "", 0)
            for consequence in job.pass_on(signals.interrupts):
                screen.say(consequence)
            time.sleep(POLL_SECONDS)
    return outcome_of(run, view.ended, job)


def attend(run: RunDirectory, view: RunView, signals: Signals) -> Outcome:
    """Watch a job that was started elsewhere. Ctrl-C only detaches."""
    follower = Follower(run, view, from_end=True)
    if holder(run) is None:
        return outcome_of(run, last_end(run))
    with screen_for(view) as screen:
        screen.say(f"attached at step {view.done_steps} of {view.steps}; Ctrl-C detaches")
        while True:
            alive = holder(run) is not None
            follower.step(screen)
            if not alive:
                break
            if signals.interrupts or signals.hung_up:
                return Outcome("detached", "", 0)
            time.sleep(POLL_SECONDS)
    return outcome_of(run, last_end(run))  # which may have been there already: a job's last event isn't its end


def wait_until_up(run: RunDirectory, view: RunView, job: Child, signals: Signals, follower: Follower) -> Outcome | None:
    """Return None once the job says that it is up, or how it ended before that."""
    while job.alive():
        if run.cluster.exists():
            return None
        job.pass_on(signals.interrupts)
        time.sleep(POLL_SECONDS)
    follower.take_in()
    return outcome_of(run, view.ended, job)


def outcome_of(run: RunDirectory, ended: Mapping[str, Any] | None, job: Child | None = None) -> Outcome:
    """From the job's last word, if it had one, and of one's own child also from its exit code."""
    code = job.process.returncode if job is not None else None
    state = ended.get("state") if ended is not None else None
    if state in ("done", "stopped", "failed"):
        known = code if code in JOB_EXIT_CODES else EXIT_CODES[state]
        reason = str((ended or {}).get("reason") or "")
        return Outcome(state, reason, known)
    if code == EXIT_CODES["stopped"]:  # ended at once, by a second Ctrl-C
        return Outcome("stopped", "", code)
    last = _last_line(run.job_log, job.log_start if job is not None else 0)
    if code in (2, 3) and last:
        return Outcome("failed", last.removeprefix("everstep: "), code)
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "died"
    said = f"; its last words were: {last}" if last else ""
    return Outcome("failed", f"the job process {how} without ending the run (see {run.job_log}){said}", 3)


# --- small readings ------------------------------------------------------------------------------------------


def read_status(run: RunDirectory) -> dict[str, Any] | None:
    """What the controller last said of the members, if anything."""
    try:
        value = json.loads(run.status.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def last_end(run: RunDirectory) -> Mapping[str, Any] | None:
    """The event with which the last job here ended; None if it died. A job that came after that event had the lock."""
    events = read_events(run.events)
    if not events or events[-1].get("kind") != "run_ended":
        return None
    return events[-1] if _time(events[-1]) >= last_held(run) else None


def _time(line: Mapping[str, Any]) -> float:
    value = line.get("time")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _last_line(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def complain(text: str) -> None:
    """The one clear line, on stderr."""
    print(f"everstep: {text}", file=sys.stderr, flush=True)
