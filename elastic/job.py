"""The job process: `python -m elastic.job RUN [--address ADDR] [--resume] [--lock FD]`, in a session of its own.

It holds the run directory's lock for as long as the job lives, brings up Ray and the controller, waits for the end and
leaves nothing behind, whatever the end is. It decides nothing about training.

    SIGINT, SIGTERM   stop at the next step with a checkpoint; a second one: end at once
    exit codes        0 done, 2 can't begin, 3 failed, 130 stopped
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dataloader.errors import EverstepError
from elastic import durable
from elastic.config import JobConfig, stored_job
from elastic.record_lines import read_events, read_ledger
from elastic.records import EventLog
from elastic.rundir import RunDirectory, hold, open_run, write_atomic
from runtime.comm.local import private_directory

if TYPE_CHECKING:
    from elastic.cluster.session import Ended

EXIT_CODES = {"done": 0, "failed": 3, "stopped": 130}
POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0
NOT_BEGUN = "stopped before it had begun"
AT_ONCE = "ended at once by a second signal; resume with --resume"


class Signals:
    """How often somebody asked for the end. Nothing is done inside a handler."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Ray installs handlers of its own when it starts, so this is called again after that."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._noted)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # `everstep run` blocks them

    def _noted(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job to its end; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m elastic.job")
    parser.add_argument("run", type=Path)
    parser.add_argument("--address", default="local")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lock", type=int, help="the run directory's lock, held already: an inherited descriptor")
    parsed = parser.parse_args(arguments)
    signals = Signals()
    signals.install()
    try:
        run = open_run(parsed.run.resolve())
        with hold(run, parsed.lock):
            return run_job(run, stored_job(run.job), parsed.address, parsed.resume, signals)
    except EverstepError as error:
        print(f"everstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def run_job(run: RunDirectory, job: JobConfig, address: str, resume: bool, signals: Signals) -> int:
    """The job in a run directory whose lock is held. Its end is written down here if the controller hasn't done it."""
    begun = time.time()
    code = 3
    try:
        durable.begin(run, job.faults, resume)
        ended = _live(run, job, address, signals)
        state, reason, code = ended.state, ended.reason, EXIT_CODES[ended.state]
    except SystemExit:  # Ray's answer to a SIGTERM while it starts
        state, reason, code = "stopped", NOT_BEGUN, EXIT_CODES["stopped"]
    except EverstepError as error:
        state, reason, code = "failed", str(error), error.exit_code
    except Exception as error:  # the process's edge
        traceback.print_exc()
        state, reason = "failed", f"the job process failed: {type(error).__name__}: {error}; see {run.job_log}"
    with contextlib.suppress(OSError):
        write_atomic(run.prometheus_targets, b"[]", durable=False)  # nobody answers there any more
    with contextlib.suppress(EverstepError), private_directory():
        pass  # making one removes those that killed agents couldn't
    _write_end(run, state, reason, begun)
    if state == "failed":
        print(f"everstep: {reason}", file=sys.stderr, flush=True)
    return code


def _live(run: RunDirectory, job: JobConfig, address: str, signals: Signals) -> Ended:
    from elastic.cluster import engine, names

    run_id = secrets.token_hex(5)
    with engine.open_ray(address, names.namespace(run_id), job) as ray_engine:
        from elastic.cluster.session import Ended, Session  # after the token is in place: see engine.py

        signals.install()
        if signals.count:
            return Ended("stopped", NOT_BEGUN)
        session = Session(ray_engine, run, job, run_id)
        try:
            if not session.begin(lambda: signals.count > 0):
                return Ended("stopped", NOT_BEGUN)
            contact: dict[str, Any] = {**ray_engine.contact(), "controller": names.CONTROLLER, "pid": os.getpid()}
            write_atomic(run.cluster, json.dumps(contact).encode(), durable=False)
            ended, grace_seconds = _wait(session, signals)
        except BaseException:
            session.end(0.0)
            raise
        finally:
            run.cluster.unlink(missing_ok=True)
        session.end(grace_seconds)
        return ended


def _wait(session: Any, signals: Signals) -> tuple[Ended, float]:
    """How the job ended, and how long its workers may take to follow."""
    from elastic.cluster.session import Ended

    asked = False
    while True:
        if signals.count >= 2:
            return Ended("stopped", AT_ONCE), 0.0
        if signals.count and not asked:
            asked = True
            session.stop()
        ended = session.wait(POLL_SECONDS)
        if ended is not None:
            return ended, GRACE_SECONDS


def _write_end(run: RunDirectory, state: str, reason: str, since: float) -> None:
    """`run_ended` is the last event of every job that was not killed. The controller writes it where there is one."""
    with contextlib.suppress(EverstepError):
        if any(event["kind"] == "run_ended" and event["time"] >= since for event in read_events(run.events)):
            return
        past = [int(event.get("generation", 0)) for event in read_events(run.events)]
        place = {"step": len(read_ledger(run.ledger)), "generation": max(past, default=0)}
        with EventLog(run.events) as events:
            events.append("run_ended", time=time.time(), **place, state=state, reason=reason)


if __name__ == "__main__":
    sys.exit(main())
