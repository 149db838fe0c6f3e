"""What must hold at every moment of every run. A breach raises ``Violation`` where it happens.

P1  parameters, states and records equal the plain loop's; with noise: those who count never differ
P2  the ledger has steps 0, 1, 2, ... once each, with exactly their samples
P4  a rollback only if copies were lost in a way that redundancy doesn't cover; work is done twice only for the dead
rules: a lead of one step at most, nothing uncertified applied, a certificate means that every backup holds the
gradient, frozen workers are silent (worker.py), every shard keeps a holder after one failure
records: whoever is lost is named by a recovery

``failures`` is the ghost of the explicit-state model: failures since every shard was last complete at the owner and
the backup that the newest plan names (after a start or a rollback: since they all were for the first time). A node
counts as one if no shard had both on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from runtime.protocol import Ballot, Certificate, Plan, StepRecord, WorkerId
from runtime.trial import attempts_at
from tests.sim import preemption
from tests.sim.values import digest_of

if TYPE_CHECKING:
    from elastic.controller import Controller
    from tests.sim.worker import SimWorker
    from tests.sim.world import World


NOT_YET = 1000  # failures: nothing is promised before all copies were there for the first time


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.newest: Plan | None = None
        self.members: frozenset[WorkerId] = frozenset()
        self.joining: frozenset[WorkerId] = frozenset()
        self.refound: set[WorkerId] = set()  # those who join again by the newest plan: they had been given up
        self.failures = NOT_YET
        self.spread = False  # when last full, no shard had both copies on one node
        self.rolled_back: Ballot | None = None
        self.max_step = -1
        self.versions: dict[int, tuple[tuple[int, ...], set[WorkerId]]] = {}  # with noise: who entered with what
        self.certificates: dict[int, set[tuple[bytes, ...]]] = {}  # a later rollback may never be installed
        self.computations: Counter[tuple[int, int]] = Counter()
        self.owed: Counter[tuple[int, int]] = Counter()  # that the dead owed, or had done, and others do again
        self.parked = False  # all is in a checkpoint, and whoever is left may go
        self.rollbacks = 0
        self.plans = 0
        self.recomputed = 0
        self.anew_at = 0.0  # when this job's run began, or another job resumed it

    def begin_anew(self) -> None:
        """All is gone but the disk."""
        self.newest, self.failures, self.anew_at = None, NOT_YET, self.world.engine.now
        self.members = self.joining = frozenset()
        self.refound = set()

    def violation(self, text: str) -> None:
        self.world.violation(text)

    # --- who counts, by the truth -------------------------------------------------------------------------------

    def standing(self, worker: SimWorker) -> bool:
        """Alive and not left out: what it does matters."""
        return worker.alive and worker.id in self.members

    def living(self, without: Iterable[WorkerId] = ()) -> list[SimWorker]:
        """Living members of the newest plan, but for those who joined by it and don't know yet."""
        if self.newest is None:
            return []
        ballot, gone = self.newest.ballot, set(without)
        found = []
        for worker in self.newest.ids():
            known = self.world.workers.get(worker)
            if known is None or not known.alive or worker in gone:
                continue
            if worker in self.joining and (known.tx.plan is None or known.tx.plan.ballot != ballot):
                continue
            found.append(known)
        return found

    def rolling(self) -> bool:
        """Under a rollback (or the start), until all have installed it: nothing older counts."""
        assert self.newest is not None
        if self.newest.checkpoint is None:
            return False
        members = [self.world.workers[w] for w in self.newest.ids()]
        return any(w.alive and (w.tx.plan is None or w.tx.plan.ballot != self.newest.ballot) for w in members)

    # --- redundancy ---------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Forget past failures if every shard is complete at a living owner and a living backup."""
        living = self.living()
        if not living or self.rolling():
            return
        assert self.newest is not None
        version = max(reached(w) for w in living)
        holds = {w.id: w for w in living}
        spread = True
        for shard, where in enumerate(self.newest.shards):
            copies = [w for w in (where.owner, *where.backups) if w in holds and has(holds[w], shard, version)]
            if where.owner not in copies or len(copies) < 2:
                return
            spread = spread and len({holds[w].agent.slot for w in copies}) > 1
        self.failures, self.spread = 0, spread

    def failing(self, workers: list[SimWorker]) -> None:
        """These are about to die, all at once and all of one node."""
        counting = [w for w in workers if self.standing(w)]
        if not counting or self.parked:
            return
        self.refresh()
        self.count(counting)
        self.holders({w.id for w in counting})

    def count(self, workers: list[SimWorker]) -> None:
        nodes = {w.agent.slot for w in workers}
        covered = self.failures == 0 and self.spread and len(nodes) == 1
        self.failures += 1 if covered else len(workers)
        for worker in workers:
            tx = worker.tx
            if tx.plan is not None:
                for step in (tx.step - 1, tx.step):  # of the one before, the others may know less than it did
                    ranks = tx.plan.ranks_now if step == tx.plan.version else tx.plan.ranks_next
                    self.owed.update((step, rank) for rank, owner in enumerate(ranks) if owner == worker.id)

    def holders(self, without: Iterable[WorkerId] = ()) -> None:
        """After one failure at most, every shard has a living copy."""
        if self.failures > 1:
            return
        living = self.living(without)
        if not living or self.rolling():
            return
        version = max(reached(w) for w in living)
        for shard in range(self.world.job.shards):
            if not any(has(w, shard, version) for w in living):
                self.violation(f"P4: shard {shard} has no living copy of version {version}")

    # --- what workers do ----------------------------------------------------------------------------------------

    def entering(self, worker: SimWorker, step: int) -> None:
        if not self.standing(worker):
            return
        tx = worker.tx
        self.nobody_left_behind(worker, step, 1)
        parameters = tuple(worker.arithmetic.staged)
        if not self.world.job.sdc:
            if parameters != self.world.reference.version(step).parameters:
                self.violation(f"P1: worker {worker.id} enters step {step} with wrong parameters")
        elif tx.plan is not None and (self.rolled_back is None or tx.plan.ballot >= self.rolled_back):
            known, holders = self.versions.setdefault(step, (parameters, set()))
            if known != parameters:
                others = [w for w in holders if w != worker.id and self.standing(self.world.workers[w])]
                if others:
                    self.violation(f"P1: workers {worker.id} and {others} enter step {step} with different parameters")
                self.versions[step] = (parameters, {worker.id})
            else:
                holders.add(worker.id)
        if step > self.max_step:
            self.max_step = step
            self.world.progress(step)

    def nobody_left_behind(self, worker: SimWorker, step: int, lead: int) -> None:
        """Rule 3: nobody of the same generation is further than ``lead`` behind ``step``."""
        plan = worker.tx.plan
        assert plan is not None
        for peer in plan.ids():
            other = self.world.workers.get(peer)
            if other is None or other is worker or not other.alive or other.tx.plan is None:
                continue
            if other.tx.plan.ballot == plan.ballot and step - other.tx.step > lead:
                self.violation(f"rule 3: worker {worker.id} is at {step}, worker {peer} still in {other.tx.step}")

    def certifying(self, worker: SimWorker, certificate: Certificate) -> bool:
        """It takes its step for decided, by all records or by a certificate. Whether it is the first."""
        if not self.standing(worker):
            return False
        tx = worker.tx
        assert tx.plan is not None
        self.nobody_left_behind(worker, tx.step, 0)
        self.certificates.setdefault(tx.step, set()).add(tuple(h.digest for h in certificate.headers))
        for shard, where in enumerate(tx.plan.shards):
            for voter in where.backups:
                holder = self.world.workers[voter].tx
                holding = holder.holdings.get(shard)
                stored = holding is not None and (tx.step in holding.pending or holding.version > tx.step)
                if not stored and holder.plan is not None and holder.plan.ballot == tx.plan.ballot:
                    self.violation(f"rule 4: step {tx.step} is certified, worker {voter} has no gradient of {shard}")
        others = [w.tx for w in self.living() if w is not worker]
        return all(t.step < tx.step or (t.step == tx.step and t.certificate is None) for t in others)

    def applied(self, worker: SimWorker, shard: int, step: int, gradient: int, state: int) -> None:
        if not self.standing(worker):
            return
        digest = digest_of(gradient)
        known = self.certificates.get(step, set())
        if not any(digests[shard] == digest for digests in known):
            self.violation(f"rule 5: worker {worker.id} applies step {step} to shard {shard} uncertified")
        if not self.world.job.sdc and state != self.world.reference.version(step + 1).states[shard]:
            self.violation(f"P1: worker {worker.id} has a wrong state of shard {shard} after step {step}")

    def dropped(self, worker: SimWorker, shard: int) -> None:
        if self.standing(worker):
            self.holders()

    def installed(self, worker: SimWorker) -> None:
        if self.standing(worker):
            self.holders()

    def computed(self, worker: SimWorker, step: int, rank: int, begun_under: Ballot) -> None:
        """P4: a rank is computed a second time only if who had it is dead."""
        if not self.standing(worker) or (self.rolled_back is not None and begun_under < self.rolled_back):
            return
        self.computations[step, rank] += 1
        again = self.computations[step, rank] - 1
        self.recomputed += again > 0
        if again > self.owed[step, rank]:
            self.violation(f"P4: worker {worker.id} computes rank {rank} of step {step} again, and nobody owed it")

    def raised(self, worker: SimWorker, error: Exception) -> None:
        """Those left out may come to grief; they are to be killed anyhow. Who finds its own memory wrong, ends."""
        if self.standing(worker) and not self.world.wrongs.may_end(worker, error):
            import traceback

            self.world.trace("".join(traceback.format_exception(error)))
            self.violation(f"worker {worker.id} raises {type(error).__name__}: {error}")
        self.world.cluster.worker_dies(worker, f"{type(error).__name__}: {error}")

    # --- what the controller does -------------------------------------------------------------------------------

    def planned(self, plan: Plan, current: bool) -> None:
        self.plans += 1
        self.world.trace(describe(plan))
        if self.newest is not None and plan.ballot < self.newest.ballot:
            return  # a deposed controller's; nobody who counts can accept it any more
        self.refresh()
        living = self.living()
        left = [w for w in living if w.id not in plan.ids() and not preemption.goes(w)]
        for worker in left:
            if not worker.impaired and current:
                self.violation(f"worker {worker.id} is given up, and nothing is wrong with it")
        if left:
            self.count(left)
        if len(plan.members) == 1:  # also if others have gone in good order: there is nobody for a second copy
            self.failures = max(1, self.failures)
        if plan.checkpoint is not None and self.newest is not None:
            self.rollback(plan, current)
        self.parked = False
        if plan.checkpoint is not None:
            self.failures = NOT_YET
        if len(plan.attempts) > len(attempts_at(self.newest, plan.version)):
            self.owed.update((plan.version, rank) for rank in range(self.world.job.logical_ranks))  # all once more
        if plan.checkpoint is not None or not living:  # or all are dead who knew of later steps
            self.forget(plan)
        self.newest, self.members = plan, frozenset(plan.ids())
        self.joining = frozenset(m.worker for m in plan.members if m.joining)
        known = self.world.workers
        self.refound = {w for w in self.joining if plan.checkpoint is None and known[w].tx.plan is not None}

    def forget(self, plan: Plan) -> None:
        """What was done from the plan's step on is done again."""
        self.rolled_back = plan.ballot
        for version in [v for v in self.versions if v >= plan.version]:
            del self.versions[version]
        for key in [k for k in self.computations if k[0] >= plan.version]:
            del self.computations[key]

    def rollback(self, plan: Plan, current: bool) -> None:
        self.rollbacks += 1
        if not current:
            return
        if self.failures <= 1 and not self.parked:
            self.violation(f"P4: rollback to {plan.version} after {self.failures} failure since full redundancy")
        reporters = [self.world.workers[w].tx for w in plan.ids()]
        newest = max((t.plan for t in reporters if t.plan is not None), key=lambda p: p.ballot, default=None)
        if newest is None:
            return
        counting = [t for t in reporters if t.plan is not None and t.plan.ballot == newest.ballot]
        version = max(t.step + (t.certificate is not None) for t in counting)
        lost = [
            shard
            for shard, where in enumerate(newest.shards)
            if not any(
                t.worker in (where.owner, *where.backups) and shard in t.holdings and t.holdings[shard].reaches(version)
                for t in counting
            )
        ]
        if not lost:
            self.violation(f"P4: rollback to {plan.version} though every shard has a complete copy of {version}")

    def settled(self, controller: Controller) -> None:
        """The controller says that nothing is under way: then every shard has two copies, on two nodes if there are."""
        plan = controller.ballots.plan
        assert plan is not None
        workers = [self.world.workers[w] for w in plan.ids()]
        if plan is not self.newest or not all(w.alive for w in workers):
            return
        several = len({m.node for m in plan.members}) > 1
        nodes = {m.worker: m.node for m in plan.members}
        for shard, where in enumerate(plan.shards):
            if len(plan.members) > 1 and len(where.backups) != 1:
                self.violation(f"settled, but shard {shard} has backups {where.backups}")
            if several and nodes[where.owner] == nodes[where.backups[0]]:
                self.violation(f"settled, but both copies of shard {shard} are on node {nodes[where.owner]}")
            for holder in (where.owner, *where.backups):
                holding = self.world.workers[holder].tx.holdings.get(shard)
                if holding is None or not holding.complete:
                    self.violation(f"settled, but worker {holder} has no complete copy of shard {shard}")

    def ledger(self, record: StepRecord, ledger: list[StepRecord]) -> None:
        """What the shell does with a record (append if absent), and whether it is the right one."""
        batch = self.world.job.global_batch
        step = record.step
        if record.samples != (step * batch, (step + 1) * batch):
            self.violation(f"P2: step {step} says samples {record.samples}")
        if not self.world.job.sdc:
            right = self.world.reference.version(step + 1)
            if (record.digest, record.verdict) != (right.digest, right.verdict):
                self.violation(f"P1: step {step} is recorded as {record.verdict} with a wrong digest")
        if step > len(ledger):
            self.violation(f"P2: step {step} is handed in before step {len(ledger)}")
        if step < len(ledger):
            if ledger[step].digest != record.digest and not self.world.job.sdc:
                self.violation(f"P1: step {step} is recorded twice with different digests")
            return
        ledger.append(record)

    # --- the end ------------------------------------------------------------------------------------------------

    def ended(self, state: str, reason: str) -> None:
        world, disk = self.world, self.world.disk
        if world.wrongs.undecidable(reason):
            return
        if state not in ("done", "stopped"):
            self.violation(f"the run ended as {state}: {reason}")
        nobody = not any(self.standing(worker) for worker in world.workers.values())
        if state == "stopped" and (self.newest is None or nobody):  # before it had begun (again); or all died meanwhile
            return
        assert self.newest is not None
        end = self.newest.stop_at
        if state == "done" and end != world.job.steps:
            self.violation(f"done at step {end} of {world.job.steps}")
        if [r.step for r in disk.ledger] != list(range(max(end, len(disk.ledger)))):  # it may end after a rollback
            self.violation(f"P2: the ledger has {len(disk.ledger)} steps of {end}")
        if disk.newest() != end:
            self.violation(f"no checkpoint of version {end} at the end, but {disk.newest()}")
        if disk.weights is None or disk.weights[0] != end:
            self.violation(f"no weights of version {end} at the end")
        self.told(disk.events)
        self.world.wrongs.ended()
        if world.job.sdc:
            return
        right = world.reference.version(end)
        if disk.weights is not None and disk.weights[1] != right.parameters:
            self.violation("P1: the final weights are wrong")
        for shard, state_value in enumerate(right.states):
            if disk.shards[end, shard] != state_value or disk.manifests[end][shard] != digest_of(state_value).hex():
                self.violation(f"P1: the final checkpoint of shard {shard} is wrong")

    def told(self, events: list[tuple[float, str, Mapping[str, Any]]]) -> None:
        """Whoever is lost is named by a recovery that ends later, whatever happens to the controller meanwhile."""
        recoveries = [(at, e["workers"]) for at, kind, e in events if kind == "recovery"]
        for when, kind, event in events:
            goes = kind == "member_left" and event["reason"].endswith("leaves")
            if (
                kind == "member_left"
                and not goes
                and when > self.anew_at
                and not any(at >= when and event["worker"] in who for at, who in recoveries)
            ):
                self.violation(f"worker {event['worker']} is lost, and no recovery names it")


def reached(worker: SimWorker) -> int:
    return worker.tx.step + (worker.tx.certificate is not None)


def has(worker: SimWorker, shard: int, version: int) -> bool:
    holding = worker.tx.holdings.get(shard)
    return holding is not None and holding.reaches(version)


def describe(plan: Plan) -> str:
    members = " ".join(f"{m.worker}@{m.node}{'+' if m.joining else '-' if m.behind else ''}" for m in plan.members)
    shards = " ".join(
        f"{s}:{w.owner}/{','.join(str(b) + ('?' if b in w.fill else '') for b in w.backups)}"
        for s, w in enumerate(plan.shards)
    )
    back = f" ROLLBACK to {plan.checkpoint}" if plan.checkpoint is not None else ""
    return (
        f"controller plans {tuple(plan.ballot)}: go on at {plan.version}{back}; members {members}; shards {shards}; "
        f"ranks {list(plan.ranks_now)} then {list(plan.ranks_next)}; stop at {plan.stop_at}"
    )
