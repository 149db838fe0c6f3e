"""The planted bugs by class, each with a double-fault seed that catches it, as `python -m tests.sim --bugs` shows."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.bugs import BUGS, CLASSES
from tests.sim.doubles import case_of, double_world
from tests.sim.world import World

CAUGHT: dict[str, tuple[int, str, str]] = {  # HALF and BELIEVED show in random runs only
    "old-frames-accepted": (47, "partition-worker,during=plan", "kill-controller,during=save"),
    "plan-below-the-promise-accepted": (2328, "kill-node", "kill-controller,during=plan"),
    "nobody-freezes": (67, "kill-agent,during=vote", "kill-agent,during=save"),
    "planned-before-all-reports": (1, "kill-node", "freeze-worker,during=handover"),
    "new-controller-does-not-ask": (9, "kill-controller,during=save", "delay-worker,during=publish"),
    "backup-votes-before-storing": (0, "kill-worker", "kill-worker"),
    "owner-vouches": (0, "kill-worker", "kill-worker"),
    "one-backup-is-enough": (3, "kill-worker,during=vote", "kill-worker,during=publish"),
    "filling-backup-has-no-vote": (0, "kill-worker", "kill-worker"),
    "backup-applies-uncertified": (8, "kill-agent,during=vote", "kill-node,during=plan"),
    "certified-step-not-counted": (56, "kill-agent,during=publish", "kill-node,during=vote"),
    "lowest-version-taken": (605, "kill-worker,during=publish", "kill-node,during=vote"),
    "unfilled-backup-taken-for-complete": (45, "kill-agent,during=plan", "kill-node,during=handover"),
    "copy-retired-before-the-next-is-filled": (26, "kill-worker,during=publish", "kill-worker,during=plan"),
    "nothing-sent-again": (37, "kill-worker,during=vote", "kill-worker,during=reduce"),
    "summed-in-order-of-arrival": (0, "kill-worker", "kill-worker"),
    "wall-clocks-compared": (2124, "clock-jump", "kill-worker,during=publish"),
}


def caught_by(name: str) -> World:
    """The world that shows it, once it is planted. The pair is named, so that a new kind of fault doesn't change it."""
    seed, first, second = CAUGHT[name]
    return double_world(seed, pair=(case_of(first), case_of(second)))


def table() -> Iterator[str]:
    for kind in CLASSES:
        yield kind
        for name in [name for name, bug in BUGS.items() if bug.kind == kind]:
            yield f"    {name:42} rule {BUGS[name].rule:16} {BUGS[name].what}"
            if name in CAUGHT:
                seed, first, second = CAUGHT[name]
                yield f"    {'':42} caught by {first}, then {second} (seed {seed})"
