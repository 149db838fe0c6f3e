"""The planted bugs by class, each with a double-fault seed that catches it, as `python -m tests.sim --bugs` shows."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.bugs import BUGS, CLASSES
from tests.sim.doubles import name_of, pair_of

CAUGHT: dict[str, int] = {  # HALF and BELIEVED show in random runs only: tests/sim/test_simulator.py
    "old-frames-accepted": 47,
    "plan-below-the-promise-accepted": 2328,
    "nobody-freezes": 67,
    "planned-before-all-reports": 1,
    "new-controller-does-not-ask": 9,
    "backup-votes-before-storing": 0,
    "owner-vouches": 0,
    "one-backup-is-enough": 6,
    "filling-backup-has-no-vote": 0,
    "backup-applies-uncertified": 8,
    "certified-step-not-counted": 56,
    "lowest-version-taken": 605,
    "unfilled-backup-taken-for-complete": 45,
    "copy-retired-before-the-next-is-filled": 26,
    "nothing-sent-again": 37,
    "summed-in-order-of-arrival": 0,
    "wall-clocks-compared": 2124,
}


def table() -> Iterator[str]:
    for kind in CLASSES:
        yield kind
        for name in [name for name, bug in BUGS.items() if bug.kind == kind]:
            yield f"    {name:42} rule {BUGS[name].rule:16} {BUGS[name].what}"
            if name in CAUGHT:
                first, second = pair_of(CAUGHT[name])
                yield f"    {'':42} caught by double seed {CAUGHT[name]}: {name_of(first)}, then {name_of(second)}"
