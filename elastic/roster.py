"""Who is there: nodes and workers, their numbers and their states. Pure book-keeping of the controller.

Numbers count up in order of start and are never used again. A *slot* is a place where an agent runs; a *node* is one
life of the agent in a slot, so an agent that comes back is a new node.

    worker   starting ──WorkerUp──▶ up ──WorkerLinked──▶ ready ──▶ dead (from anywhere, for good)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic.messages import NodeId, WorkerInfo
from runtime.protocol import WorkerId


class WorkerState(StrEnum):
    STARTING = "starting"
    UP = "up"
    READY = "ready"
    DEAD = "dead"


@dataclass(slots=True)
class Worker:
    id: WorkerId
    node: NodeId
    slot: int
    state: WorkerState = WorkerState.STARTING
    info: WorkerInfo | None = None
    optimizer_bytes: int = 0
    progress: tuple[int, int] = (-1, 0)  # (step, micro-batches of it computed)
    computed: int = 0  # micro-batches in its life
    unreached: frozenset[WorkerId] = frozenset()  # peers that it has no link to

    @property
    def alive(self) -> bool:
        return self.state is not WorkerState.DEAD


@dataclass(slots=True)
class Node:
    id: NodeId
    slot: int
    instance: str
    host: str = ""
    alive: bool = True
    leaving: bool = False  # it has been told to go: nothing new is put there


@dataclass(slots=True)
class Roster:
    workers_per_node: int
    standbys: int
    next_worker: WorkerId = 0
    next_node: NodeId = 0
    slots: set[int] = field(default_factory=set)  # where an agent is wanted
    reserved: dict[int, tuple[NodeId, list[WorkerId]]] = field(default_factory=dict)  # slot -> its first node's numbers
    first: list[WorkerId] = field(default_factory=list)  # the workers that the job starts with, standbys not among them
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)

    # --- numbers --------------------------------------------------------------------------------------------

    def reserve_first(self, nodes: int) -> None:
        """The numbers of a job's start: workers by node, then standbys, spread over the nodes."""
        for slot in range(nodes):
            workers = [self.new_worker_id() for _ in range(self.workers_per_node)]
            self.reserved[slot] = (self.next_node, workers)
            self.first += workers
            self.next_node += 1
            self.slots.add(slot)
        for standby in range(self.standbys):
            self.reserved[standby % nodes][1].append(self.new_worker_id())

    def new_worker_id(self) -> WorkerId:
        self.next_worker += 1
        return self.next_worker - 1

    def new_slot(self) -> int:
        slot = max(self.slots | {n.slot for n in self.nodes.values()}, default=-1) + 1
        self.slots.add(slot)
        return slot

    # --- coming and going -----------------------------------------------------------------------------------

    def node_up(self, slot: int, instance: str, host: str) -> tuple[Node, list[WorkerId]]:
        """The node of this agent, and the workers to start on it: none if it is known already."""
        for node in self.nodes.values():
            if node.instance == instance:
                node.alive, node.host = True, host
                return node, []
        for node in self.nodes.values():
            if node.slot == slot:
                self.node_down(node.id)
        number, first = self.reserved.pop(slot, (-1, []))
        if number < 0:
            number, self.next_node = self.next_node, self.next_node + 1
        node = self.nodes[number] = Node(number, slot, instance, host)
        return node, first or [self.new_worker_id() for _ in range(max(0, self.wanted() - len(self.staying())))]

    def superseded(self, slot: int, instance: str) -> bool:
        """Whether a later life of the agent in this slot is known to be there."""
        now = self.node_in(slot)
        return now is not None and any(n.instance == instance and n.id < now.id for n in self.nodes.values())

    def node_down(self, node: NodeId) -> list[WorkerId]:
        """Its workers die with it (they have set a parent-death signal)."""
        self.nodes[node].alive = False
        gone = [w.id for w in self.living() if w.node == node]
        for worker in gone:
            self.workers[worker].state = WorkerState.DEAD
        return gone

    def add_worker(self, worker: WorkerId, node: Node, info: WorkerInfo | None = None) -> Worker:
        """A worker of this node; nothing changes if it is known."""
        if worker in self.workers:
            return self.workers[worker]
        added = self.workers[worker] = Worker(worker, node.id, node.slot)
        if info is not None:
            added.info, added.optimizer_bytes, added.computed = info, info.optimizer_bytes, info.computed
            added.state = WorkerState.READY if info.linked else WorkerState.UP
        return added

    # --- questions ------------------------------------------------------------------------------------------

    def wanted(self) -> int:
        """How many workers the nodes that stay should run, standbys included."""
        return self.living_nodes() * self.workers_per_node + self.standbys

    def wanting(self) -> Node | None:
        """The node with the fewest workers, if there are too few in all; those reserved are about to come."""
        coming = sum(len(workers) - self.workers_per_node for _, workers in self.reserved.values())
        nodes = [node for node in self.nodes.values() if node.alive and not node.leaving]
        if not nodes or len(self.staying()) + coming >= self.wanted():
            return None
        load = Counter(worker.node for worker in self.living())
        return min(nodes, key=lambda node: (load[node.id], node.id))

    def expected_back(self) -> set[int]:
        """Slots that a new controller must hear of: also one whose node was sent away, perhaps before it was gone."""
        return self.slots | {node.slot for node in self.nodes.values() if node.alive}

    def living_nodes(self) -> int:
        """Those that stay."""
        return sum(n.alive and not n.leaving for n in self.nodes.values())

    def leaving_nodes(self) -> list[Node]:
        """Told to go, and still there."""
        return [n for n in self.nodes.values() if n.alive and n.leaving]

    def leaves(self, worker: WorkerId) -> bool:
        """Whether its node has been told to go."""
        known = self.workers.get(worker)
        return known is not None and self.nodes[known.node].leaving

    def node_in(self, slot: int) -> Node | None:
        return next((n for n in self.nodes.values() if n.slot == slot and n.alive), None)

    def lives(self, worker: WorkerId) -> bool:
        known = self.workers.get(worker)
        return known is not None and known.alive

    def living(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.alive]

    def staying(self) -> list[Worker]:
        return [w for w in self.living() if not self.nodes[w.node].leaving]

    def ready(self) -> list[Worker]:
        return sorted((w for w in self.workers.values() if w.state is WorkerState.READY), key=lambda w: w.id)

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self.workers.values(), key=lambda w: w.id))

    # --- what survives the controller -----------------------------------------------------------------------

    def durable(self) -> dict[str, Any]:
        return {
            "next_worker": self.next_worker,
            "next_node": self.next_node,
            "slots": sorted(self.slots),
            "first": list(self.first),
            "reserved": [[slot, node, list(workers)] for slot, (node, workers) in sorted(self.reserved.items())],
            "nodes": [[n.id, n.slot, n.instance, n.alive, n.leaving] for n in self.nodes.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.next_worker, self.next_node = state["next_worker"], state["next_node"]
        self.slots, self.first = set(state["slots"]), list(state["first"])
        self.reserved = {slot: (node, list(workers)) for slot, node, workers in state["reserved"]}
        self.nodes = {
            n: Node(n, slot, instance, alive=alive, leaving=leaving)
            for n, slot, instance, alive, leaving in state["nodes"]
        }


def difference(reference: WorkerInfo, info: WorkerInfo) -> str:
    """What differs from the reference worker's numerics class, in words; empty if nothing does."""
    ours, theirs = reference.numerics, info.numerics
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return (
                f"{name} is {theirs.get(name)} there and {ours.get(name)} on worker {reference.worker};"
                " use equal hosts, or set train.numerics: portable"
            )
    if reference.probe != info.probe:
        return (
            f"its probe gradient is {info.probe[:8]} there and {reference.probe[:8]} on worker {reference.worker};"
            " use equal hosts, or set train.numerics: portable"
        )
    return ""
