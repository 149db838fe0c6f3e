"""Nodes that have been told to go, and go without a loss: what is handed over first, and when they may leave. Pure.

    staying ──notice──▶ leaving ──plan: others are filled, no new work──▶ handing over ──plan without its workers──▶
        handed over ──everyone goes on under it──▶ released ──its agent has ended──▶ gone
    and from anywhere: its deadline, or a death ──▶ gone, a loss like any other

A notice reaches one agent; the plan makes it known to all. Where too few would stay, there is nobody to hand over to:
the plan ends at the next step boundary with a checkpoint, and the job waits there for nodes.
The agent counts the seconds and says its notice again to whoever controls; what is kept here of time is for records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic import messages as m

if TYPE_CHECKING:
    from elastic.controller import Controller
    from elastic.messages import NodeId
    from elastic.roster import Node
    from runtime.protocol import Plan, WorkerId


@dataclass(slots=True)
class Departure:
    noticed: float  # wall clock
    seconds: float  # from then to the deadline
    workers: list[WorkerId] = field(default_factory=list)  # members that a plan has let go
    recomputed: int = 0  # micro-batches that they had computed and others compute again
    bytes_moved: int = 0  # copies that were filled while it handed over
    checkpoint: int | None = None  # what it left behind where nobody could take over

    def durable(self) -> list[Any]:
        moved = [self.recomputed, self.bytes_moved, self.checkpoint]
        return [self.noticed, self.seconds, list(self.workers), *moved]


class Departures:
    """The controller's part in it. Functions over its state, which is passed in."""

    def __init__(self) -> None:
        self.under_way: dict[NodeId, Departure] = {}
        self.released: set[NodeId] = set()  # by this incarnation

    def durable(self) -> list[list[Any]]:
        return [[node, *departure.durable()] for node, departure in sorted(self.under_way.items())]

    def restore(self, state: list[list[Any]]) -> None:
        self.under_way = {node: Departure(*values) for node, *values in state}

    # --- the notice and the end ---------------------------------------------------------------------------------

    def noticed(self, c: Controller, event: m.Preempted) -> None:
        node = c.roster.node_in(event.slot)
        if node is None or node.instance != event.instance or node.leaving:
            return
        node.leaving = True
        c.roster.slots.discard(node.slot)
        self.under_way[node.id] = Departure(c.wall(), event.seconds)
        if any(c.facts_of(w)[0] == node.id for w in c.ballots.members):
            c.cause = c.cause or f"node {node.id} leaves"
        c.persist()
        told = {"node": node.id, "seconds": round(event.seconds, 3), "notice": event.notice}
        c.act(m.AppendEvent("preempted", told))
        c.act(m.PublishStatus())

    def gone(self, c: Controller) -> None:
        """Tell of those whose agent has ended, however it came to that."""
        for number in [n for n in self.under_way if not c.roster.nodes[n].alive]:
            departure, node = self.under_way.pop(number), c.roster.nodes[number]
            handed_over = not any(c.facts_of(w)[0] == number for w in c.ballots.members)
            facts = {
                "node": number,
                "workers": departure.workers,
                "handed_over": handed_over,
                "seconds": round(c.wall() - departure.noticed, 3),
                "deadline_seconds": round(departure.seconds, 3),
                "recomputed": departure.recomputed,
                "bytes_moved": departure.bytes_moved,
                "checkpoint": departure.checkpoint,
            }
            c.persist()
            c.act(m.AppendEvent("departure", facts))
            if number not in self.released:  # it ended by itself: whoever brings agents back must not
                c.act(m.KillAgent(node.slot, again=False))

    # --- handing over ---------------------------------------------------------------------------------------------

    def handing_over(self, c: Controller) -> bool:
        return any(c.roster.lives(w) and c.roster.leaves(w) for w in c.ballots.members)

    def handed_over(self, c: Controller) -> bool:
        """Whether the next plan can do without a member that leaves: it owes no work, and others are filled."""
        plan = c.ballots.plan
        if plan is None or c.ballots.unfilled or not c.ballots.settled() or self.parks(c):
            return False
        owing = {*plan.ranks_next} if c.position > plan.version else {*plan.ranks_now, *plan.ranks_next}
        return any(w not in owing for w in c.ballots.members if c.roster.lives(w) and c.roster.leaves(w))

    def planned(self, c: Controller, plan: Plan, before: set[WorkerId]) -> None:
        """Members that live and are left out are let go."""
        for worker in sorted(before - set(plan.ids())):
            if c.roster.lives(worker) and c.roster.leaves(worker):
                self.let_go(c, worker, plan.version)

    def let_go(self, c: Controller, worker: WorkerId, version: int) -> None:
        known = c.roster.workers[worker]
        departure = self.under_way[known.node]
        departure.workers.append(worker)
        step, computed = known.progress
        departure.recomputed += computed if step == version else 0
        c.act(m.AppendEvent("member_left", {"worker": worker, "reason": f"its node {known.node} leaves"}))

    def filled(self, bytes_moved: int) -> None:
        for departure in self.under_way.values():
            departure.bytes_moved += bytes_moved

    # --- nobody to hand over to -------------------------------------------------------------------------------------

    def parks(self, c: Controller) -> bool:
        """The plan ends before the job does, and nobody has asked for that."""
        plan = c.ballots.plan
        return plan is not None and plan.stop_at < c.facts.steps and not c.stop_requested

    def park(self, c: Controller) -> None:
        """Once all is in a checkpoint, those who leave are let go, and the job waits."""
        plan, leaving = c.ballots.plan, sorted(w for w in c.ballots.members if c.roster.leaves(w))
        if plan is None or not leaving or not self.parks(c) or not c.chronicle.complete(plan.stop_at):
            return
        for worker in leaving:
            if c.roster.lives(worker):
                self.let_go(c, worker, plan.stop_at)
                self.under_way[c.roster.workers[worker].node].checkpoint = plan.stop_at
        c.ballots.members -= set(leaving)
        c.waiting_for_workers = True
        c.persist()
        reason = f"too few nodes stay; all is in the checkpoint of version {plan.stop_at}"
        c.act(m.AppendEvent("waiting", {"reason": reason}))
        c.act(m.PublishStatus())

    # --- leaving ----------------------------------------------------------------------------------------------------

    def release(self, c: Controller) -> None:
        """A node may go when it has no member, and everyone goes on without it."""
        self.park(c)
        if c.still_returning() or not (c.ballots.settled() or not c.ballots.members):
            return
        for node in c.roster.leaving_nodes():
            if node.id not in self.released and not self._needed(c, node):
                self.released.add(node.id)
                c.act(m.ReleaseAgent(node.slot))

    def _needed(self, c: Controller, node: Node) -> bool:
        living = [w for w in c.ballots.members if c.roster.lives(w) or w in c.unseen]
        return any(c.facts_of(w)[0] == node.id for w in living)
