"""One job, started, watched, disturbed by a conductor, stopped. Acts; decides nothing.

    start ──first step──▶ conducted ──over, or Ctrl-C──▶ stopping ──▶ the job process is gone

The job runs as under `everstep run`: in a session of its own, known by its files and its lock. Ctrl-C stops it with a
checkpoint, a second one ends it at once.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from elastic.chaos.conduct import Conductor
from elastic.chaos.injector import Injector
from elastic.chaos.standing import Standing, read_standing
from elastic.config import JobConfig
from elastic.launch import start_job
from elastic.rundir import RunDirectory, claim
from elastic.screen import LiveScreen, PlainScreen, Screen
from elastic.view import RunView
from elastic.watch import Child, Follower, Outcome, Signals, outcome_of, read_status

POLL_SECONDS = 0.05
SHOWN_KINDS = ("fault_injected", "fault_skipped", "recovery", "run_ended")
GONE = "the job could not be reached"


class Undisturbed:
    """Of a job that is only to run to its own end."""

    def turn(self, now: float, standing: Standing) -> None:
        return None

    def answered(self, answer: str, time: float) -> None:
        """Nothing is asked for."""

    def over(self, now: float, standing: Standing) -> bool:
        return False


class Events(PlainScreen):
    """Thousands of steps go by: without a terminal only what happens to the job is shown."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Not shown."""

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") in SHOWN_KINDS:
            super().event(event)


@dataclass(frozen=True, slots=True)
class Sat:
    """How it went. On the wall clock `began`: the conductor's second 0; `stopped_at`: when it asked for the end. None:
    the job ended first."""

    outcome: Outcome
    began: float | None
    stopped_at: float | None
    interrupted: bool


def sit(job: JobConfig, conductor: Conductor, signals: Signals, greeting: str) -> Sat:
    """Run the job to its end. Its data is prepared and its directory free. Raises what claiming it raises."""
    run = RunDirectory(job.run_dir)
    view = RunView(job.run.name, job.train.steps)
    with claim(run, job, resume=False) as lock:
        follower = Follower(run, view, from_end=False)
        child = start_job(run, False, "local", lock)
    console = Console()
    screen: Screen = LiveScreen(view, console) if console.is_terminal else Events(view)
    with contextlib.closing(_Sitting(run, child, conductor, signals)) as sitting, screen:
        screen.say(greeting)
        while True:
            alive = child.alive()
            follower.step(screen)
            if not alive:
                break
            for consequence in child.pass_on(sitting.interrupts()):
                screen.say(consequence)
            sitting.look(view.done_steps)
            time.sleep(POLL_SECONDS)
    interrupted = signals.interrupts > 0 or signals.hung_up
    return Sat(outcome_of(run, view.ended, child), sitting.began_at, sitting.stopped_at, interrupted)


class _Sitting:
    """The conductor's hands: one fault at a time, and the next once that is answered."""

    def __init__(self, run: RunDirectory, child: Child, conductor: Conductor, signals: Signals) -> None:
        self.began_at: float | None = None
        self.stopped_at: float | None = None
        self._run, self._child, self._conductor, self._signals = run, child, conductor, signals
        self._injector: Injector | None = None
        self._began: float | None = None
        self._disturbing = not isinstance(conductor, Undisturbed)
        self._waiting = False  # for the injector's word
        self._asked: float | None = None  # when a fault was, on the wall clock; None: none is under way

    def interrupts(self) -> int:
        """The terminal's, or the conductor's one. A closed terminal counts: a job that is judged isn't left alone."""
        return max(self._signals.interrupts + self._signals.hung_up, int(self.stopped_at is not None))

    def look(self, done_steps: int) -> None:
        self._connect()
        if self.interrupts() or self._injector is None or not self._is_answered():
            return
        if self._began is None:
            if not done_steps:
                return
            self._began, self.began_at = time.monotonic(), time.time()
        now, standing = time.monotonic() - self._began, read_standing(read_status(self._run))
        if self._conductor.over(now, standing):
            self.stopped_at = time.time()
        elif (fault := self._conductor.turn(now, standing)) is not None:
            self._ask(str(fault))

    def close(self) -> None:
        if self._injector is not None:
            self._injector.close()

    def _connect(self) -> None:
        """Once the job is up, and beforehand: that takes seconds. Again if the injector has gone."""
        if self._injector is None and self._disturbing and self._run.cluster.exists():
            self._injector = Injector(self._run.path, self._run.logs / "injector.log")
            self._waiting = True

    def _ask(self, fault: str) -> None:
        assert self._injector is not None
        self._asked, self._waiting = time.time(), True
        self._injector.ask(fault)

    def _is_answered(self) -> bool:
        """Whether nothing is under way between the injector and the controller."""
        assert self._injector is not None
        if not self._waiting:
            return True
        try:
            answer = self._injector.answer()
        except queue.Empty:
            return False
        self._waiting = False
        if answer is None:  # it lost the job's Ray
            self._injector.close()
            self._injector = None
        if self._asked is not None:
            self._conductor.answered(GONE if answer is None else answer, self._asked)
            self._asked = None
        return self._injector is not None
