"""Members that others have lost their link to: dead, cut off, or just one broken link. Pure.

A lost link alone proves nothing, so the change of members asks both ends. Who doesn't answer and is lost to every
unsuspected member is gone (its agent may have died with it). If those who say so are fewer than those they say it of,
they are perhaps the ones that are cut off, and the others just busy: then it takes longer.

Between two that live and keep losing their link one has to go: the one that has lost more of the others, so that of a
cut network the larger part goes on; else the younger.
"""

from __future__ import annotations

from collections import Counter

from runtime.protocol import WorkerId

GRACE_SECONDS = 0.15  # for the agent's own word, which says more
MINORITY_GRACE_SECONDS = 3.0
LOSSES = 3  # of one link between two that live; that it can't be opened again counts as one at both ends


class Suspects:
    def __init__(self) -> None:
        self._reporters: dict[WorkerId, set[WorkerId]] = {}
        self._since: dict[WorkerId, float] = {}
        self._losses: Counter[frozenset[WorkerId]] = Counter()

    def lost(self, reporter: WorkerId, peer: WorkerId, now: float, dialled: bool = False) -> WorkerId | None:
        """`reporter` lost its link to `peer`, or can't open one. A worker that has to go for it, if any."""
        reporters = self._reporters.setdefault(peer, set())
        if reporter in reporters:
            return None
        reporters.add(reporter)
        self._since.setdefault(peer, now)
        pair = frozenset((reporter, peer))
        self._losses[pair] += 2 if dialled else 1
        if self._losses[pair] <= 2 * LOSSES:  # both ends tell of each
            return None
        return max(pair, key=lambda worker: (len(self.broken(worker)), worker))

    def broken(self, worker: WorkerId) -> list[WorkerId]:
        """Those that it has lost so often that it is no accident."""
        pairs = [pair for pair, losses in self._losses.items() if worker in pair and losses > LOSSES]
        return sorted(other for pair in pairs for other in pair - {worker})

    def all(self) -> set[WorkerId]:
        return set(self._reporters)

    def clear(self, worker: WorkerId) -> None:
        """It has just answered."""
        self._reporters.pop(worker, None)
        self._since.pop(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """It is dead for sure."""
        self.clear(worker)
        for pair in [pair for pair in self._losses if worker in pair]:
            del self._losses[pair]

    def gone(self, members: set[WorkerId], now: float) -> list[WorkerId]:
        """Suspects that every unsuspected member has lost, and that had their time to answer."""
        unsuspected = members - self._reporters.keys()
        suspected = members & self._reporters.keys()
        grace = GRACE_SECONDS if len(unsuspected) >= len(suspected) else MINORITY_GRACE_SECONDS
        return [
            suspect
            for suspect, reporters in self._reporters.items()
            if unsuspected and reporters >= unsuspected and now >= self._since[suspect] + grace
        ]

    def deadlines(self) -> list[float]:
        """When a suspect has had its time."""
        return [since + grace for since in self._since.values() for grace in (GRACE_SECONDS, MINORITY_GRACE_SECONDS)]
