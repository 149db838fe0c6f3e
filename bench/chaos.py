"""Random faults on real processes: `everstep chaos` with one seed after another until so many have been injected.

Four workers on two nodes and a standby, a tiny model, more processes than cores. All runs are compared with one that is
undisturbed and no shorter; the figures are those of the runs' chaos.json.

    python -m bench.chaos [--faults N] [--minutes M] [--mtbf SECONDS] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.results import ROOT, Result, report
from elastic.chaos.figures import percentile

FAULTS, MINUTES, MTBF_SECONDS = 200, 4.0, 8.0
PAUSE_MEDIAN_MS, PAUSE_P99_MS, FROZEN_MS, CONTROLLER_MS = 30.0, 300.0, 1000.0, 5000.0
MORE_SECONDS = 30.0  # a disturbed run goes on until it is whole again
JOB = str(ROOT / "examples" / "stdlib.yaml")
EVERSTEP = (sys.executable, "-P", "-m", "elastic.cli")
TINY = (
    "model={hidden_size: 64, intermediate_size: 176, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}",
    "cluster={nodes: 2, workers_per_node: 2, standbys: 1}",
    "data.seq_len=32",
    "train.steps=1000000",
)


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=FAULTS, help=f"how many ({FAULTS})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of faults in one run ({MINUTES:g})")
    parser.add_argument("--mtbf", type=float, default=MTBF_SECONDS, help=f"seconds between two ({MTBF_SECONDS:g})")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, which stay there")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-")))
        return report(results(trials(place.resolve(), options.faults, options.minutes, options.mtbf)))


def trials(place: Path, faults: int, minutes: float, mtbf_seconds: float) -> list[dict[str, Any]]:
    """The reports of as many runs as it takes."""
    found: list[dict[str, Any]] = []
    reference = ("--reference", str(undisturbed(place, minutes * 60.0 + MORE_SECONDS)))
    while sum(len(trial["faults"]) for trial in found) < faults:
        seed = len(found) + 1
        how = ["--seed", str(seed), "--minutes", str(minutes), "--mtbf", str(mtbf_seconds), *reference]
        code = subprocess.run([*EVERSTEP, "chaos", JOB, *how, *settings(place / "run")]).returncode
        if code not in (0, 1):
            raise SystemExit(f"everstep chaos: exit code {code}")
        found.append(json.loads((place / f"run-chaos-{seed}" / "chaos.json").read_bytes()))
        if not found[-1]["faults"]:
            raise SystemExit("everstep chaos injected nothing; give it more --minutes")
    return found


def settings(directory: Path) -> list[str]:
    given = (*TINY, "checkpoint.full_every=50", f"run.dir={directory}")
    return [part for setting in given for part in ("--set", setting)]


def undisturbed(place: Path, seconds: float) -> Path:
    """A run that is left alone for so long from its first step on, then stopped."""
    run = place / "undisturbed"
    job = subprocess.Popen([*EVERSTEP, "run", JOB, *settings(run)])
    ledger = run / "ledger.jsonl"
    while not (ledger.exists() and ledger.stat().st_size) and job.poll() is None:
        time.sleep(0.5)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(seconds)
    job.send_signal(signal.SIGINT)
    if job.wait() not in (0, 130):
        raise SystemExit(f"the undisturbed run: exit code {job.returncode}")
    return run


# --- figures ----------------------------------------------------------------------------------------------------------


def results(reports: Sequence[dict[str, Any]]) -> list[Result]:
    faults = [fault for trial in reports for fault in trial["faults"]]
    broken = [p["name"] for trial in reports for p in trial["promises"] if not p["kept"]]
    case = f"chaos, {len(faults)} faults, 4 workers on 2 nodes"
    steps = sum(trial["steps"] for trial in reports)
    rows = [
        Result(f"{case}: breaches", len(broken), "", None, "0", not broken, {"broken": broken, "steps": steps}),
        *_of(case, "pause, killed workers, median", _values(faults, "kill-worker", "pause_ms"), 0.5, PAUSE_MEDIAN_MS),
        *_of(case, "pause, killed workers, p99", _values(faults, "kill-worker", "pause_ms"), 0.99, PAUSE_P99_MS),
        *_of(case, "frozen worker found, worst", _frozen(faults, "detect_ms"), 1.0, FROZEN_MS),
        *_of(case, "frozen worker replaced, worst", _frozen(faults, "replaced_ms"), 1.0, FROZEN_MS),
        *_of(case, "controller back, worst", _values(faults, "kill-controller", "detect_ms"), 1.0, CONTROLLER_MS),
    ]
    goodputs = [trial["goodput"] for trial in reports if trial["goodput"] is not None]
    if goodputs:
        rows.append(
            Result(f"{case}: goodput", percentile(goodputs, 0.5), "of undisturbed", detail={"values": goodputs})
        )
    return rows


def _values(faults: Sequence[dict[str, Any]], kind: str, name: str) -> list[float]:
    return [fault[name] for fault in faults if fault["kind"] == kind and fault[name] is not None]


def _frozen(faults: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Of those that were frozen for good; one that thaws need not be missed."""
    for_good = [fault for fault in faults if "seconds" not in fault["fault"]]
    return _values(for_good, "freeze-worker", name)


def _of(case: str, what: str, values: Sequence[float], share: float, target_ms: float) -> list[Result]:
    if not values:
        return []
    figure = percentile(values, share)
    detail = {"values": [round(value, 1) for value in values]}
    return [Result(f"{case}: {what}", figure, "ms", None, f"<= {target_ms:.0f} ms", figure <= target_ms, detail)]


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
