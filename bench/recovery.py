"""Everstep beside torchft, torchrun and Ray Train: one worker killed every so often, the same job in each.

Each system in a venv of its own, as released, in the set-up that its documentation recommends and in a tuned one; for
each an undisturbed run first, which is what its own runs under kills are compared with. Writes docs/recovery.md and
docs/recovery.svg, and the figures that they are drawn from.

    python -m bench.recovery [--minutes M] [--intervals 15,30,60] [--systems everstep,torchft,torchrun,ray-train]
                             [--variants recommended,tuned] [--add] [--render]
                             [--note TEXT] [--docs DIR] [--figures FILE] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers import everstep_job, ray_train_ddp, torchft_ddp, torchrun_ddp
from bench.peers.drawing import draw
from bench.peers.measuring import Figures, figures, run
from bench.peers.page import page
from bench.peers.shape import WORKERS
from bench.peers.systems import SetUp
from bench.results import ROOT, Result, machine, report

SYSTEMS: dict[str, tuple[SetUp, ...]] = {
    "everstep": (everstep_job.SET_UP,),
    "torchft": torchft_ddp.SET_UPS,
    "torchrun": torchrun_ddp.SET_UPS,
    "ray-train": ray_train_ddp.SET_UPS,
}
VARIANTS = ("recommended", "tuned")
GOODPUT_TARGET = 0.95
MOST_MINUTES = 20.0  # more would use up the samples


def main() -> bool:
    options = parse()
    if not options.render:
        measure(options)
    measured = json.loads(options.figures.read_text())
    measured["note"] = options.note or measured.get("note", "")
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "recovery.md").write_text(page(measured))
    draw(options.figures, options.docs / "recovery.svg")
    print(f"written: {options.docs / 'recovery.md'}, {options.docs / 'recovery.svg'}", flush=True)
    return report(results(measured))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="each run's, its start not counted (4)")
    parser.add_argument("--intervals", type=_numbers, default=[15.0, 30.0, 60.0], help="seconds a kill (15,30,60)")
    parser.add_argument("--systems", type=_names(SYSTEMS), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--variants", type=_names(VARIANTS), default=list(VARIANTS), help=",".join(VARIANTS))
    parser.add_argument("--add", action="store_true", help="keep the other set-ups' figures that are there")
    parser.add_argument("--keep", type=Path, help="a directory to make, for the logs of all runs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where page and plot go (docs)")
    parser.add_argument("--figures", type=Path, default=ROOT / "runs" / "recovery.json", help="runs/recovery.json")
    parser.add_argument("--note", default="", help="what a reader of the page should know of how it was measured")
    parser.add_argument(
        "--render", action="store_true", help="no measuring: page and plot of the figures that are there"
    )
    options = parser.parse_args()
    if not 0.0 < options.minutes <= MOST_MINUTES:
        parser.error(f"--minutes: {options.minutes:g} is not in (0, {MOST_MINUTES:g}]")
    if any(interval > options.minutes * 60.0 for interval in options.intervals):
        parser.error("--intervals: longer than a run; give more --minutes")
    return options


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _names(known: Sequence[str] | dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return names


def measure(options: argparse.Namespace) -> None:
    """Written after every set-up, so that what is there is not lost with what fails."""
    set_ups = [one for name in options.systems for one in SYSTEMS[name] if one.variant in options.variants]
    measured: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "minutes": options.minutes,
        "workers": WORKERS,
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),  # of others: nothing of ours has begun
        "set_ups": [{"name": one.name, "settings": one.settings, "packages": one.packages} for one in set_ups],
        "rows": [],
        "failures": [],
    }
    options.figures.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(options.figures.read_text()) if options.add else None
    if before:
        with_others(measured, before)  # refuses what doesn't go together before it is measured
    for set_up in set_ups:
        rows, failures = measure_one(set_up, options.intervals, options.minutes * 60.0, options.keep)
        measured["rows"] += [asdict(row) for row in rows]
        measured["failures"] += [{"name": set_up.name, "what": what} for what in failures]
        written = with_others(measured, before) if before else measured
        options.figures.write_text(json.dumps(written, indent=1) + "\n")


def with_others(measured: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """And the set-ups that were measured before and are not now, in the order of SYSTEMS."""
    if before["minutes"] != measured["minutes"]:
        raise SystemExit(f"--add: what is there is of {before['minutes']:g} minutes a run, and now it is another")
    now = {one["name"] for one in measured["set_ups"]}
    order = [set_up.name for set_ups in SYSTEMS.values() for set_up in set_ups]
    merged = {**measured, "load": max(measured["load"], before.get("load", 0.0))}
    for key in ("set_ups", "rows", "failures"):
        both = [*measured[key], *(one for one in before[key] if name_of(one) not in now)]
        merged[key] = sorted(both, key=lambda one: order.index(name_of(one)))
    return merged


def name_of(one: dict[str, Any]) -> str:
    return one["name"] if "name" in one else f"{one['system']}, {one['variant']}"


def measure_one(
    set_up: SetUp, intervals: Sequence[float], seconds: float, keep: Path | None
) -> tuple[list[Figures], list[str]]:
    rows: list[Figures] = []
    failures = []
    undisturbed = None
    for interval in [None, *intervals]:
        case = "undisturbed" if interval is None else f"a kill every {interval:g} s"
        try:
            job = run(set_up, interval, seconds, keep and keep / f"{set_up.directory}-{interval or 0:g}")
            undisturbed = undisturbed or job
            rows.append(figures(set_up, interval, job, undisturbed))
            print(f"{set_up.name}, {case}: {_line(rows[-1])}", flush=True)
        except SystemExit as error:
            failures.append(f"{case}: {error}")
            print(f"{set_up.name}, {case}: failed: {error}", flush=True)
            if undisturbed is None:
                break
    return rows, failures


def _line(row: Figures) -> str:
    return (
        f"{row.samples_per_second:.1f} samples/s, {row.goodput:.3f} of undisturbed; {row.kills} kills,"
        f" {sum(row.pauses):.1f} s paused; {row.lost} samples lost, {row.repeated} repeated, {row.in_vain} in vain;"
        f" {row.uneven_steps} of {row.steps} steps with another batch;"
        f" loss differs by {row.deviation.loss:.2g}, parameters from step {row.deviation.first_step}"
    )


def results(measured: dict[str, Any]) -> list[Result]:
    out = []
    for row in measured["rows"]:
        if row["interval"] is None:
            continue
        ours = row["system"] == "Everstep"
        name = f"{row['system']}, {row['variant']}, a kill every {row['interval']:g} s"
        asked = ours and row["interval"] == 15.0
        detail = {key: value for key, value in row.items() if key != "progress"}
        out.append(
            Result(
                f"{name}: goodput",
                row["goodput"],
                "of undisturbed",
                None,
                f">= {GOODPUT_TARGET}" if asked else "",
                row["goodput"] >= GOODPUT_TARGET if asked else None,
                detail,
            )
        )
        same = row["deviation"]["loss"] == 0.0 and row["deviation"]["first_step"] is None
        out.append(
            Result(
                f"{name}: final loss",
                row["deviation"]["loss"],
                "from undisturbed",
                None,
                "0, the same parameters" if ours else "",
                same if ours else None,
            )
        )
    return out


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
