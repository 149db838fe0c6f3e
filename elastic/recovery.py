"""What one recovery cost: from the kill to the last survivor that goes on. Pure measuring, nothing decides on it.

    detect_ms      kill -> first notice anywhere (a closed link, an exit seen, an agent gone); None if nobody knows when
    pause_ms       first notice -> the last *waiting* survivor goes on under the new plan
    recomputed     micro-batches that were computed and lost, so are computed a second time
    recompute_ms   the longest that a survivor took over what the plan handed to it
    bytes_moved    state that had to be sent before training went on

Times are wall-clock seconds as stamped where they were seen: on one host exact; those of a host whose clock is off are
put right as far as that is known (elastic/skew.py).
A second failure before the end belongs to the same recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.protocol import Ballot, Plan, Report, WorkerId


@dataclass(slots=True)
class Recovery:
    noticed: float
    killed: float | None = None
    suspects: set[WorkerId] = field(default_factory=set)  # told of as detected
    lost: set[WorkerId] = field(default_factory=set)
    ballot: Ballot | None = None  # of the plan that ends the pause
    survivors: set[WorkerId] = field(default_factory=set)
    waiting: dict[WorkerId, bool] = field(default_factory=dict)
    resumed: dict[WorkerId, float] = field(default_factory=dict)
    handed_over: set[WorkerId] = field(default_factory=set)  # survivors that compute what the lost owed
    went_on: float | None = None  # when the last waiting survivor did
    paused_before: float = 0.0  # seconds; of pauses that were over when the next loss was noticed
    recompute_ms: float = 0.0
    recomputed: int = 0
    bytes_moved: int = 0
    links_opened: int = 0
    links_closed: int = 0
    rollback: bool = False

    def durable(self) -> dict[str, Any]:
        """For a new controller, whose first plan ends the pause if it lasts."""
        names = ("noticed", "killed", "went_on", "paused_before", "rollback", "recomputed", "recompute_ms")
        moved = ("bytes_moved", "links_opened", "links_closed")
        sets = {"lost": sorted(self.lost), "suspects": sorted(self.suspects)}
        return {**{name: getattr(self, name) for name in (*names, *moved)}, **sets}

    def planned(self, ballot: Ballot, survivors: set[WorkerId], handed_over: set[WorkerId]) -> None:
        """A plan was made. While the pause lasts it supersedes earlier ones; later it is some other change's."""
        if self.went_on is None:
            self.ballot = ballot
            self.survivors, self.handed_over = survivors, set(handed_over)
            self.waiting.clear()
            self.resumed.clear()

    def look(self) -> None:
        """The pause ends with the last waiting survivor that goes on."""
        if self.went_on is None and self.ballot is not None and self.resumed.keys() >= self.survivors:
            waited = [self.resumed[w] for w in self.survivors if self.waiting.get(w, True)]
            self.went_on = max(waited, default=self.noticed)

    def pause(self) -> float:
        return 0.0 if self.went_on is None else max(0.0, self.went_on - self.noticed)

    def again(self, time: float) -> None:
        """Another loss, when the survivors had gone on."""
        self.paused_before += self.pause()
        self.noticed, self.went_on, self.ballot = time, None, None

    def over(self) -> bool:
        return self.went_on is not None and not self.handed_over

    def without(self, worker: WorkerId) -> None:
        self.survivors.discard(worker)
        self.handed_over.discard(worker)

    def figures(self) -> dict[str, Any]:
        return {
            "workers": sorted(self.lost),
            "detect_ms": None if self.killed is None else round(max(0.0, self.noticed - self.killed) * 1e3, 3),
            "pause_ms": round((self.paused_before + self.pause()) * 1e3, 3),
            "recomputed": self.recomputed,
            "recompute_ms": round(self.recompute_ms, 3),
            "bytes_moved": self.bytes_moved,
            "links_opened": self.links_opened,
            "links_closed": self.links_closed,
            "rollback": self.rollback,
        }


class Costs:
    """The recovery under way, if any, and the totals of all."""

    def __init__(self) -> None:
        self.now: Recovery | None = None
        self.faults = 0
        self.recomputed = 0
        self.pause_seconds = 0.0
        self._kills: dict[WorkerId, float] = {}

    def totals(self) -> dict[str, Any]:
        """What a new controller counts on from."""
        totals = {"faults": self.faults, "recomputed": self.recomputed, "pause_seconds": self.pause_seconds}
        return {**totals, "open": None if self.now is None else self.now.durable()}

    def restore(self, totals: Mapping[str, Any]) -> None:
        self.faults, self.recomputed = totals["faults"], totals["recomputed"]
        self.pause_seconds = totals["pause_seconds"]
        if (open_ := totals["open"]) is not None:
            self.now = Recovery(**{**open_, "lost": set(open_["lost"]), "suspects": set(open_["suspects"])})

    def notice(self, worker: WorkerId, time: float) -> bool:
        """Somebody saw that a member is gone. Whether that is news."""
        if self.now is None:
            self.now = Recovery(noticed=time)
        elif self.now.went_on is not None:
            self.now.again(time)
        elif self.now.ballot is None:
            self.now.noticed = min(self.now.noticed, time)
        if self.now.killed is None:
            self.now.killed = self._kills.get(worker)
        news = worker not in self.now.suspects
        self.now.suspects.add(worker)
        self.faults += news
        return news

    def seen_too(self, worker: WorkerId, time: float) -> None:
        """Word of a loss that is known already; it may have been seen there first."""
        if self.now is not None and worker in self.now.lost and self.now.went_on is None:
            self.now.noticed = min(self.now.noticed, max(time, self.now.killed or time))

    def is_killed(self, worker: WorkerId) -> bool:
        return worker in self._kills

    def killed(self, workers: Iterable[WorkerId], time: float) -> None:
        """An injected kill was done; its notice may have come first."""
        for worker in workers:
            self._kills.setdefault(worker, time)
        if self.now is not None and self.now.killed is None and self.now.noticed >= time:
            self.now.killed = time

    def lost(self, worker: WorkerId) -> None:
        if self.now is not None:
            self.now.lost.add(worker)
            self.now.without(worker)
            self.now.went_on = self.now.ballot = None  # until the plan that deals with it

    def planned(self, plan: Plan, reports: Mapping[WorkerId, Report], lost_micro_batches: int) -> None:
        self.recomputed += lost_micro_batches
        if self.now is None:
            return
        kept = {member.worker for member in plan.members if not member.joining}
        handed = {w for w in kept if _owes_more(w, plan, reports)} if plan.version < plan.stop_at else set()
        self.now.recomputed += lost_micro_batches
        self.now.rollback |= plan.checkpoint is not None
        self.now.planned(plan.ballot, kept or set(plan.ids()), handed)
        if plan.version >= plan.stop_at:  # nobody computes any more
            self.now.handed_over.clear()

    def close(self) -> tuple[dict[str, Any] | None, bool]:
        """The figures of the recovery, if it is over; and whether there is something to remember: its pause is over."""
        now = self.now
        if now is None:
            return None, False
        waited = now.went_on is None
        now.look()
        paused = waited and now.went_on is not None
        if not now.over():
            return None, paused
        self.now = None
        figures = now.figures()
        self.pause_seconds += figures["pause_ms"] / 1e3
        return figures, True


def _owes_more(worker: WorkerId, plan: Plan, reports: Mapping[WorkerId, Report]) -> bool:
    """Whether the plan hands it logical ranks that it neither had nor has computed."""
    before = reports[worker].plan
    had = 0
    if before is not None:
        ranks = before.ranks_now if before.version == plan.version else before.ranks_next
        had = ranks.count(worker)
    computed = sum(high - low for low, high in reports[worker].computed)
    return plan.ranks_now.count(worker) > max(had, computed)
