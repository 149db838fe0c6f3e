"""What a seed decides before anything runs: the job, the delays, the noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from elastic.balance import NEVER, Terms
from elastic.controller_state import ControllerFacts
from runtime.guard import GuardRules
from runtime.step_state import JobFacts
from tests.sim.values import GLOBAL_BATCH_PER_RANK


@dataclass(frozen=True)
class FaultEntry:
    """An entry of the job's `faults`."""

    at_step: int
    fault: str
    wait: bool


@dataclass(frozen=True)
class Job:
    nodes: int
    workers_per_node: int
    standbys: int
    min_workers: int
    logical_ranks: int
    shards: int
    steps: int
    micro_batches: int  # per logical rank
    save_every: int
    keep: int
    sdc: bool  # reduced gradients differ at each attempt
    skips: frozenset[int]  # steps that are judged as skipped
    faults: tuple[FaultEntry, ...]
    balance: Terms = NEVER
    guard: GuardRules = field(default_factory=GuardRules)

    @property
    def global_batch(self) -> int:
        return self.logical_ranks * self.micro_batches * GLOBAL_BATCH_PER_RANK

    def facts(self) -> JobFacts:
        gates = frozenset(f.at_step for f in self.faults if f.wait)
        return JobFacts(self.logical_ranks, self.shards, self.global_batch, self.save_every, gates, self.guard)

    def controller_facts(self) -> ControllerFacts:
        return ControllerFacts(
            self.nodes,
            self.workers_per_node,
            self.standbys,
            self.min_workers,
            self.logical_ranks,
            self.shards,
            self.steps,
            self.micro_batches,
            self.faults,
            balance=self.balance,
            global_batch=self.global_batch,
            guard=self.guard,
        )


@dataclass(frozen=True)
class Profile:
    """Typical seconds of what takes time."""

    micro_batch_seconds: float
    link_seconds: tuple[float, float]  # each direction of each pair takes one between these
    lazy_senders: frozenset[int]  # workers whose frames take `laziness` times as long
    laziness: float
    control_seconds: float
    settle_seconds: float
    write_seconds: float
    boot_seconds: float
    restart_seconds: float
    notice_seconds: float  # for the shell to see an agent's end
    exit_seconds: float  # for an agent to see a worker's


def draw_job(random: Random) -> Job:
    nodes, per_node = random.choice(((2, 2), (2, 2), (2, 2), (3, 2), (2, 3), (3, 2), (2, 4), (3, 1 + 1)))
    workers = nodes * per_node
    sdc = random.random() < 0.4
    steps = random.randint(12, 15)
    return Job(
        nodes=nodes,
        workers_per_node=per_node,
        standbys=random.choice((0, 0, 1, 2)),
        min_workers=random.choice((1, 1, 2)),
        logical_ranks=workers + random.randint(0, 3),
        shards=random.choice((2, 3, 4, 4, 5)) if workers < 8 else random.choice((2, 3, 4)),
        steps=steps,
        micro_batches=random.choice((1, 2)),
        save_every=0 if sdc else random.choice((0, 3, 4)),
        keep=random.choice((1, 2)),
        sdc=sdc,
        skips=frozenset(s for s in range(steps) if random.random() < 0.04),
        faults=tuple(draw_entries(random, workers, nodes, steps)),
    )


def draw_balance(seed: int) -> Terms:
    """In every fourth seed work moves soon. By a chance of its own, so that the others stay as they are."""
    random = Random(f"{seed}/balance")
    return Terms(seed % 4 == 1, random.choice((0.05, 0.15)), random.choice((1, 2, 3)), 0.0)


def draw_guard(random: Random) -> GuardRules:
    window = random.choice((0, 2, 3))
    return GuardRules(spike_window=window, spike_factor=4.0, compare_every=random.choice((0, 1, 1, 2)))


def draw_entries(random: Random, workers: int, nodes: int, steps: int) -> list[FaultEntry]:
    entries = []
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        target = random.randrange(workers)
        fault = random.choice(
            (
                f"kill-worker={target}",
                f"kill-worker={target}",
                f"kill-agent={random.randrange(nodes)}",
                f"kill-node={random.randrange(nodes)}",
                "kill-controller",
                "add-node",
            )
        )
        entries.append(FaultEntry(random.randrange(steps), fault, random.random() < 0.6))
    if random.random() < 0.04:
        entries.append(FaultEntry(random.randrange(6, steps), "stop", random.random() < 0.3))
    return entries


def draw_profile(random: Random) -> Profile:
    slow = random.choice((0.0005, 0.002, 0.01, 0.03))
    return Profile(
        micro_batch_seconds=random.choice((0.005, 0.02, 0.04)),
        link_seconds=(random.choice((0.01, 0.1, 1.0)) * slow, slow),
        lazy_senders=frozenset(w for w in range(12) if random.random() < 0.25)
        if random.random() < 0.4
        else frozenset(),
        laziness=random.choice((5.0, 30.0)),
        control_seconds=random.choice((0.001, 0.005, 0.02, 0.08)),
        settle_seconds=random.choice((0.0005, 0.01, 0.1, 1.0)),
        write_seconds=random.choice((0.005, 0.05, 0.3)),
        boot_seconds=random.choice((0.1, 0.5, 1.5)),
        restart_seconds=random.choice((0.1, 1.0, 1.6)),
        notice_seconds=random.choice((0.01, 0.1, 1.0)),
        exit_seconds=random.choice((0.001, 0.01, 0.2)),
    )
