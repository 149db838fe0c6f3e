"""A spot-availability trace on real processes: `everstep replay` of the shared one, compressed to some minutes.

A node has one worker. Each micro-batch is padded to a fixed time of the wall clock, so that more workers are more
speed on a machine with few cores; so is the undisturbed run's that the ideal is measured by.

    python -m bench.trace [--trace FILE] [--ticks A:B] [--minutes M] [--nodes N] [--notice SECONDS] [--keep DIR]

The whole trace in ten minutes is 2,368 times as fast as it was: a node lives for three seconds there, less than one
takes to start. A part of it shows how a job keeps up with nodes that live for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.chaos import EVERSTEP, JOB
from bench.results import ROOT, Result, report
from elastic.chaos.availability import read_trace

SHARED = Path(os.environ.get("EVERSTEP_SHARED_DATA", ROOT.parent / "shared" / "data"))
TRACE = SHARED / "spot_traces" / "aws_us-west-2c_16xV100_2023-08.json"
MINUTES, NODES, PAD_SECONDS = 10.0, 8, 0.05
SHARE = 0.9
TINY = (
    "model={hidden_size: 64, intermediate_size: 176, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}",
    "cluster={nodes: 1, workers_per_node: 1}",
    "data.seq_len=32",
    "checkpoint.full_every=10",
    f"train={{steps: 1000000, seed: 1, global_batch: 24, micro_batch: 1, logical_ranks: 24, "
    f"pad_micro_batch_seconds: {PAD_SECONDS}}}",
)


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"the trace ({TRACE})")
    parser.add_argument("--ticks", type=_ticks, metavar="A:B", help="only this part of it")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"that all of it takes ({MINUTES:g})")
    parser.add_argument("--nodes", type=int, default=NODES, help=f"that stand for the trace's capacity ({NODES})")
    parser.add_argument("--notice", type=float, default=0.0, help="seconds that a node is told before it goes (0)")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, which stay there")
    options = parser.parse_args()
    if not options.trace.is_file():
        print(f"{options.trace} is not here; name a trace with --trace, or its folder with EVERSTEP_SHARED_DATA")
        return True
    with contextlib.ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-")))
        return report(results(trial(place.resolve(), options), options))


def _ticks(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    return int(first), int(end)


def trial(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    first, end = options.ticks or (0, read_trace(options.trace).ticks)
    tick_seconds = options.minutes * 60.0 / (end - first)
    sets = [part for setting in (*TINY, f"run.dir={place}/run") for part in ("--set", setting)]
    how = ["--tick", str(tick_seconds), "--nodes", str(options.nodes), "--notice", str(options.notice)]
    how += [] if options.ticks is None else ["--ticks", f"{first}:{end}"]
    code = subprocess.run([*EVERSTEP, "replay", str(options.trace), JOB, *how, *sets]).returncode
    if code not in (0, 1):
        raise SystemExit(f"everstep replay: exit code {code}")
    found: dict[str, Any] = json.loads((place / f"run-replay-{options.trace.stem}" / "replay.json").read_bytes())
    return found


def results(found: dict[str, Any], options: argparse.Namespace) -> list[Result]:
    broken = [p["name"] for p in found["promises"] if not p["kept"]]
    part = "trace" if options.ticks is None else "ticks {}:{} of the trace".format(*options.ticks)
    pad = f"{PAD_SECONDS * 1e3:.0f} ms a micro-batch"
    case = f"{part} in {options.minutes:g} minutes, at most {options.nodes} nodes, {pad}"
    share = found["ideal"]["share"] or 0.0
    detail = {name: found[name] for name in ("steps", "rollbacks", "recomputed", "times_none", "ideal")}
    return [
        Result(f"{case}: breaches", len(broken), "", None, "0", not broken, {"broken": broken}),
        Result(f"{case}: committed tokens", share, "of the ideal", None, f">= {SHARE}", share >= SHARE, detail),
    ]


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
