"""What a killed worker costs: 20 SIGKILLs at random points among four busy workers, by the way a user's job goes.

`everstep run --detach` with a local Ray, two node agents and a standby; `everstep inject kill-worker=ID` whenever the
job has four members again, all copies are filled and the standby is warm; the figures are the `recovery` events'.
The demo's job, so all workers are busy all the time, and more processes than cores.

    python -m bench.kills [--kills N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.results import ROOT, Result, report
from elastic.record_lines import read_events
from elastic.rundir import RunDirectory, holder

KILLS = 20
PAUSE_TARGET_MS = 50.0
TOTAL_TARGET_MS = 200.0
SEED = 20
RANDOM_DELAY_SECONDS = 2.0  # some steps
TIMEOUT_SECONDS = 180.0
POLL_SECONDS = 0.25
EVERSTEP = (sys.executable, "-P", "-m", "elastic.cli")


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS, help=f"how many ({KILLS})")
    parser.add_argument("--keep", type=Path, help="a run directory to make and to leave")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-"))) / "run"
        return report(compare(measure(RunDirectory(place.resolve()), options.kills)))


def measure(run: RunDirectory, kills: int) -> list[dict[str, Any]]:
    """The `recovery` events of so many kills."""
    rng = random.Random(SEED)
    with running(run):
        for number in range(kills):
            wait_for(lambda: is_whole(run), "four members and a warm standby", run)
            time.sleep(rng.uniform(0.0, RANDOM_DELAY_SECONDS))
            victim = rng.choice(members(run))
            command("inject", str(run.path), f"kill-worker={victim}")
            wait_for(lambda number=number: len(recoveries(run)) > number, "the recovery", run)  # type: ignore[misc]
            last = recoveries(run)[-1]
            print(
                f"kill {number + 1:2d}: worker {victim}, detect {last['detect_ms']} ms, pause {last['pause_ms']} ms,"
                f" recomputed {last['recomputed']} in {last['recompute_ms']} ms",
                flush=True,
            )
        return recoveries(run)


@contextlib.contextmanager
def running(run: RunDirectory) -> Iterator[None]:
    """The job, up; stopped at the end, by force if need be."""
    settings = [f"run.dir={run.path}", "train.steps=100000", "cluster.nodes=2", "cluster.workers_per_node=2"]
    settings += ["cluster.standbys=1"]
    sets = [part for setting in settings for part in ("--set", setting)]
    command("run", str(ROOT / "examples" / "stdlib.yaml"), *sets, "--detach")
    try:
        yield
        command("inject", str(run.path), "stop")
        wait_for(lambda: holder(run) is None, "the job's end", run)
    finally:
        if (job := holder(run)) is not None and job.pid is not None:
            for _ in range(2):  # the second ends it at once
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGINT)
                time.sleep(1.0)


def command(*arguments: str) -> None:
    done = subprocess.run([*EVERSTEP, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"everstep {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()}")


def wait_for(reached: Callable[[], bool], what: str, run: RunDirectory) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"{run.path}: {what} didn't come within {TIMEOUT_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


# --- what the run directory says ------------------------------------------------------------------------------------


def status(run: RunDirectory) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(run.status.read_text())
    except FileNotFoundError:
        return {"state": "starting", "members": []}
    return found


def members(run: RunDirectory) -> list[int]:
    return [m["id"] for m in status(run)["members"] if m["role"] == "member"]


def is_whole(run: RunDirectory) -> bool:
    now = status(run)
    roles = sorted(m["role"] for m in now["members"])
    return (
        now["state"] == "training"
        and roles == ["member"] * 4 + ["standby"]
        and now["shards_without_backup"] == 0
        and now["step"] > last_plan_step(run)
    )


def last_plan_step(run: RunDirectory) -> int:
    return max((event["step"] for event in read_events(run.events) if event["kind"] == "plan"), default=0)


def recoveries(run: RunDirectory) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events) if event["kind"] == "recovery"]


# --- figures ----------------------------------------------------------------------------------------------------------


def compare(events: list[dict[str, Any]]) -> list[Result]:
    pause = [event["pause_ms"] for event in events]
    dated = [event for event in events if event["detect_ms"] is not None]  # None: nobody knows when the kill was
    detect = [event["detect_ms"] for event in dated]
    both = [event["detect_ms"] + event["pause_ms"] for event in dated]
    recompute = [event["recompute_ms"] for event in events]
    waited = [p for p in pause if p > 0.0]  # 0: every survivor was computing, so nobody waited
    case = f"recovery, {len(events)} SIGKILLs among 4 workers"
    known = "" if len(dated) == len(events) else f" of the {len(dated)} whose moment is known"
    rows: list[tuple[str, list[float], float | None]] = [
        ("pause", pause, PAUSE_TARGET_MS),
        (f"pause of the {len(waited)} at which somebody waited", waited, None),
        (f"detect{known}", detect, None),
        (f"detect + pause{known}", both, TOTAL_TARGET_MS),
        ("recompute", recompute, None),
    ]
    more = {"recompute": {"micro_batches": [event["recomputed"] for event in events]}}
    return [_result(f"{case}: {what}", values, target, more.get(what)) for what, values, target in rows if values]


def _result(name: str, values: list[float], target: float | None, more: dict[str, Any] | None = None) -> Result:
    figure = median(values)
    detail = {"max": max(values), "values": [round(value, 1) for value in values], **(more or {})}
    if target is None:
        return Result(name, figure, "ms", detail=detail)
    return Result(name, figure, "ms", None, f"median <= {target:.0f} ms", figure <= target, detail)


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
