"""The simulator from the command line.

python -m tests.sim --seeds 0:1000            many seeds: failures, events per seed, which points were hit by what
python -m tests.sim --seed 17 --trace         one seed with its transcript
python -m tests.sim --seeds 0:1000 --plant old-frames-accepted      with a bug planted, up to the first failure
"""

from __future__ import annotations

import argparse
import sys

from tests.sim.bugs import BUGS, planted
from tests.sim.report import coverage_table, run_seeds
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:1000", metavar="FROM:TO")
    parser.add_argument("--seed", type=int, metavar="N", help="one seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plant", choices=sorted(BUGS), metavar="NAME", help="run with this bug; 'list' in bugs.py")
    options = parser.parse_args()
    plant = f" --plant {options.plant}" if options.plant else ""
    if options.seed is not None:
        with planted(options.plant):
            outcome = World(options.seed, tracing=options.trace).run()
        print("\n".join(outcome.trace))
        print(f"seed {options.seed}: {outcome.violation or 'all promises kept'}; {outcome.events} events")
        return int(outcome.violation is not None)
    first, last = map(int, options.seeds.split(":"))
    report = run_seeds(range(first, last), options.processes, options.plant, first_only=options.plant is not None)
    for seed, violation in report.failed:
        print(f"seed {seed}: {violation}")
        print(f"  replay: python -m tests.sim --seed {seed} --trace{plant}")
    print(coverage_table(report))
    print(
        f"{report.outcomes} seeds, {len(report.failed)} failing, {report.seconds:.0f} s; per seed:"
        f" {report.events / report.outcomes:.0f} events, {report.plans / report.outcomes:.1f} plans,"
        f" {sum(report.hits.values()) / report.outcomes:.1f} faults; {report.rollbacks} rollbacks in all"
    )
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
