"""Who hangs: judged by change, on one's own clock. Pure: what was heard and seen comes in with a time.

    worker   once it is built, its control thread beats to its agent ten times a second, and says how long the
             micro-batch under way has taken and how long the last ones took at most. Its agent is on the same host,
             so it can also ask the kernel.
    agent    beats to the controller.

The clock of a watch stands still while the watcher itself is not running: who was stopped, or starved, for ten seconds
must not find all the others silent. A wall clock is never asked.

What is judged, and why it is no false alarm:
- a worker that the kernel says is stopped, and that is silent, is not going to go on by itself;
- a worker that is silent but gets processor time, or waits for it, is busy: only an allowance ends that;
- a worker whose micro-batch takes many times as long as any of the last ones, with its processor idle, is stuck. Until
  enough of them are known (compilation, first reads) an allowance holds.
"""

from __future__ import annotations

from dataclasses import dataclass

FROZEN_SECONDS = 0.3  # of silence, for a worker that the kernel calls stopped
HUNG_SECONDS = 10.0  # of silence without processor time
STUCK_LEAST_SECONDS = 5.0
STUCK_FACTOR = 10.0  # times the longest of the last micro-batches
ALLOWANCE_SECONDS = 600.0  # for anything that may be work: a first micro-batch, a long call in the control thread
AGENT_SILENT_SECONDS = 3.0
LONGEST_TURN_SECONDS = 0.5  # a watcher that took longer between two looks was not running
STOPPED = "T"
BUSY_SHARE = 0.05  # of one processor: whoever gets that much is working


class AwakeClock:
    """Seconds during which the watcher was running."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def advance(self, now: float) -> float:
        """`now`: monotonic."""
        if self._last is not None:
            self.seconds += min(max(0.0, now - self._last), LONGEST_TURN_SECONDS)
        self._last = now
        return self.seconds


@dataclass(frozen=True, slots=True)
class Seen:
    """What the kernel says of a process: its state letter, and the processor seconds that it has had."""

    state: str
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Suspicion:
    kind: str  # frozen | hung | stuck
    reason: str


class WorkerWatch:
    """One worker. Times are of an `AwakeClock`."""

    def __init__(self, now: float) -> None:
        self._heard = now
        self._beats = False  # what it does before, importing and building, may wait for anything
        self._busy_seconds = self._usual_seconds = 0.0
        self._cpu: tuple[float, float] | None = None  # (time, cpu seconds) when it last was seen to work

    def beat(self, now: float, busy_seconds: float, usual_seconds: float, may_wait: bool = False) -> None:
        """`may_wait`: what it does until the next beat may wait for anything, such as a slow store."""
        self._heard, self._beats = now, not may_wait
        self._busy_seconds, self._usual_seconds = busy_seconds, usual_seconds

    def wants_a_look(self, now: float) -> bool:
        """Whether to ask the kernel: nothing is asked about a worker that is well."""
        return now - self._heard >= FROZEN_SECONDS or self._overdue()

    def judge(self, now: float, seen: Seen) -> Suspicion | None:
        silent = now - self._heard
        if seen.state == STOPPED:
            return Suspicion("frozen", f"stopped, and silent for {silent:.1f} s") if silent >= FROZEN_SECONDS else None
        idle = self._idle_seconds(now, seen)
        if silent >= ALLOWANCE_SECONDS or (self._beats and min(silent, idle) >= HUNG_SECONDS):
            return Suspicion("hung", f"silent for {silent:.1f} s")
        if self._overdue() and (idle >= STUCK_LEAST_SECONDS or self._busy_seconds >= ALLOWANCE_SECONDS):
            usual = f"; {self._usual_seconds:.2f} s at most before" if self._usual_seconds else ""
            return Suspicion("stuck", f"one micro-batch has taken {self._busy_seconds:.1f} s{usual}")
        return None

    def _overdue(self) -> bool:
        if not self._usual_seconds:
            return self._busy_seconds >= ALLOWANCE_SECONDS
        return self._busy_seconds >= max(STUCK_LEAST_SECONDS, STUCK_FACTOR * self._usual_seconds)

    def _idle_seconds(self, now: float, seen: Seen) -> float:
        """How long it has got next to no processor time; waiting for some counts as having it."""
        if self._cpu is None:
            self._cpu = now, seen.cpu_seconds
        since, cpu_seconds = self._cpu
        if seen.state == "R" or seen.cpu_seconds - cpu_seconds > BUSY_SHARE * (now - since) + 0.02:
            self._cpu = now, seen.cpu_seconds
        return now - self._cpu[0]


class AgentWatch:
    """Which agents have fallen silent, of those that have ever beaten. Times are monotonic."""

    def __init__(self) -> None:
        self._clock = AwakeClock()
        self._heard: dict[str, float] = {}  # by instance

    def beat(self, instance: str, now: float) -> None:
        self._heard[instance] = self._clock.advance(now)

    def forget(self, instance: str) -> None:
        self._heard.pop(instance, None)

    def silent(self, now: float) -> list[str]:
        """Instances."""
        awake = self._clock.advance(now)
        return [instance for instance, heard in self._heard.items() if awake - heard >= AGENT_SILENT_SECONDS]

    def __bool__(self) -> bool:
        return bool(self._heard)
