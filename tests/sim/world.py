"""One seed's world: everything that is simulated, and the course of a run.

disturbed ──all faults have happened, some seconds pass──▶ healed ──▶ the job ends within a bounded time, or fails
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from elastic import messages as m
from runtime.protocol import Frame, WorkerId
from tests.sim.checks import Checks
from tests.sim.clock import WALL_START_SECONDS, simulated_time
from tests.sim.cluster import Cluster, Disk
from tests.sim.effects import Effects
from tests.sim.engine import Engine
from tests.sim.faults import Faults
from tests.sim.job import FaultEntry, Job, Profile, draw_balance, draw_guard, draw_job, draw_profile
from tests.sim.network import Network
from tests.sim.values import Judge, Reference, digest_of
from tests.sim.violation import Violation
from tests.sim.vocabulary import Vocabulary
from tests.sim.watch import Watch
from tests.sim.worker import SimWorker
from tests.sim.wrongs import Wrongs

PATIENCE_SECONDS = 240.0  # from healing to the end
MAX_EVENTS = 150_000
NURSE_SECONDS = 3.0


@dataclass
class Outcome:
    seed: int
    violation: str | None
    events: int
    simulated_seconds: float
    steps: int
    plans: int
    rollbacks: int
    recomputed: int
    faults: list[tuple[str, str]]  # (protocol point, kind)
    job_faults: int  # from the job's own list
    reached: tuple[bool, ...]  # of a script's faults: whether each came to its point
    trace: list[str] = field(default_factory=list)


class Script(Protocol):
    """Faults that depend on what has happened."""

    reached: Mapping[int, bool]  # whether each came to its point

    def progress(self, step: int) -> None: ...


@dataclass(frozen=True)
class Setting:
    """A run that is laid down instead of drawn: no random fault happens in it but those of the schedule."""

    job: Job
    profile: Profile
    schedule: tuple[FaultEntry, ...] = ()
    script: Callable[[World], Script] | None = None  # more faults, as things go
    random: Random | None = None  # decides what chance would


class World:
    def __init__(
        self, seed: int, tracing: bool = False, setting: Setting | None = None, watch: Watch | None = None
    ) -> None:
        self.seed, self.tracing = seed, tracing
        self.traced: list[str] = []
        self.engine = Engine(seed)
        if setting is not None:
            self.engine.random = setting.random or self.engine.random
            self.job, self.profile = setting.job, setting.profile
        else:
            random = self.engine.random
            self.job, self.profile = replace(draw_job(random), balance=draw_balance(seed)), draw_profile(random)
            if self.job.sdc:  # a bad step never comes out the same, so nobody could tell why it is bad
                self.job = replace(self.job, skips=frozenset())
            else:
                self.job = replace(self.job, guard=draw_guard(Random(f"{seed}/guard")))
        self.reference = Reference(seed, self.job)
        self.judge = Judge()
        self.workers: dict[WorkerId, SimWorker] = {}
        self.network = Network(self.engine, self.link_seconds, self.workers)
        self.disk = Disk()
        self.cluster = Cluster(self)
        self.checks = Checks(self)
        self.watch = watch or Watch()
        self.armed = False  # somebody waits for a protocol point
        self.effects = Effects(self)
        self.wrongs = Wrongs(self, drawn=setting is None)
        self.faults = Faults(self, drawn=setting is None)
        self.vocabulary = Vocabulary(self, setting.schedule if setting is not None else ())
        self.script = setting.script(self) if setting is not None and setting.script is not None else None
        self.ended: tuple[str, str] | None = None
        self.healed_at: float | None = None
        self.noises = 0
        self.looks = 0

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        violation = None
        try:
            with simulated_time(self.engine):
                self.progress(-1)
                self.cluster.start_controller()
                while self.ended is None and (self.engine.step() or self.revived()):
                    self.look()
                if self.ended is None:
                    self.violation("nothing happens any more")
                else:
                    self.checks.ended(*self.ended)
        except Violation as error:
            violation = str(error)
        return Outcome(
            self.seed,
            violation,
            self.engine.events,
            self.engine.now,
            self.checks.max_step,
            self.checks.plans,
            self.checks.rollbacks,
            self.checks.recomputed,
            self.faults.happened + [(hook or "at once", str(fault.kind)) for fault, hook in self.vocabulary.happened],
            sum(kind == "fault_injected" and "index" in fields for _, kind, fields in self.disk.events),
            tuple(self.script.reached.get(n, False) for n in range(2)) if self.script is not None else (),
            self.traced,
        )

    def look(self) -> None:
        """Now and then: is it too late, is all well."""
        self.looks += 1
        if self.looks % 64:
            return
        if self.healed_at is not None and self.engine.now > self.healed_at + PATIENCE_SECONDS:
            self.violation(f"no end {PATIENCE_SECONDS:.0f} s after the net was healed (step {self.checks.max_step})")
        if self.engine.events > MAX_EVENTS:
            self.violation(f"no end after {MAX_EVENTS} events (step {self.checks.max_step})")
        controller = self.cluster.controller
        if controller is not None and controller.settled():
            self.checks.settled(controller)

    def violation(self, text: str) -> None:
        self.trace(f"VIOLATION: {text}")
        raise Violation(text)

    # --- faults -------------------------------------------------------------------------------------------------

    def progress(self, step: int) -> None:
        """The job has entered this step for the first time."""
        self.faults.progress(step)
        self.vocabulary.progress(step)
        if self.script is not None:
            self.script.progress(step)

    def look_who_waits(self) -> None:
        self.armed = bool(self.faults.waiting) or bool(self.vocabulary.waiting)

    def reached(self, point: str, worker: SimWorker | None) -> None:
        """A protocol point: whatever waits for it happens now."""
        if self.faults.waiting:
            self.faults.reached(point, worker)
        if self.vocabulary.waiting:
            self.vocabulary.reached(point, worker)

    # --- healing ------------------------------------------------------------------------------------------------

    def heal_later(self) -> None:
        self.engine.after(self.engine.random.choice((0.0, 1.0, 4.0)), self.heal)

    def heal(self) -> None:
        if self.healed_at is not None:
            return
        self.trace("healed")
        self.healed_at = self.engine.now
        self.cluster.heal()
        self.effects.heal()
        self.nurse()

    def revived(self) -> bool:
        """Nothing happens any more: every node is away as the job itself asked, before all faults had their moment."""
        stuck = self.healed_at is None and not any(a.alive for a in self.cluster.agents.values())
        if stuck:
            self.heal()
        return stuck

    def nurse(self) -> None:
        """Someone looks after the job: where nodes are missing for good, one is added."""
        cluster = self.cluster
        living = [a for a in cluster.agents.values() if a.alive and not a.deserted]
        controller = cluster.controller
        waiting = controller is not None and controller.waiting_for_workers
        if not cluster.booting and (not living or waiting):
            self.request("add-node")
        self.engine.after(NURSE_SECONDS, self.nurse)

    def request(self, fault: str) -> bool:
        """`everstep inject`."""
        cluster = self.cluster
        if cluster.controller is None:
            return False
        self.engine.after(0.001, cluster.think, cluster.incarnation, m.FaultRequested(fault))
        return True

    # --- what the parts ask for ---------------------------------------------------------------------------------

    def load_state(self, version: int, shard: int) -> int:
        entries = self.disk.manifests.get(version)
        if entries is None:
            self.violation(f"the checkpoint of version {version} is not there (any more)")
            raise AssertionError
        state = self.disk.shards[version, shard]
        if digest_of(state).hex() != entries[shard]:
            self.violation(f"shard {shard} of checkpoint {version} has another digest than its manifest says")
        return state

    def noise(self) -> int:
        self.noises += 1
        return self.noises

    def wall(self) -> float:
        return WALL_START_SECONDS + self.engine.now

    def slowness(self) -> float:
        return self.engine.random.choice((1.0, 1.0, 1.0, 1.0, 1.5, 3.0, 10.0))

    def link_seconds(self, sender: WorkerId) -> float:
        low, high = self.profile.link_seconds
        seconds = low * (high / low) ** self.engine.random.random()
        return seconds * self.profile.laziness if sender in self.profile.lazy_senders else seconds

    def settle_seconds(self) -> float:
        return self.engine.jitter(self.profile.settle_seconds)

    # --- telling ------------------------------------------------------------------------------------------------

    def trace(self, text: str) -> None:
        if self.tracing:
            self.traced.append(f"{self.engine.now:10.4f}  {text}")

    def trace_frame(self, worker: SimWorker, sender: WorkerId, frame: Frame) -> None:
        when = {-1: " (over)", 0: "", 1: " (kept)"}[worker.tx.admit(frame)]
        what = f"{frame.kind.name} of step {frame.step}, shard {frame.shard}, generation {tuple(frame.ballot)}"
        self.trace(f"worker {worker.id} <- {sender}: {what}{when}")

    def trace_message(self, worker: SimWorker, message: dict[str, object]) -> None:
        detail = {"ask": "ballot", "release": "step", "ack": "step"}.get(message["kind"])
        text = message["plan"]["ballot"] if message["kind"] == "plan" else message.get(detail or "", "")
        tx = worker.tx
        state = f"step {tx.step}{' certified' if tx.certificate else ''}"
        if message["kind"] != "ack":
            self.trace(f"worker {worker.id} is told: {message['kind']} {text} ({state})")
