"""The step transaction of one worker: rules 1 to 8. Its other half, rules 9 to 16, is runtime/change.py.

A pure state machine. It takes frames, computed ranks, asks and plans, and gives back actions (runtime/actions.py);
tensors stay behind ``Arithmetic``. No socket, thread, clock or random call: production and simulator run this code.

Where a worker can be in step t, under one installed plan (its *generation*):

    held ──release──▶ computing ──own ranks──▶ contributed ──a record from every backup──▶ certified ──all shards──▶ t+1
                              (a PARAMETERS frame or a plan carries the certificate as well) ──▶ certified
    and at any moment: ask ──▶ frozen (only computing goes on) ──plan──▶ the next generation

Work that nobody waits for (a backup's application, a snapshot for a filling backup) is put off to ``settle`` and
forced before anything that needs it.
"""

from __future__ import annotations

from dataloader.errors import InternalError
from dataloader.stream import fold_digests
from runtime import change, comparing, trial
from runtime.actions import Action, AtGate, Compute, Decided, Ended, Filled, Save
from runtime.comm.order import cover
from runtime.copies import Holding, Pending
from runtime.guard import exact_sum, remembered
from runtime.protocol import (
    Ballot,
    Certificate,
    Frame,
    FrameKind,
    Header,
    Plan,
    RankWork,
    ShardPlan,
    WorkerId,
    pack_certificate,
    pack_header,
    unpack_certificate,
    unpack_header,
)
from runtime.step_state import Contribution, StepState


class StepTransaction(StepState):
    """Whatever happens, the caller hands in one event at a time and does the actions that come back, in order."""

    # --- what the driver calls ----------------------------------------------------------------------------

    def on_frame(self, sender: WorkerId, frame: Frame) -> list[Action]:
        when, step = self.admit(frame), self.step
        if when > 0:
            self.waiting.append((sender, frame))
        elif when == 0:
            self.handle(sender, frame)
            if self.step != step:  # only then has any other frame's time come
                self.handle_waiting()
        return self.take_actions()

    def on_computed(self, step: int, rank: int, work: RankWork) -> list[Action]:
        """A wanted logical rank's gradient is in the arithmetic as node (rank, rank + 1)."""
        comparing.check_parameters(self, step, work)
        if not self.wants(step, rank):
            raise InternalError(f"worker {self.worker}: nobody wants logical rank {rank} of step {step}")
        self.nodes.add((rank, rank + 1))
        self.work[rank] = work
        if not self.frozen:  # frozen: what was reported must not change its shape before the plan
            self.keep_assigned()
            self.contribute()
            self.handle_waiting()
        return self.take_actions()

    def on_release(self, step: int) -> list[Action]:
        self.released.add(step)
        if self.held and step == self.step and not self.frozen:
            self.begin()
            self.handle_waiting()
        return self.take_actions()

    def on_ask(self, ballot: Ballot) -> list[Action]:
        change.on_ask(self, ballot)
        return self.take_actions()

    def on_plan(self, plan: Plan) -> list[Action]:
        if change.accepts(self, plan):
            change.install(self, plan)
            self.handle_waiting()
        return self.take_actions()

    def settle(self) -> list[Action]:
        """Do one piece of work that nobody waits for. Empty-handed when there is none (or while frozen)."""
        if self.frozen:
            return []
        if self.snapshots_owed:
            self.send_snapshot(self.snapshots_owed[0])
        else:
            for shard, holding in self.holdings.items():
                if self._can_catch_up(holding):
                    self.catch_up(shard, holding)
                    break
        return self.take_actions()

    @property
    def unsettled(self) -> bool:
        return not self.frozen and (
            bool(self.snapshots_owed) or any(self._can_catch_up(h) for h in self.holdings.values())
        )

    # --- frames (rule 2) ----------------------------------------------------------------------------------

    def handle_waiting(self) -> None:
        """Handle every frame whose time has come, until none has."""
        progress = True
        while progress:
            progress = False
            waiting, self.waiting = self.waiting, []
            for i, (sender, frame) in enumerate(waiting):
                when = self.admit(frame)
                if when < 0:
                    continue
                if when > 0:
                    self.waiting.append((sender, frame))
                    continue
                self.handle(sender, frame)
                self.waiting += waiting[i + 1 :]  # the state has moved: look at all of them again
                progress = True
                break

    def admit(self, frame: Frame) -> int:
        """0: its time is now. 1: later, keep it. -1: over, drop it (rule 2)."""
        if frame.ballot < self.promise:
            return -1
        if self.frozen or self.plan is None or frame.ballot > self.plan.ballot:
            return 1
        if frame.kind is FrameKind.SNAPSHOT:  # of a version, not of a step
            return 0
        return (frame.step > self.step) - (frame.step < self.step)

    def handle(self, sender: WorkerId, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.CONTRIBUTION:
                nodes, work = frame.meta
                self.contributions.setdefault(frame.shard, {})[sender] = Contribution(
                    tuple((low, high) for low, high in nodes),
                    frame.payload,
                    tuple((rank, RankWork(tuple(losses), tokens, digest)) for rank, losses, tokens, digest in work),
                )
            case FrameKind.GRADIENT:
                self.on_gradient(frame)
            case FrameKind.RECORD:
                self.record(sender, unpack_header(frame.meta[0]), frame.meta[1])
            case FrameKind.PARAMETERS:
                self.on_parameters(frame)
            case FrameKind.SNAPSHOT:
                self.on_snapshot(frame)
            case _:
                raise InternalError(f"worker {self.worker}: a {frame.kind.name} frame reached the step transaction")
        self.advance()

    # --- compute and contribute (rule 3) ------------------------------------------------------------------

    def enter(self, step: int) -> None:
        """All parameters of version `step` are here."""
        plan = self.installed()
        self.previous = self.certificate or self.previous
        self.step, self.certificate, self.bare, self.held = step, None, False, False
        self.clear_step()
        self.save_if_due(plan)
        if step >= plan.stop_at:
            self.act(Ended(step))
        elif step in self.facts.gates and step not in self.released:
            self.held = True
            self.act(AtGate(step))
        else:
            self.begin()

    def begin(self) -> None:
        self.held = False
        self.keep_assigned()
        missing = self.missing()
        if missing:
            self.act(Compute(self.step, missing))
        self.contribute()

    def contribute(self) -> None:
        """Send every owner this worker's part of its shards, empty if it has none, once all of it is computed."""
        if self.contributed or self.held or self.certificate is not None or self.step >= self.installed().stop_at:
            return
        if self.missing():
            return
        self.contributed = True
        nodes = cover(self.assigned(), self.facts.logical_ranks)
        work = tuple((rank, self.work[rank]) for rank in sorted(self.work))
        meta = [list(nodes), [[rank, list(w.losses), w.tokens, w.data_digest] for rank, w in work]]
        for shard, where in self._shards_from_here():
            payload = self.arithmetic.contribution(nodes, shard) if nodes else None
            if where.owner == self.worker:
                self.contributions.setdefault(shard, {})[self.worker] = Contribution(nodes, payload, work)
            else:
                self.send(where.owner, FrameKind.CONTRIBUTION, shard, meta, payload)
        self.advance()

    def _shards_from_here(self) -> list[tuple[int, ShardPlan]]:
        """All shards, each worker starting with its own, so that not all send to the same owner at once."""
        shards = list(enumerate(self.installed().shards))
        first = next((s for s, where in shards if where.owner == self.worker), 0)
        return shards[first:] + shards[:first]

    # --- reduce, store, vote (rules 4, 5) -----------------------------------------------------------------

    def advance(self) -> None:
        """Do all that the state allows: reduce, certify, enter the next step."""
        plan = self.installed()
        if self.step >= plan.stop_at:
            return
        if self.certificate is None and not self.doubted:
            for shard, where in enumerate(plan.shards):
                if where.owner == self.worker and shard not in self.reduced and self.has_all_contributions(shard):
                    self.reduce(shard, where)
            if self.has_all_records():
                headers = tuple(next(iter(self.records[s].values())) for s in range(self.facts.shards))
                trial.conclude(self, headers)
        if self.certificate is not None and len(self.staged) == self.facts.shards:
            if not self.certificate.void:
                self.act(Decided(self.step_record(self.certificate)))
            self.enter(self.step + 1)

    def has_all_contributions(self, shard: int) -> bool:
        """Empty ones included: that bounds anyone's lead to one step (rule 3)."""
        return self.contributions.get(shard, {}).keys() >= set(self.installed().ids())

    def has_all_records(self) -> bool:
        shards = self.installed().shards
        return all(self.records.get(s, {}).keys() >= set(self.voters(where)) for s, where in enumerate(shards))

    def voters(self, where: ShardPlan) -> tuple[WorkerId, ...]:
        """Every named backup, filled or not; only a shard without any is vouched for by its owner (rule 4)."""
        return where.backups or (where.owner,)

    def reduce(self, shard: int, where: ShardPlan) -> None:
        contributions = [self.contributions[shard][worker] for worker in sorted(self.contributions[shard])]
        parts = [(c.nodes, c.payload) for c in contributions if c.nodes]
        work = dict(pair for c in contributions for pair in c.work)
        tiles = sorted(node for nodes, _ in parts for node in nodes)
        ends = [low for low, _ in tiles] + [self.facts.logical_ranks]
        if ends != [0] + [high for _, high in tiles] or sorted(work) != list(range(self.facts.logical_ranks)):
            raise InternalError(f"step {self.step}, shard {shard}: contributions {tiles} don't tile the logical ranks")
        squared_norm, digest = self.arithmetic.reduce(shard, self.step, parts)
        ranks = [work[rank] for rank in range(self.facts.logical_ranks)]
        header = Header(
            shard,
            squared_norm,
            digest,
            loss=exact_sum(loss for w in ranks for loss in w.losses),
            tokens=sum(w.tokens for w in ranks),
            data_digest=fold_digests(w.data_digest for w in ranks),
        )
        self.reduced[shard] = header
        self.holdings[shard].pending[self.step] = Pending(digest)
        payload = self.arithmetic.gradient(shard, self.step)
        for backup in where.backups:
            self.send(backup, FrameKind.GRADIENT, shard, pack_header(header), payload)
        if self.worker in self.voters(where):
            self.broadcast_record(header)

    def on_gradient(self, frame: Frame) -> None:
        """The backup stores the reduced shard and then vouches for it, also while it is being filled (rule 4)."""
        shard, header = frame.shard, unpack_header(frame.meta)
        holding = self.holdings.get(shard)
        if holding is None or self.worker not in self.installed().shards[shard].backups:
            raise InternalError(f"worker {self.worker} got a gradient of shard {shard} and is no backup of it")
        self.catch_up(shard, holding)
        digest = self.arithmetic.store_gradient(shard, self.step, frame.payload)
        if digest != header.digest:
            raise InternalError(
                f"step {self.step}, shard {shard}: gradient arrived with another digest than its owner's"
            )
        holding.pending[self.step] = Pending(digest)
        self.broadcast_record(header)

    def broadcast_record(self, header: Header) -> None:
        complete = self.holdings[header.shard].complete
        meta = [pack_header(header), complete]
        for worker in self.installed().ids():
            if worker == self.worker:
                self.record(worker, header, complete)
            else:
                self.send(worker, FrameKind.RECORD, header.shard, meta)

    def record(self, voter: WorkerId, header: Header, complete: bool) -> None:
        known = self.records.setdefault(header.shard, {})
        if any(h != header for h in known.values()):
            raise InternalError(
                f"step {self.step}, shard {header.shard}: two records differ, from {sorted(known)} and {voter}"
            )
        known[voter] = header
        if complete and voter != self.installed().shards[header.shard].owner:
            self.filled_votes[header.shard] = self.filled_votes.get(header.shard, 0) + 1

    # --- certify, apply, publish, install (rules 5 to 8) ---------------------------------------------------

    def certify(self, certificate: Certificate) -> None:
        self.certificate = certificate
        if not certificate.skipped and not certificate.void:
            self.history = remembered(self.history, certificate.headers, self.facts.guard)
        for node in sorted(self.nodes):
            self.forget_node(node)
        for holding in self.holdings.values():
            if (pending := holding.pending.get(self.step)) is not None:
                pending.certificate = certificate
        for shard, where in enumerate(self.installed().shards):
            if where.owner == self.worker:
                if shard not in self.reduced:
                    raise InternalError(
                        f"step {self.step} was certified before worker {self.worker} reduced shard {shard}"
                    )
                self.publish(shard)
        self.drop_retired()

    def publish(self, shard: int) -> None:
        certificate = self.certificate
        assert certificate is not None
        for owed in [o for o in self.snapshots_owed if o[0] == shard]:
            self.send_snapshot(owed)
        digest = self.apply_next(shard, self.holdings[shard])
        self.send_parameters(shard, digest, self.installed().ids())

    def send_parameters(self, shard: int, digest: bytes, to: tuple[WorkerId, ...]) -> None:
        """Stage one's own new parameters and send them, with the certificate (rule 6)."""
        assert self.certificate is not None
        self.arithmetic.stage(shard, None)
        self.staged[shard] = digest
        compared = self.arithmetic.staged_digest(shard) if self.facts.guard.compares(self.step + 1) else b""
        self.note_published(shard, digest, compared)
        meta = [digest, pack_certificate(self.certificate), compared]
        payload = self.arithmetic.parameters(shard)
        for worker in to:
            if worker != self.worker:
                self.send(worker, FrameKind.PARAMETERS, shard, meta, payload)

    def on_parameters(self, frame: Frame) -> None:
        digest, packed, compared = frame.meta
        certificate = unpack_certificate(packed)
        if self.certificate is None:
            self.certify(certificate)
        elif self.certificate != certificate:
            raise InternalError(f"step {self.step}, shard {frame.shard}: published under another certificate")
        if frame.shard not in self.staged:
            self.arithmetic.stage(frame.shard, frame.payload)
            self.staged[frame.shard] = digest
            self.note_published(frame.shard, digest, compared)

    def note_published(self, shard: int, state: bytes, parameters: bytes) -> None:
        """What the owner says of version step + 1; `parameters` is empty where nothing is compared."""
        self.owners_say[shard] = (self.step + 1, state)
        if parameters:
            self.published[shard] = (self.step + 1, parameters)

    def apply_next(self, shard: int, holding: Holding) -> bytes:
        """Apply the oldest pending gradient; only the one whose digest is the certificate's (rule 7)."""
        step = holding.version
        pending = holding.pending.get(step)
        if not holding.complete or pending is None or pending.certificate is None:
            raise InternalError(
                f"worker {self.worker}: shard {shard} can't be brought from version {step} to {step + 1}"
            )
        if pending.digest != pending.certificate.headers[shard].digest:
            raise InternalError(f"step {step}, shard {shard}: the gradient held is not the certified one")
        comparing.check_state(self, shard, holding)
        holding.digest = self.arithmetic.apply(shard, step, self.judge(pending.certificate))
        del holding.pending[step]
        holding.version += 1
        comparing.check_replica(self, shard, holding)
        return holding.digest

    def _can_catch_up(self, holding: Holding) -> bool:
        pending = holding.pending.get(holding.version)
        return holding.complete and pending is not None and pending.certificate is not None

    def catch_up(self, shard: int, holding: Holding) -> None:
        while self._can_catch_up(holding):
            self.apply_next(shard, holding)

    def drop_retired(self) -> None:
        """The first certificate under the plan proves that a retired copy's successors live (rule 16)."""
        if self.step < self.installed().version:
            return
        for shard, where in enumerate(self.installed().shards):
            if shard in self.holdings and self.worker != where.owner and self.worker not in where.backups:
                del self.holdings[shard]
                self.arithmetic.drop(shard)

    # --- filling a backup (rule 15) -------------------------------------------------------------------------

    def send_snapshot(self, owed: tuple[int, WorkerId]) -> None:
        self.snapshots_owed.remove(owed)
        shard, backup = owed
        version = self.holdings[shard].version
        meta, payload = self.arithmetic.snapshot(shard)
        self.send(backup, FrameKind.SNAPSHOT, shard, [version, meta], payload)

    def on_snapshot(self, frame: Frame) -> None:
        version, meta = frame.meta
        holding = self.holdings.get(frame.shard)
        if holding is None or holding.complete or holding.version != version:
            return
        self.arithmetic.restore(frame.shard, meta, frame.payload)
        holding.complete = True
        self.act(Filled(self.installed().ballot, frame.shard))

    # --- what is told of a step ---------------------------------------------------------------------------------------

    def save_if_due(self, plan: Plan) -> None:
        due = self.step >= plan.stop_at or (self.facts.save_every > 0 and self.step % self.facts.save_every == 0)
        own = tuple(s for s, where in enumerate(plan.shards) if where.owner == self.worker)
        if due and own and plan.checkpoint != self.step:
            self.act(Save(self.step, tuple((s, self.arithmetic.snapshot(s)) for s in own)))
