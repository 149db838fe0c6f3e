"""Who is there: agents and workers that come and go, lost links, evictions. The controller's view of its workforce.

Whatever happens to a member becomes a `cause`: a ballot is due (elastic/controller.py).
"""

from __future__ import annotations

from elastic import messages as m
from elastic.controller_state import ControllerState
from elastic.roster import Node, WorkerState, difference
from elastic.suspects import GRACE_SECONDS
from runtime.protocol import WorkerId

ASK_TIMEOUT_SECONDS = 15.0  # a control thread that doesn't report for so long is taken for dead
JOIN_DELAY_SECONDS = 0.1  # lets workers that come up together join together
RETURN_PATIENCE_SECONDS = 5.0  # a new incarnation's, for agents to introduce themselves
DEATHS_IN_PLACE = 4  # times as many workers as the job has, dying at one step, are no accident
FAILED_STARTS = 3  # workers in a row that die before they are up


class Workforce(ControllerState):
    # --- nodes and workers --------------------------------------------------------------------------------------

    def agent_up(self, event: m.AgentUp) -> None:
        if self.roster.superseded(event.slot, event.instance):
            return  # the words of a dead agent came late
        before = {w.id for w in self.roster.living()}
        node, first = self.roster.node_up(event.slot, event.instance, event.host)
        self.returning.discard(event.slot)
        for worker in sorted(before - {w.id for w in self.roster.living()}):
            self.gone(worker, f"node {self.roster.workers[worker].node} is gone", self.wall(), "agent")
        self.gone_unseen()
        self.persist()
        self.act(m.WelcomeAgent(event.slot, node.id))
        for info in event.workers:
            self.unseen.pop(info.worker, None)
            if info.worker not in self.roster.workers:
                self.computed += info.computed
            self.roster.add_worker(info.worker, node, info)
            self.reference = self.reference or info
        for worker in event.starting:
            self.roster.add_worker(worker, node)
        for exit in event.exited:
            self.died_unseen(exit, node)
        for worker in first:
            self.roster.add_worker(worker, node)
            self.act(m.StartWorker(node.slot, worker))
        if event.workers:
            self.tell_peers()
        self.act(m.PublishStatus())

    def died_unseen(self, exit: m.Exit, node: Node) -> None:
        """A member that was lost while no controller looked: a fault like any other."""
        if self.unseen.pop(exit.worker, None) is not None:
            self.roster.add_worker(exit.worker, node).state = WorkerState.DEAD
            self.computed += exit.computed
            self.gone(exit.worker, exit.reason, exit.time, "exit")

    def gone_unseen(self) -> None:
        """Members that went with their node while no controller looked."""
        for worker, number in [(w, n) for w, n in self.unseen.items() if not self.roster.nodes[n].alive]:
            del self.unseen[worker]
            self.roster.add_worker(worker, self.roster.nodes[number]).state = WorkerState.DEAD
            self.gone(worker, f"node {number} is gone", self.wall(), "agent")

    def agent_down(self, slot: int, instance: str, time: float) -> None:
        self.returning.discard(slot)
        node = self.roster.node_in(slot)
        if node is not None and instance in ("", node.instance):
            for worker in self.roster.node_down(node.id):
                self.gone(worker, f"node {node.id} is gone", time, "agent")
            self.gone_unseen()
            self.act(m.PublishStatus())
        if instance == "" and slot in self.roster.slots:
            self.act(m.StartAgent(slot))

    def worker_up(self, info: m.WorkerInfo) -> None:
        if not self.roster.lives(info.worker):
            return
        worker = self.roster.workers[info.worker]
        worker.info, worker.state = info, WorkerState.UP
        self.failed_starts = 0
        self.reference = self.reference or info
        if differs := difference(self.reference, info):
            self.refuse(info.worker, f"of another numerics class: {differs}")
        else:
            self.tell_peers()
            self.act(m.PublishStatus())

    def refuse(self, worker: WorkerId, why: str) -> None:
        """At the start that ends the job: its hosts don't fit it. Later it costs one worker."""
        if not self.ballots.members:
            self.end("failed", f"worker {worker} is {why}")
            return
        known = self.roster.workers[worker]
        known.state = WorkerState.DEAD
        self.act(m.AppendEvent("member_left", {"worker": worker, "reason": f"refused, {why}"}))
        self.act(m.KillWorker(known.slot, worker))

    def tell_peers(self) -> None:
        """Everyone's address to everyone: the newer of two dials the older."""
        peers = {w.id: w.info.address for w in self.roster if w.alive and w.info is not None}
        message = {"kind": "peers", "peers": [[worker, *address] for worker, address in peers.items()]}
        for worker in peers:
            self.to_worker(worker, message)

    def worker_linked(self, worker: WorkerId) -> None:
        known = self.roster.workers.get(worker)
        if known is not None and known.state is WorkerState.UP:
            known.state = WorkerState.READY
            self.join_at = self.now + JOIN_DELAY_SECONDS
            self.act(m.Wake(JOIN_DELAY_SECONDS))
            self.act(m.PublishStatus())

    def worker_gone(self, worker: WorkerId, reason: str, time: float, notice: str) -> None:
        if not self.roster.lives(worker):
            return
        known = self.roster.workers[worker]
        if known.state is WorkerState.STARTING:
            self.failed_starts += 1
            if self.failed_starts >= FAILED_STARTS:
                self.end("failed", self.failure or f"worker {worker} ended before it was up: {reason}")
                return
        known.state = WorkerState.DEAD
        self.gone(worker, reason, time, notice)
        self.refuse_endless(worker, reason)
        self.act(m.PublishStatus())

    def refuse_endless(self, worker: WorkerId, reason: str) -> None:
        """A job whose every worker dies at the same step would begin it again for ever."""
        self.deaths_in_place += 1
        if self.deaths_in_place >= DEATHS_IN_PLACE * (self.target() + self.facts.standbys):
            deaths, step = self.deaths_in_place, self.chronicle.ledger_next
            self.end("failed", f"{deaths} workers died in step {step}, the last of them, worker {worker}, by {reason}")

    def start_missing(self) -> None:
        """Replace who died, also who died with its node or while no controller looked."""
        if self.still_returning():
            return
        while (node := self.roster.wanting()) is not None:
            replacement = self.roster.new_worker_id()
            self.persist()
            self.roster.add_worker(replacement, node)
            self.act(m.StartWorker(node.slot, replacement))

    def still_returning(self) -> bool:
        """A new incarnation waits for the agents that its predecessor had, but not for ever."""
        return bool(self.returning) and self.now < self.started + RETURN_PATIENCE_SECONDS

    def gone(self, worker: WorkerId, reason: str, time: float, notice: str) -> None:
        """Fenced: dead for good. Its work is given away only now (rule 11)."""
        if self.initialising == worker:
            self.initialising = None
        self.suspects.clear(worker)
        if self.ballots.died(worker):
            self.notice(worker, time, notice)
            self.costs.lost(worker)
            self.cause = self.cause or f"worker {worker} died"
        if worker in self.ballots.members:
            self.act(m.AppendEvent("member_left", {"worker": worker, "reason": reason}))

    def notice(self, worker: WorkerId, time: float, how: str) -> None:
        if self.costs.notice(worker, time):
            self.act(m.AppendEvent("fault_detected", {"worker": worker, "notice": how}))

    def link_lost(self, worker: WorkerId, peer: WorkerId, time: float) -> None:
        if not (self.roster.lives(peer) and {worker, peer} <= self.ballots.members):
            return
        culprit = self.suspects.lost(worker, peer, self.now)
        self.notice(peer, time, "link")
        self.cause = self.cause or f"workers {worker} and {peer} lost their link"
        self.act(m.Wake(GRACE_SECONDS))
        if culprit is not None and self.roster.lives(culprit):
            self.evict(culprit, f"its link to worker {min(worker, peer)} breaks again and again")

    def evict_the_gone(self) -> None:
        asking = self.ballots.asking
        heard = asking.reports.keys() if asking is not None else set()
        for suspect in self.suspects.gone({w for w in self.ballots.members if self.roster.lives(w)}, self.now):
            if suspect not in heard and self.roster.lives(suspect):
                self.evict(suspect, "all others lost their links to it")
        if asking is not None and self.now >= asking.since + ASK_TIMEOUT_SECONDS:
            for worker in asking.missing(self.roster.lives):
                self.evict(worker, f"gave no report in {ASK_TIMEOUT_SECONDS:.0f} s")

    def evict(self, worker: WorkerId, reason: str) -> None:
        """It may live on as a zombie: the step protocol refuses its generation everywhere."""
        self.act(m.KillWorker(self.roster.workers[worker].slot, worker))
        self.worker_gone(worker, reason, self.wall(), "evicted")

    # --- who is wanted ------------------------------------------------------------------------------------------

    def target(self) -> int:
        """How many members the job wants, of those that could be."""
        return min(self.facts.logical_ranks, max(1, self.roster.living_nodes() * self.facts.workers_per_node))

    def joiners(self) -> list[WorkerId]:
        """Ready workers that the job wants as members: the oldest first. The rest are standbys.

        A suspect counts as leaving here, so that a standby takes its place in the same ballot.
        """
        ready = [w.id for w in self.roster.ready()]
        staying = (self.ballots.members & set(ready)) - self.suspects.all()
        return [w for w in ready if w not in self.ballots.members][: max(0, self.target() - len(staying))]

    def enough(self, workers: set[WorkerId]) -> bool:
        """To go on. To stop with a checkpoint, one will do."""
        return len(workers) >= (1 if self.stop_requested else max(1, self.facts.min_workers))
