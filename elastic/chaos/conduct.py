"""Who decides, while a job runs, which fault comes next and when the job is to stop. Pure: time and standing passed in.

    due ──aim──▶ asked ──the controller's answer──▶ done (or passed over)

After its last fault a job is given time to become whole again: all its members back, all shards with a backup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastic.chaos.draw import TAKES_A_NODE, Aim, Entry, aim
from elastic.chaos.standing import Standing
from elastic.faults import Fault, FaultKind

SETTLE_PATIENCE_SECONDS = 120.0  # for a job to become whole again, and to decide a step, on a busy machine
LOOKS_WELL = frozenset({FaultKind.FREEZE_WORKER, FaultKind.FREEZE_NODE, FaultKind.PREEMPT_NODE})
FROZEN_SECONDS = 5.0  # for one that is frozen for good: by then it is found, or the status is older than that
QUIET_SECONDS = 1.0  # the status is written some times a second: what an injection did is in it after that


class Conductor(Protocol):
    """Seconds count from the job's first step."""

    def turn(self, now: float, standing: Standing) -> Fault | None:
        """The fault to inject now. Asked again only once that one is answered."""

    def answered(self, answer: str, time: float) -> None:
        """What became of it, and when it was asked for, on the wall clock."""

    def over(self, now: float, standing: Standing) -> bool:
        """Whether the job is to stop now."""


@dataclass(slots=True)
class Injection:
    """One entry of the schedule, and what became of it."""

    planned_seconds: float
    fault: str
    kind: str
    time: float = 0.0  # on the wall clock
    answer: str = ""
    victims: tuple[int, ...] = ()
    whole: bool = False  # the job was, when it was asked for: nothing under way, a backup for every shard

    unseen_seconds: float = QUIET_SECONDS  # until the status shows what it did

    @property
    def done(self) -> bool:
        """As its answer has it: "under way" is that of a controller that has just begun and will do it."""
        return self.answer.endswith((": injected", ": under way"))


@dataclass(frozen=True, slots=True)
class Size:
    """Of the job, from its file."""

    nodes: int
    workers_per_node: int
    min_workers: int
    logical_ranks: int

    @property
    def members(self) -> int:
        return min(self.logical_ranks, self.nodes * self.workers_per_node)


@dataclass(slots=True)
class ScheduledFaults:
    """Plays a schedule for `seconds`, gives back the nodes that are lacking then, and waits until all is whole."""

    entries: Sequence[Entry]
    seconds: float
    size: Size
    injections: list[Injection] = field(default_factory=list)
    passed_over: list[tuple[Entry, str]] = field(default_factory=list)
    stuck: str = ""  # why it was given up
    _due: deque[Entry] = field(default_factory=deque)
    _slipped: float = 0.0  # seconds that the schedule is late
    _lacking: int = 0
    _settling_since: float | None = None
    _step_then: int = 0

    def __post_init__(self) -> None:
        self._due = deque(self.entries)

    def turn(self, now: float, standing: Standing) -> Fault | None:
        there = standing.without(self._just_hit(standing))
        while self._due and self._due[0].at_seconds + self._slipped <= now:
            entry = self._due[0]
            aimed = aim(entry, there, self._lacking, self._may_take_a_node(there))
            if self._takes_too_many(entry, aimed, there):
                if now < self.seconds:
                    return self._node_due(now, there)  # all else waits
                aimed = Aim(None, why_not="too few members were left when the time was over")
            self._due.popleft()
            if aimed.fault is not None:
                self._slip(entry, now)
                return self._ask(entry.at_seconds, aimed, there)
            if entry.fault.kind is not FaultKind.ADD_NODE:
                self.passed_over.append((entry, aimed.why_not))
        if now >= self.seconds and self._due:
            self._pass_over_the_rest()
        return self._give_back(now, there) if not self._due and now >= self.seconds else None

    def _slip(self, entry: Entry, now: float) -> None:
        """What had to wait doesn't fall together with what comes after it: those drawn keep their gaps."""
        if entry.drawn:
            self._slipped = max(self._slipped, now - entry.at_seconds)

    def _pass_over_the_rest(self) -> None:
        rest = [entry for entry in self._due if entry.fault.kind is not FaultKind.ADD_NODE]
        self.passed_over += [(entry, "the time was over") for entry in rest]
        self._due.clear()

    def answered(self, answer: str, time: float) -> None:
        last = self.injections[-1]
        last.answer, last.time = answer, time
        if last.done and last.kind in TAKES_A_NODE:
            self._lacking += 1
        elif last.done and last.kind == FaultKind.ADD_NODE:
            self._lacking -= 1

    def over(self, now: float, standing: Standing) -> bool:
        if self._due or now < self.seconds:
            return False
        if self._settling_since is None:
            self._settling_since, self._step_then = now, standing.step
        if self._lacking <= 0 and self.is_whole(standing) and standing.step > self._step_then:
            return True
        if now > self._settling_since + SETTLE_PATIENCE_SECONDS:
            self.stuck = (
                f"{SETTLE_PATIENCE_SECONDS:.0f} s after the last fault it is still {standing.state} at step"
                f" {standing.step} with {len(standing.members())} of {self.size.members} members,"
                f" {standing.without_backup} shards without a backup"
            )
            return True
        return False

    def is_whole(self, standing: Standing) -> bool:
        quiet = max((i.time for i in self.injections), default=0.0) + QUIET_SECONDS
        return (
            standing.state in ("training", "replaying")
            and standing.time >= quiet
            and standing.without_backup == 0
            and len(standing.members()) >= self.size.members
        )

    def _ask(self, planned: float, aimed: Aim, standing: Standing) -> Fault:
        assert aimed.fault is not None
        whole = self.is_whole(standing)
        fault = aimed.fault
        injection = Injection(planned, str(fault), str(fault.kind), victims=aimed.victims, whole=whole)
        if fault.kind in LOOKS_WELL:  # until it is found, thaws or has gone
            injection.unseen_seconds += FROZEN_SECONDS if fault.seconds is None else fault.seconds
        self.injections.append(injection)
        return fault

    def _node_due(self, now: float, standing: Standing) -> Fault | None:
        """A node whose time to come back has come, whatever has to wait before it."""
        for entry in self._due:
            if entry.at_seconds + self._slipped <= now and entry.fault.kind is FaultKind.ADD_NODE and self._lacking > 0:
                self._due.remove(entry)
                return self._ask(entry.at_seconds, Aim(entry.fault), standing)
        return None

    def _give_back(self, now: float, standing: Standing) -> Fault | None:
        """A node for one that was taken."""
        if self._lacking <= 0:
            return None
        return self._ask(now, Aim(Fault(FaultKind.ADD_NODE)), standing)

    def _takes_too_many(self, entry: Entry, aimed: Aim, standing: Standing) -> bool:
        """A drawn fault takes no more members than leave enough to go on with: not all that hold some state."""
        if not entry.drawn or (aimed.fault is not None and aimed.fault.kind is FaultKind.ADD_NODE):
            return False
        left = len(set(standing.members()) - set(aimed.victims))
        return bool(aimed.victims or not standing.members()) and left < max(1, self.size.min_workers)

    def _just_hit(self, standing: Standing) -> set[int]:
        """Whose loss the status can't have told of yet."""
        return {w for i in self.injections if standing.time < i.time + i.unseen_seconds for w in i.victims}

    def _may_take_a_node(self, standing: Standing) -> bool:
        """Some other node has members, and enough workers stay to go on with."""
        left = self.size.nodes - self._lacking - 1
        enough = left >= 1 and left * self.size.workers_per_node >= self.size.min_workers
        return enough and len(standing.nodes_of_members()) >= 2
