"""python -m tests.sim [--double [--coverage]] --seeds 0:1000 [--plant NAME] · --seed N [--trace] · --bugs"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim import preemption
from tests.sim.bugs import BUGS
from tests.sim.classes import table
from tests.sim.doubles import CASES, coverage, name_of, pair_of
from tests.sim.faults import CHANGE_POINTS, STEP_POINTS
from tests.sim.faults import KINDS as DRAWN
from tests.sim.runs import run_seed, run_seeds
from tests.sim.world import Outcome

KINDS = (*DRAWN, preemption.KIND)


def main() -> int:
    options = parse(sys.argv[1:])
    if options.bugs:
        print("\n".join(table()))
        return 0
    if options.seed is not None:
        outcome = run_seed(options.seed, options.plant, options.trace, options.double)
        for line in outcome.trace:
            print(line)
        print(summary_line(outcome, options))
        return 1 if outcome.violation is not None else 0
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end))
    began = time.monotonic()
    outcomes = []
    for outcome in run_seeds(seeds, options.plant, options.processes, options.double):
        outcomes.append(outcome)
        if outcome.violation is not None:
            print(summary_line(outcome, options), flush=True)
    print_totals(outcomes, time.monotonic() - began)
    if options.double:
        print_double_coverage(outcomes, options.coverage)
    else:
        print_coverage(outcomes)
    return 1 if any(o.violation is not None for o in outcomes) else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, END not included")
    parser.add_argument("--seed", type=int, help="one seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell everything that happens")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plant", choices=sorted(BUGS), help="plant this bug first")
    parser.add_argument(
        "--double", action="store_true", help="two faults a seed, all pairs of faults and points in turn"
    )
    parser.add_argument("--coverage", action="store_true", help="with --double: which pairs came about how often")
    parser.add_argument("--bugs", action="store_true", help="the bugs that can be planted, by class")
    return parser.parse_args(arguments)


def summary_line(outcome: Outcome, options: argparse.Namespace) -> str:
    pair = ""
    if options.double:
        first, second = pair_of(outcome.seed)
        pair = f" ({name_of(first)}, then {name_of(second)})"
    if outcome.violation is None:
        seconds = f"{outcome.simulated_seconds:.1f} simulated seconds"
        return f"seed {outcome.seed}{pair}: well, {outcome.events} events, {seconds}"
    planted = f" --plant {options.plant}" if options.plant is not None else ""
    double = " --double" if options.double else ""
    return (
        f"seed {outcome.seed}{pair}: {outcome.violation}\n"
        f"    replay it: python -m tests.sim{double} --seed {outcome.seed} --trace{planted}"
    )


def print_totals(outcomes: list[Outcome], seconds: float) -> None:
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


def print_coverage(outcomes: list[Outcome]) -> None:
    coverage = Counter(fault for o in outcomes for fault in o.faults)
    points = [
        p for p in (*STEP_POINTS, *CHANGE_POINTS, "ahead", "overtaken", "late") if any(coverage[p, k] for k in KINDS)
    ]
    print(f"\n{'faults by protocol point':24}" + "".join(f"{shorten(k):>9}" for k in KINDS) + f"{'all':>9}")
    for point in points:
        hits = [coverage[point, kind] for kind in KINDS]
        print(f"{point:24}" + "".join(f"{hit or '.':>9}" for hit in hits) + f"{sum(hits):>9}")


def print_double_coverage(outcomes: list[Outcome], whole: bool) -> None:
    pairs, single = coverage(outcomes)
    missed = [pair for pair, hits in pairs.items() if not hits]
    print(f"\n{len(pairs) - len(missed)} of {len(pairs)} pairs of (fault, point) came about, each at its point")
    if not whole:
        return
    print(f"\n{'fault':34}{'drawn':>7}{'at its point':>14}")
    for case, (drawn, reached) in single.items():
        print(f"{name_of(case):34}{drawn:>7}{reached:>14}")
    names = [name_of(case) for case in CASES]
    print("\npairs that came about: first fault down, second across, in the same order")
    for number, first in enumerate(CASES):
        hits = " ".join(str(pairs[first, second] or ".") for second in CASES)
        print(f"{names[number]:34}{hits}")
    for first, second in missed:
        print(f"not seen: {name_of(first)}, then {name_of(second)}")


def shorten(kind: str) -> str:
    return kind.replace("worker", "w").replace("controller", "ctl").replace("favour", "fav")


if __name__ == "__main__":
    sys.exit(main())
