"""A change of members, as one worker lives through it: ask, report, plan (rules 9 to 16).

One procedure for death, hang, broken link, join, move, leave, rebalancing and a new controller. Functions over the
state of a ``StepTransaction``; the other half of the rules is runtime/step.py.

    ask(b)   above the promise: promise b, freeze, report. Frozen, a worker handles no frame, certifies, applies,
             installs and sends nothing; its own micro-batches go on.
    plan(b)  accepted only when b is the promise. Who is at B sends again under the new generation; who is behind gets
             version B from the owners; a joiner forgets all it holds first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloader.errors import InternalError
from runtime.actions import SendReport
from runtime.copies import Holding
from runtime.protocol import Ballot, HoldingReport, Plan, Report
from runtime.trial import attempts_at

if TYPE_CHECKING:
    from runtime.step import StepTransaction


def on_ask(tx: StepTransaction, ballot: Ballot) -> None:
    if ballot < tx.promise or (tx.plan is not None and ballot <= tx.plan.ballot):
        return
    tx.promise = ballot
    tx.act(SendReport(report(tx)))


def report(tx: StepTransaction) -> Report:
    return Report(
        ballot=tx.promise,
        worker=tx.worker,
        plan=tx.plan,
        step=tx.step,
        bare=tx.bare,
        certificate=tx.certificate,
        previous=tx.previous,
        holdings=tuple(
            HoldingReport(shard, h.complete, h.version, tuple(sorted(h.pending)))
            for shard, h in sorted(tx.holdings.items())
        ),
        computed=tuple(sorted(tx.nodes)),
        doubted=tx.doubted,
        doubt=tx.doubt,
        digests=tuple((rank, work.gradient_digest) for rank, work in sorted(tx.work.items())),
        history=tx.history,
    )


def accepts(tx: StepTransaction, plan: Plan) -> bool:
    """Only the plan of the ballot that was promised, and only once (rule 10)."""
    newer = tx.plan is None or plan.ballot > tx.plan.ballot
    return newer and plan.ballot == tx.promise and plan.member(tx.worker) is not None


def install(tx: StepTransaction, plan: Plan) -> None:
    me = plan.member(tx.worker)
    assert me is not None
    if plan.checkpoint is not None:
        forget_everything(tx)
        tx.plan, tx.history = plan, plan.history
        start_from_checkpoint(tx, plan)
        return
    if me.joining:
        forget_everything(tx)
        tx.step, tx.bare = plan.version - 1, True
    elif tx.step + (tx.certificate is not None) > plan.version:
        raise InternalError(f"worker {tx.worker} decided step {tx.step}; the plan goes on at {plan.version}")
    if attempts_at(tx.plan, plan.version) != attempts_at(plan, plan.version):
        forget_computed(tx)  # it is computed again to see whether it gives the same
    tx.plan, tx.history = plan, plan.history
    take_holdings(tx, plan)
    if me.behind or me.joining:
        fall_in(tx, plan)
    else:
        go_on(tx, plan)
    owe_snapshots(tx, plan)
    if me.behind or me.joining:
        tx.advance()
    else:
        tx.enter(plan.version)


def forget_everything(tx: StepTransaction) -> None:
    for shard in list(tx.holdings):
        tx.arithmetic.drop(shard)
    tx.holdings.clear()
    forget_computed(tx)
    tx.certificate, tx.previous = None, None
    tx.snapshots_owed.clear()
    tx.clear_step()


def forget_computed(tx: StepTransaction) -> None:
    for node in sorted(tx.nodes):
        tx.forget_node(node)


def start_from_checkpoint(tx: StepTransaction, plan: Plan) -> None:
    """Every named copy is complete at once: it comes from the store (rule 17)."""
    mine = tuple(s for s, where in enumerate(plan.shards) if tx.worker == where.owner or tx.worker in where.backups)
    tx.arithmetic.load(plan.version, mine)
    tx.owners_say.clear()
    tx.published = {s: (plan.version, tx.arithmetic.staged_digest(s)) for s in range(tx.facts.shards)}
    tx.holdings = {shard: Holding(complete=True, version=plan.version) for shard in mine}
    tx.previous = plan.certificate
    tx.enter(plan.version)


def take_holdings(tx: StepTransaction, plan: Plan) -> None:
    """Bring what is held into the shape the plan gives it; owners reach version B (rules 14 to 16)."""
    tx.snapshots_owed.clear()
    for shard, where in enumerate(plan.shards):
        holding = tx.holdings.get(shard)
        if holding is not None:
            settle_pending(tx, plan, shard, holding)
        if where.owner == tx.worker:
            if holding is None or not holding.reaches(plan.version):
                raise InternalError(f"worker {tx.worker} owns shard {shard} and can't reach version {plan.version}")
            tx.catch_up(shard, holding)
        elif tx.worker in where.fill:
            if holding is not None:
                tx.arithmetic.drop(shard)
            tx.holdings[shard] = Holding(complete=False, version=plan.version)
        elif holding is not None and not holding.reaches(plan.version):
            if tx.worker in where.backups:
                raise InternalError(f"worker {tx.worker} backs shard {shard} and can't reach version {plan.version}")
            del tx.holdings[shard]
            tx.arithmetic.drop(shard)


def settle_pending(tx: StepTransaction, plan: Plan, shard: int, holding: Holding) -> None:
    """Uncertified gradients are forgotten; the one of B-1 gets its certificate from the plan (rule 14)."""
    for step in [k for k in holding.pending if k >= plan.version]:
        del holding.pending[step]
        tx.arithmetic.forget_gradient(shard, step)
    last = holding.pending.get(plan.version - 1)
    if last is not None:
        last.certificate = plan.certificate


def fall_in(tx: StepTransaction, plan: Plan) -> None:
    """Behind: B-1 is decided; what is missing of version B comes from the owners."""
    if tx.step != plan.version - 1:
        raise InternalError(f"worker {tx.worker} in step {tx.step} can't be brought to version {plan.version}")
    if tx.certificate is not None and tx.certificate != plan.certificate:
        raise InternalError(f"worker {tx.worker} certified step {tx.step} otherwise than the plan says")
    staged = tx.staged if tx.certificate is not None else {}
    tx.clear_step()
    tx.staged = staged
    forget_computed(tx)
    tx.certificate, tx.held = plan.certificate, False
    publish_own(tx, plan)


def go_on(tx: StepTransaction, plan: Plan) -> None:
    """At B: everything computed is kept; the rest of step B is done again under the new generation."""
    if tx.step != plan.version or tx.certificate is not None:
        raise InternalError(f"worker {tx.worker} in step {tx.step} is told to go on at {plan.version}")
    if tx.previous != plan.certificate:
        raise InternalError(f"worker {tx.worker} entered step {tx.step} under another certificate than the plan's")
    tx.clear_step()
    tx.step, tx.certificate = plan.version - 1, plan.certificate  # publish as of B-1, then enter B again
    if any(m.behind or m.joining for m in plan.members):
        publish_own(tx, plan)


def publish_own(tx: StepTransaction, plan: Plan) -> None:
    behind = tuple(m.worker for m in plan.members if m.behind or m.joining)
    for shard, where in enumerate(plan.shards):
        if where.owner == tx.worker:
            tx.send_parameters(shard, tx.arithmetic.digest(shard), behind)


def owe_snapshots(tx: StepTransaction, plan: Plan) -> None:
    tx.snapshots_owed = [
        (shard, backup) for shard, where in enumerate(plan.shards) if where.owner == tx.worker for backup in where.fill
    ]
