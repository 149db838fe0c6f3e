"""The planted bugs by class, each with a double-fault seed that catches it, as `python -m tests.sim --bugs` shows."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.bugs import BUGS, CLASSES
from tests.sim.doubles import name_of, pair_of

CAUGHT: dict[str, int] = {}


def table() -> Iterator[str]:
    for kind in CLASSES:
        yield kind
        for name in [name for name, bug in BUGS.items() if bug.kind == kind]:
            yield f"    {name:42} rule {BUGS[name].rule:16} {BUGS[name].what}"
            if name in CAUGHT:
                first, second = pair_of(CAUGHT[name])
                yield f"    {'':42} caught by double seed {CAUGHT[name]}: {name_of(first)}, then {name_of(second)}"
