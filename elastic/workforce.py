"""Who is there: agents and workers that come and go, lost links, evictions. The controller's view of its workforce.

Whatever happens to a member becomes a `cause`: a ballot is due (elastic/controller.py).
"""

from __future__ import annotations

from elastic import messages as m
from elastic.controller_state import ControllerState
from elastic.detector import AGENT_SILENT_SECONDS
from elastic.faults import FaultKind
from elastic.roster import Node, WorkerState, difference
from elastic.suspects import GRACE_SECONDS
from runtime.protocol import WorkerId

ASK_TIMEOUT_SECONDS = 15.0  # a control thread that doesn't report for so long is taken for dead
BEAT_PERIOD_SECONDS = 0.5  # of agents; so often their silence is looked for
JOIN_DELAY_SECONDS = 0.1  # lets workers that come up together join together
RETURN_PATIENCE_SECONDS = 5.0  # a new incarnation's, for agents to introduce themselves
AGENTS_IN_PLACE = 12  # of one slot, one after the other, while no step is decided
FAILED_STARTS = 3  # workers in a row that die before they are up, with no member that goes on
LONGEST_BACKOFF_SECONDS = 60.0  # before another is started after such a one


class Workforce(ControllerState):
    # --- nodes and workers --------------------------------------------------------------------------------------

    def agent_up(self, event: m.AgentUp) -> None:
        if self.roster.superseded(event.slot, event.instance) or event.instance in self.dead_agents:
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
                self.fits(info)
        for worker in event.starting:
            self.roster.add_worker(worker, node)
        for exit in event.exited:
            self.died_unseen(exit, node)
        self.finish_faults(node)
        if first:
            self.refuse_endless_agents(node)
        if first and self.ballots.members:
            self.tell_of_standbys(node)
        for worker in first:
            self.roster.add_worker(worker, node)
            self.act(m.StartWorker(node.slot, worker))
        if event.workers:
            self.tell_peers()
        self.act(m.PublishStatus())

    def refuse_endless_agents(self, node: Node) -> None:
        """An agent that ends as soon as it has begun is brought back by Ray for ever. New nodes are others."""
        self.agents_in_place[node.slot] += 1
        if self.agents_in_place[node.slot] > AGENTS_IN_PLACE and not self.members_living():
            self.end("failed", f"the agent of slot {node.slot} ends again and again; see logs/agent-{node.slot}.log")

    def tell_of_standbys(self, node: Node) -> None:
        """Workers beyond the logical ranks have nothing to do until others go."""
        ranks, workers = self.facts.logical_ranks, self.roster.living_nodes() * self.facts.workers_per_node
        if workers > ranks:
            reason = f"{workers} workers for {ranks} logical ranks, so {workers - ranks} of them stand by"
            self.act(m.AppendEvent("standby", {"node": node.id, "reason": reason}))

    def finish_faults(self, node: Node) -> None:
        """What an earlier controller recorded and may not have done: its targets are still here."""
        if node.slot not in self.roster.slots and not node.leaving:  # sent away
            self.act(m.KillAgent(node.slot, again=False))
        elif self.schedule.take_over(FaultKind.KILL_AGENT, node.id, self.ballots.incarnation):
            self.act(m.KillAgent(node.slot, again=True))
        elif (notice := self.schedule.take_over(FaultKind.PREEMPT_NODE, node.id, self.ballots.incarnation)) is not None:
            self.act(m.PreemptAgent(node.slot, notice.seconds or 0.0))
        for worker in [w for w in self.roster.living() if w.node == node.id]:
            if self.schedule.take_over(FaultKind.KILL_WORKER, worker.id, self.ballots.incarnation):
                self.act(m.KillWorker(node.slot, worker.id, fault=True))

    def died_unseen(self, exit: m.Exit, node: Node) -> None:
        """A member that was lost while no controller looked: a fault like any other."""
        if self.unseen.pop(exit.worker, None) is not None:
            self.died_like(exit.worker, node, exit.computed)
            self.gone(exit.worker, exit.reason, exit.time, "exit")

    def gone_unseen(self) -> None:
        """Members that went with their node while no controller looked."""
        for worker, (number, computed) in list(self.unseen.items()):
            node = self.roster.nodes[number]
            if not node.alive:
                del self.unseen[worker]
                self.died_like(worker, node, computed)
                self.gone(worker, f"node {number} is gone", self.wall(), "agent")

    def died_like(self, worker: WorkerId, node: Node, computed: int) -> None:
        known = self.roster.add_worker(worker, node)
        known.state, known.computed = WorkerState.DEAD, computed
        self.computed += computed

    def agent_down(self, slot: int, instance: str, time: float) -> None:
        self.returning.discard(slot)
        self.dead_agents.add(instance)
        node = self.roster.node_in(slot)
        if node is not None and instance in ("", node.instance):
            self.node_lost(node, f"node {node.id} is gone", time, "agent")
        if instance == "" and slot in self.roster.slots:
            self.act(m.StartAgent(slot))

    def node_lost(self, node: Node, why: str, time: float, notice: str) -> None:
        self.agents.forget(node.instance)
        for worker in self.roster.node_down(node.id):
            self.gone(worker, why, time, notice)
        self.gone_unseen()
        self.act(m.PublishStatus())

    def agent_beat(self, slot: int, instance: str) -> None:
        node = self.roster.node_in(slot)
        if node is not None and node.instance == instance:
            if not self.agents:
                self.act(m.Wake(BEAT_PERIOD_SECONDS))
            self.agents.beat(instance, self.now)
        elif node is None and any(n.instance == instance for n in self.roster.nodes.values()):
            self.act(m.KillAgent(slot, again=slot in self.roster.slots))  # given up as silent, and back

    def give_up_silent_agents(self) -> None:
        """Nobody can tell its workers anything any more: they go with it, and it comes back as a new node."""
        for instance in self.agents.silent(self.now):
            node = next((n for n in self.roster.nodes.values() if n.alive and n.instance == instance), None)
            self.agents.forget(instance)
            if node is not None:
                self.act(m.KillAgent(node.slot, again=True))
                why = f"the agent of node {node.id} has been silent for {AGENT_SILENT_SECONDS:.0f} s"
                self.node_lost(node, why, self.wall(), "silent")

    def worker_up(self, info: m.WorkerInfo) -> None:
        worker = self.roster.workers.get(info.worker)
        if worker is None or worker.state is not WorkerState.STARTING:
            return  # an agent that has introduced itself may say it again
        worker.info, worker.state = info, WorkerState.UP
        self.failed_starts = 0
        if self.fits(info):
            self.tell_peers()
            self.act(m.PublishStatus())

    def fits(self, info: m.WorkerInfo) -> bool:
        """Refuse whoever would compute other bits than the members; while none is known, than the first that came."""
        members = self.ballots.members
        if self.reference is None or (info.worker in members and self.reference.worker not in members):
            self.reference = info
        others = [w.info for w in self.roster.living() if w.info is not None and w.id not in members]
        for other in others:
            if differs := difference(self.reference, other):
                self.refuse(other.worker, f"of another numerics class: {differs}")
        return self.roster.lives(info.worker)

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

    def worker_linked(self, worker: WorkerId, unreached: frozenset[WorkerId]) -> None:
        known = self.roster.workers.get(worker)
        if known is None or not known.alive or (known.state is WorkerState.READY and known.unreached == unreached):
            return
        was_cut_off = worker in self.cut_off()
        known.unreached = unreached
        if known.state is WorkerState.UP:
            known.state = WorkerState.READY
        if worker in self.cut_off() and not was_cut_off:
            members = ", ".join(map(str, sorted(unreached & self.ballots.members)))
            self.act(m.AppendEvent("cut_off", {"worker": worker, "reason": f"it can't reach {members}, so it waits"}))
        self.join_at = self.now + JOIN_DELAY_SECONDS
        self.act(m.Wake(JOIN_DELAY_SECONDS))
        self.act(m.PublishStatus())

    def cut_off(self) -> set[WorkerId]:
        """Who can't join, as it has no link to a member that lives and that nobody suspects."""
        there = {w for w in self.ballots.members if self.roster.lives(w)} - self.suspects.all()
        return {w.id for w in self.roster.ready() if w.id not in self.ballots.members and w.unreached & there}

    def worker_gone(self, worker: WorkerId, reason: str, time: float, notice: str) -> None:
        if not self.roster.lives(worker):
            return
        known, reason = self.roster.workers[worker], self.last_words.pop(worker, reason)
        if self.roster.leaves(worker):  # it may be its turn to go
            known.state = WorkerState.DEAD
            self.gone(worker, reason, time, notice)
            return
        if known.state is WorkerState.STARTING and not self.costs.is_killed(worker):
            self.failed_starts += 1
            self.start_after = self.now + min(LONGEST_BACKOFF_SECONDS, 0.25 * 4.0**self.failed_starts)
            if self.failed_starts >= FAILED_STARTS and not self.members_living():
                self.end("failed", self.failure or f"worker {worker} ended before it was up: {reason}")
                return
        known.state = WorkerState.DEAD
        self.gone(worker, reason, time, notice)
        self.refuse_endless(worker, reason)
        self.act(m.PublishStatus())

    def worker_failed(self, worker: WorkerId, message: str, theirs: bool) -> None:
        """It says why, before it ends. What ails one host that would join is no reason to end a job that goes on."""
        self.failure = f"worker {worker}: {message}"
        self.last_words[worker] = message
        joins = worker >= 0 and worker not in self.ballots.members  # -1: an agent, which nobody can do without
        if theirs and not (joins and self.members_living()):
            self.end("failed", message)

    def members_living(self) -> bool:
        return any(self.roster.lives(worker) or worker in self.unseen for worker in self.ballots.members)

    def refuse_endless(self, worker: WorkerId, reason: str) -> None:
        """A job whose every worker dies at the same step would begin it again for ever."""
        self.deaths_in_place += not self.costs.is_killed(worker)
        if self.deaths_in_place >= self.facts.policy.restarts * (self.target() + self.facts.standbys):
            deaths, step = self.deaths_in_place, self.chronicle.ledger_next
            self.end("failed", f"{deaths} workers died in step {step}, the last of them, worker {worker}, by {reason}")

    def start_missing(self) -> None:
        """Replace who died, also who died with its node or while no controller looked."""
        if self.still_returning():
            return
        if self.now < self.start_after:
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
        self.suspects.forget(worker)
        if self.ballots.died(worker):
            self.notice(worker, time, notice)
            self.costs.lost(worker)
            self.cause = self.cause or f"worker {worker} died"
            self.respond(worker, notice)
        if worker in self.ballots.members:
            self.act(m.AppendEvent("member_left", {"worker": worker, "reason": reason}))

    def respond(self, worker: WorkerId, notice: str) -> None:
        """As the job file's policy wants it."""
        name, response = self.facts.policy.lost(notice)
        if response == "redistribute":
            self.redistributing = True
        elif response == "stop" and not self.stop_requested:
            self.stop_requested = True
            self.stop_reason = f"worker {worker} was lost, and policy.{name} is stop"

    def notice(self, worker: WorkerId, time: float, how: str) -> None:
        if self.costs.notice(worker, time):
            self.act(m.AppendEvent("fault_detected", {"worker": worker, "notice": how}))

    def link_lost(self, worker: WorkerId, peer: WorkerId, time: float, dialled: bool = False) -> None:
        self.costs.seen_too(peer, time)
        if not (self.roster.lives(peer) and {worker, peer} <= self.ballots.members):
            return
        culprit = self.suspects.lost(worker, peer, self.now, dialled)
        self.notice(peer, time, "link")
        self.cause = self.cause or f"workers {worker} and {peer} lost their link"
        self.act(m.Wake(GRACE_SECONDS))
        if culprit is not None and self.roster.lives(culprit):
            others = ", ".join(map(str, self.suspects.broken(culprit)))
            self.evict(culprit, f"its links to {others} break again and again")

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

        A suspect counts as leaving here, and so does who is told to go: a standby takes its place in the same ballot.
        """
        ready = [w.id for w in self.roster.ready() if not self.roster.leaves(w.id)]
        staying = (self.ballots.members & set(ready)) - self.suspects.all()
        if self.redistributing and self.enough(staying):
            return []
        could = self.ballots.members | self.cut_off()
        return [w for w in ready if w not in could][: max(0, self.target() - len(staying))]

    def enough(self, workers: set[WorkerId]) -> bool:
        """To go on. To stop with a checkpoint, one will do."""
        return len(workers) >= (1 if self.stop_requested else max(1, self.facts.min_workers))
