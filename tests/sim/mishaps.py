"""What random runs draw: faults of the vocabulary with options by chance, and some that only a simulator can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING

from elastic.faults import Fault, FaultKind
from tests.sim import preemption

if TYPE_CHECKING:
    from tests.sim.cluster import SimAgent
    from tests.sim.worker import SimWorker
    from tests.sim.world import World

K = FaultKind
KINDS = {  # how often each, by chance
    "kill-worker": 30,
    "lose-node": 6,
    "kill-agent": 5,
    "kill-controller": 12,
    "add-node": 5,
    "freeze-worker": 8,
    "slow-link": 5,
    "slow-worker": 4,
    "cut-link": 10,
    "isolate-worker": 4,
    "evict-worker": 4,
    "favour-worker": 3,
    "kill-holder": 4,
    "lose-worker": 4,
    "partition-node": 4,
    "split-node": 5,
    "desert-node": 8,
}
DISRUPTIVE = set(KINDS) - {"add-node", "freeze-worker", "slow-link", "slow-worker", "favour-worker", "partition-node"}


class Mishaps:
    """Each is given a worker, and hits it, or its node, or what it has to do with."""

    def __init__(self, world: World, holders: Callable[[], list[SimWorker]]) -> None:
        self.world, self.engine, self.holders = world, world.engine, holders

    @property
    def random(self) -> Random:
        return self.engine.random

    def happen(self, kind: str, target: SimWorker) -> None:
        if kind == preemption.KIND:  # by a signal, or by request
            preemption.happen(self.world, target)
        elif kind in list(FaultKind):
            fault = self.drawn(FaultKind(kind), target)
            if not (fault.kind in (K.KILL_WORKER, K.KILL_CONTROLLER) and self.by_request(fault)):
                self.world.vocabulary.perform(fault)
        else:
            getattr(self, kind.replace("-", "_"))(target)

    def by_request(self, fault: Fault) -> bool:
        """Now and then through the command line, so that the controller does it itself."""
        return self.random.random() < 0.2 and self.world.request(str(fault))

    def drawn(self, kind: FaultKind, target: SimWorker) -> Fault:
        choice = self.random.choice
        match kind:
            case K.KILL_WORKER:
                return Fault(kind, target.id)
            case K.FREEZE_WORKER:
                self.perhaps_stubborn(target)
                return Fault(kind, target.id, seconds=self.engine.jitter(choice((0.05, 0.3, 1.0, 4.0, 20.0))))
            case K.SLOW_WORKER:
                return Fault(kind, target.id, factor=choice((5.0, 20.0)))
            case K.KILL_AGENT:
                return Fault(kind, target.agent.node)
            case K.PARTITION_NODE:  # not for so long that anyone takes it for gone
                return Fault(kind, target.agent.node, seconds=choice((0.1, 0.5, 3.0)))
            case _:
                return Fault(kind)

    # --- ends that the vocabulary has no word for -------------------------------------------------------------

    def kill_holder(self, target: SimWorker) -> None:
        holders = self.holders()
        self.world.cluster.worker_dies(self.random.choice(holders) if holders else target, "kill-holder")

    def lose_worker(self, target: SimWorker) -> None:
        """It dies, and its agent is slow to see it."""
        self.world.cluster.worker_dies(target, "lose-worker", self.random.choice((0.5, 1.5, 4.0)))

    def lose_node(self, target: SimWorker) -> None:
        """The node is gone; the shell asks for another in its place."""
        self.world.cluster.lose_agent(target.agent, again=False, gone_for_good=False)

    def desert_node(self, target: SimWorker) -> None:
        """The shell takes the agent for dead; the workers and their links know nothing of it."""
        if self.random.random() < 0.5:
            self.hold_control(target.agent, self.random.choice((0.2, 2.0)))
        self.world.cluster.desert(target.agent)

    def perhaps_stubborn(self, target: SimWorker) -> None:
        """A signal to it takes effect only after a while."""
        if self.random.random() < 0.5:
            target.stubborn_until = self.engine.now + self.random.choice((0.5, 3.0, 10.0))

    # --- links ------------------------------------------------------------------------------------------------

    def slow_link(self, target: SimWorker) -> None:
        slow = self.world.network.slow
        for other in self.others(target):
            if self.random.random() < 0.5:
                factor = self.random.choice((10.0, 100.0))
                slow[target.id, other.id] = factor
                if self.random.random() < 0.5:
                    slow[other.id, target.id] = factor

    def favour_worker(self, target: SimWorker) -> None:
        """Everything between the others takes its time, so that this one is ahead."""
        network = self.world.network
        seconds = self.random.choice((0.2, 0.6, 1.5))
        others = self.others(target)
        for sender in others:
            for receiver in others:
                if sender is not receiver:
                    base = network.base(sender, receiver)
                    network.slow[sender.id, receiver.id] = max(1.0, self.engine.jitter(seconds) / base)
        self.engine.after(self.engine.jitter(3.0), network.slow.clear)

    def cut_link(self, target: SimWorker) -> None:
        others = self.others(target)
        if others:
            self.cut(target, [self.random.choice(others)], self.random.choice((0.0, 0.3, 2.0)))

    def isolate_worker(self, target: SimWorker) -> None:
        self.cut(target, self.others(target), self.random.choice((0.0, 1.0, 3.0)))
        self.perhaps_stubborn(target)
        if self.random.random() < 0.5:
            self.hold_control(target.agent, self.random.choice((0.2, 2.0)))

    def evict_worker(self, target: SimWorker) -> None:
        """It loses its links, can't say so, and survives being killed for a while."""
        target.stubborn_until = self.engine.now + self.random.choice((1.0, 4.0, 10.0))
        target.mute_until = self.engine.now + self.random.choice((0.3, 0.5, 1.0, 2.0))
        self.cut(target, self.others(target), self.random.choice((0.0, 1.0)))

    def split_node(self, target: SimWorker) -> None:
        """The net splits, and links break of it; the controller's side goes on without this node, whose workers go on
        by themselves."""
        seconds = self.random.choice((0.5, 2.0, 6.0))
        for worker in target.agent.living():
            self.cut(worker, [w for w in self.others(worker) if w.agent is not target.agent], seconds)
        target.agent.held_until = self.engine.now + seconds
        notice = self.engine.jitter(self.world.profile.notice_seconds)
        self.engine.after(notice, self.world.cluster.desert, target.agent)

    def cut(self, target: SimWorker, others: Iterable[SimWorker], blocked_seconds: float) -> None:
        network = self.world.network
        for other in others:
            target.impaired = other.impaired = True
            network.cut(target, other)
            if blocked_seconds:
                pair = frozenset((target.id, other.id))
                network.blocked.add(pair)
                self.engine.after(self.engine.jitter(blocked_seconds), network.blocked.discard, pair)

    def hold_control(self, agent: SimAgent, seconds: float) -> None:
        self.world.effects.impair(agent.living())
        agent.held_until = self.engine.now + seconds

    def others(self, target: SimWorker) -> list[SimWorker]:
        return self.world.effects.others(target)
