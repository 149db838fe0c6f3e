"""Members that others have lost their link to: dead, cut off, or just one broken link. Pure.

A lost link alone proves nothing, so the change of members asks both ends. Who doesn't answer and is lost to every
unsuspected member is gone (its agent may have died with it); who keeps losing the same link while both live has to go,
the younger of the two.
"""

from __future__ import annotations

from collections import Counter

from runtime.protocol import WorkerId

GRACE_SECONDS = 0.15  # for the agent's own word, which says more
LOSSES = 3  # of one link between two that live


class Suspects:
    def __init__(self) -> None:
        self._reporters: dict[WorkerId, set[WorkerId]] = {}
        self._since: dict[WorkerId, float] = {}
        self._losses: Counter[frozenset[WorkerId]] = Counter()

    def lost(self, reporter: WorkerId, peer: WorkerId, now: float) -> WorkerId | None:
        """`reporter` lost its link to `peer`. A worker that has to go for it, if any."""
        reporters = self._reporters.setdefault(peer, set())
        if reporter in reporters:
            return None
        reporters.add(reporter)
        self._since.setdefault(peer, now)
        pair = frozenset((reporter, peer))
        self._losses[pair] += 1
        return max(pair) if self._losses[pair] > 2 * LOSSES else None  # both ends tell of each

    def all(self) -> set[WorkerId]:
        return set(self._reporters)

    def clear(self, worker: WorkerId) -> None:
        """It is dead for sure, or has just answered."""
        self._reporters.pop(worker, None)
        self._since.pop(worker, None)

    def gone(self, members: set[WorkerId], now: float) -> list[WorkerId]:
        """Suspects that every unsuspected member has lost, and that had their time to answer."""
        unsuspected = members - self._reporters.keys()
        return [
            suspect
            for suspect, reporters in self._reporters.items()
            if unsuspected and reporters >= unsuspected and now >= self._since[suspect] + GRACE_SECONDS
        ]

    def deadlines(self) -> list[float]:
        """When a suspect has had its time."""
        return [since + GRACE_SECONDS for since in self._since.values()]
