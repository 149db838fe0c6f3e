"""python -m tests.sim --seeds 0:1000 [--processes 2] [--plant NAME] · --seed N [--trace] · --list"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim import preemption
from tests.sim.bugs import BUGS
from tests.sim.faults import CHANGE_POINTS, STEP_POINTS
from tests.sim.faults import KINDS as DRAWN
from tests.sim.runs import run_seed, run_seeds
from tests.sim.world import Outcome

KINDS = (*DRAWN, preemption.KIND)


def main() -> int:
    options = parse(sys.argv[1:])
    if options.list:
        for name, bug in BUGS.items():
            print(f"{name:40} rule {bug.rule:16} {bug.what}")
        return 0
    if options.seed is not None:
        outcome = run_seed(options.seed, options.plant, tracing=options.trace)
        for line in outcome.trace:
            print(line)
        print(summary_line(outcome, options.plant))
        return 1 if outcome.violation is not None else 0
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end))
    began = time.monotonic()
    outcomes = []
    for outcome in run_seeds(seeds, options.plant, options.processes):
        outcomes.append(outcome)
        if outcome.violation is not None:
            print(summary_line(outcome, options.plant), flush=True)
    print_report(outcomes, time.monotonic() - began)
    return 1 if any(o.violation is not None for o in outcomes) else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, END not included")
    parser.add_argument("--seed", type=int, help="one seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell everything that happens")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plant", choices=sorted(BUGS), help="plant this bug first")
    parser.add_argument("--list", action="store_true", help="the bugs that can be planted")
    return parser.parse_args(arguments)


def summary_line(outcome: Outcome, plant: str | None) -> str:
    if outcome.violation is None:
        return f"seed {outcome.seed}: well, {outcome.events} events, {outcome.simulated_seconds:.1f} simulated seconds"
    planted = f" --plant {plant}" if plant is not None else ""
    return (
        f"seed {outcome.seed}: {outcome.violation}\n"
        f"    replay it: python -m tests.sim --seed {outcome.seed} --trace{planted}"
    )


def print_report(outcomes: list[Outcome], seconds: float) -> None:
    bad = sum(o.violation is not None for o in outcomes)
    events = sum(o.events for o in outcomes)
    number = max(1, len(outcomes))
    faults = [len(o.faults) + o.job_faults for o in outcomes]
    print(
        f"{len(outcomes)} seeds in {seconds:.1f} s, {bad} failing; per seed {events / number:.0f} events, "
        f"{sum(o.plans for o in outcomes) / number:.1f} plans, {sum(faults) / number:.1f} faults "
        f"(at least {min(faults, default=0)})\n"
        f"{sum(o.rollbacks for o in outcomes)} rollbacks, "
        f"{sum(o.recomputed for o in outcomes)} logical ranks computed again"
    )
    coverage = Counter(fault for o in outcomes for fault in o.faults)
    points = [
        p for p in (*STEP_POINTS, *CHANGE_POINTS, "ahead", "overtaken", "late") if any(coverage[p, k] for k in KINDS)
    ]
    print(f"\n{'faults by protocol point':24}" + "".join(f"{shorten(k):>9}" for k in KINDS) + f"{'all':>9}")
    for point in points:
        hits = [coverage[point, kind] for kind in KINDS]
        print(f"{point:24}" + "".join(f"{hit or '.':>9}" for hit in hits) + f"{sum(hits):>9}")


def shorten(kind: str) -> str:
    return kind.replace("worker", "w").replace("controller", "ctl").replace("favour", "fav")


if __name__ == "__main__":
    sys.exit(main())
