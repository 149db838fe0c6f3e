"""Planted bugs: the production functions with one rule of the protocol left out. The simulator must catch each.

Numbers are those of the protocol's rules; names in capitals are the mutations of the explicit-state model that show
the same. A bug is planted either by another function in its place, or by changing the text of the real one, which
fails loudly if that text is no longer there.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import elastic.controller
import elastic.plan
from elastic import messages as m
from elastic.balance import spread_by_speed
from elastic.ballots import Asking, Ballots
from elastic.controller import Controller
from elastic.plan import Order
from runtime import change, comparing, trial
from runtime.copies import Pending
from runtime.protocol import (
    Attempt,
    Ballot,
    Certificate,
    Frame,
    FrameKind,
    Plan,
    Report,
    ShardPlan,
    WorkerId,
    unpack_header,
)
from runtime.step import StepTransaction
from tests.sim.values import HashArithmetic, digest_of, squared_norm_of


class Patches:
    """Attributes that were replaced, and what they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, where: Any, name: str, value: Any) -> None:
        self._before.append((where, name, inspect.getattr_static(where, name)))
        setattr(where, name, value)

    def text(self, where: Any, name: str, old: str, new: str) -> None:
        """The function, with part of its text replaced."""
        function = inspect.getattr_static(where, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{name} no longer has {old!r}"
        namespace: dict[str, Any] = {}
        exec(compile(source.replace(old, new), f"<planted {name}>", "exec"), function.__globals__, namespace)
        self.put(where, name, namespace[name])

    def undo(self) -> None:
        while self._before:
            where, name, value = self._before.pop()
            setattr(where, name, value)


# What goes wrong: the classes of bugs that a fault matrix is about.
EVICTED = "the word of who is no member (any more) counts"
PROMISE = "a promise is not kept"
FENCE = "work is given away while a suspect may still certify"
CONTROLLERS = "two controllers plan"
VOTE = "a vote for a gradient that is not stored twice"
HALF = "a part goes on without the rest"
EARLY = "acted on before it is decided"
UNDONE = "a decided step is undone"
COPIES = "a copy is trusted too early, or dropped too early"
STUCK = "what was lost is not sent again"
BITS = "other bits, whoever dies"
CLOCKS = "wall clocks decide"
BELIEVED = "what one worker computes or holds is believed"
CLASSES = (EVICTED, PROMISE, FENCE, CONTROLLERS, VOTE, HALF, EARLY, UNDONE, COPIES, STUCK, BITS, CLOCKS, BELIEVED)


@dataclass(frozen=True)
class Bug:
    rule: str
    kind: str  # one of CLASSES
    plant: Callable[[Patches], None]

    @property
    def what(self) -> str:
        return inspect.cleandoc(self.plant.__doc__ or "")


BUGS: dict[str, Bug] = {}


def bug(rule: str, kind: str) -> Callable[[Callable[[Patches], None]], Callable[[Patches], None]]:
    def register(plant: Callable[[Patches], None]) -> Callable[[Patches], None]:
        BUGS[plant.__name__.replace("_", "-")] = Bug(rule, kind, plant)
        return plant

    return register


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """While the block runs, production has this bug."""
    patches = Patches()
    if name is not None:
        BUGS[name].plant(patches)
    try:
        yield
    finally:
        patches.undo()


# --- the step ---------------------------------------------------------------------------------------------------


@bug("2 (OLDFRAMES)", EVICTED)
def old_frames_accepted(patches: Patches) -> None:
    """Frames of older generations are handled like those of this one."""

    def admit(tx: StepTransaction, frame: Frame) -> int:
        if tx.frozen or tx.plan is None or frame.ballot > tx.plan.ballot:
            return 1
        if frame.kind is FrameKind.SNAPSHOT:
            return 0
        return (frame.step > tx.step) - (frame.step < tx.step)

    patches.put(StepTransaction, "admit", admit)


@bug("2 (DROPFUTURE)", STUCK)
def future_frames_dropped(patches: Patches) -> None:
    """Frames of a generation that is not installed yet are dropped."""
    real = StepTransaction.admit

    def admit(tx: StepTransaction, frame: Frame) -> int:
        if tx.plan is None or frame.ballot > tx.plan.ballot:
            return -1
        return real(tx, frame)

    patches.put(StepTransaction, "admit", admit)


@bug("3", HALF)
def empty_contributions_not_awaited(patches: Patches) -> None:
    """An owner waits only for those who have logical ranks."""

    def has_all_contributions(tx: StepTransaction, shard: int) -> bool:
        plan = tx.installed()
        ranks = plan.ranks_now if tx.step == plan.version else plan.ranks_next
        return tx.contributions.get(shard, {}).keys() >= set(ranks)

    patches.put(StepTransaction, "has_all_contributions", has_all_contributions)


@bug("4 (OWNERREC)", VOTE)
def owner_vouches(patches: Patches) -> None:
    """The owner's record, sent when it has reduced, stands for the backup's."""

    def voters(tx: StepTransaction, where: ShardPlan) -> tuple[WorkerId, ...]:
        return (where.owner,)

    patches.put(StepTransaction, "voters", voters)


@bug("4 (SINGLE)", VOTE)
def filling_backup_has_no_vote(patches: Patches) -> None:
    """While a plan names a backup as one to be filled, the owner's record stands for its."""

    def voters(tx: StepTransaction, where: ShardPlan) -> tuple[WorkerId, ...]:
        return tuple(b for b in where.backups if b not in where.fill) or (where.owner,)

    patches.put(StepTransaction, "voters", voters)


@bug("4", VOTE)
def one_backup_is_enough(patches: Patches) -> None:
    """Of several backups the first record does."""

    def has_all_records(tx: StepTransaction) -> bool:
        return all(tx.records.get(s) for s in range(tx.facts.shards))

    patches.put(StepTransaction, "has_all_records", has_all_records)


@bug("4", VOTE)
def backup_votes_before_storing(patches: Patches) -> None:
    """A backup sends its record at once, and stores the gradient when it has time."""
    real_gradient, real_settle = StepTransaction.on_gradient, StepTransaction.settle

    def on_gradient(tx: StepTransaction, frame: Frame) -> None:
        tx.__dict__.setdefault("unstored", []).append((tx.step, frame))
        tx.broadcast_record(unpack_header(frame.meta))

    def settle(tx: StepTransaction) -> list[Any]:
        for step, frame in tx.__dict__.pop("unstored", []):
            if step == tx.step and tx.certificate is None:
                with_records, tx.records = tx.records, {}
                real_gradient(tx, frame)
                tx.records = with_records
        return real_settle(tx)

    patches.put(StepTransaction, "on_gradient", on_gradient)
    patches.put(StepTransaction, "settle", settle)
    patches.put(StepTransaction, "unsettled", property(lambda tx: not tx.frozen))


@bug("4 (NOFILLQ)", VOTE)
def gradients_before_the_snapshot_dropped(patches: Patches) -> None:
    """A backup that is being filled votes, but doesn't keep what arrives before its snapshot."""
    real = StepTransaction.on_gradient

    def on_gradient(tx: StepTransaction, frame: Frame) -> None:
        holding = tx.holdings.get(frame.shard)
        if holding is not None and not holding.complete:
            tx.broadcast_record(unpack_header(frame.meta))
        else:
            real(tx, frame)

    patches.put(StepTransaction, "on_gradient", on_gradient)


@bug("6 (INPLACE)", EARLY)
def parameters_installed_uncertified(patches: Patches) -> None:
    """Published parameters are put in place whether or not the receiver holds the certificate."""
    real = StepTransaction.on_parameters

    def on_parameters(tx: StepTransaction, frame: Frame) -> None:
        if tx.certificate is not None:
            real(tx, frame)
        elif frame.shard not in tx.staged:
            tx.arithmetic.stage(frame.shard, frame.payload)
            tx.staged[frame.shard] = frame.meta[0]

    patches.put(StepTransaction, "on_parameters", on_parameters)


@bug("7 (EAGERB)", EARLY)
def backup_applies_uncertified(patches: Patches) -> None:
    """A backup applies a gradient when it arrives; let it even guess the verdict right."""
    real = StepTransaction.on_gradient

    def on_gradient(tx: StepTransaction, frame: Frame) -> None:
        real(tx, frame)
        holding, header = tx.holdings[frame.shard], unpack_header(frame.meta)
        if tx.certificate is None and holding.complete and holding.version == tx.step:
            reduced = tx.sim.world.reference.version(tx.step + 1).reduced  # type: ignore[attr-defined]
            others = [
                replace(header, shard=s, squared_norm=squared_norm_of(r), digest=digest_of(r))
                for s, r in enumerate(reduced)
            ]
            others[frame.shard] = header
            holding.pending[tx.step] = Pending(header.digest, Certificate(tx.step, tuple(others)))
            tx.catch_up(frame.shard, holding)

    patches.put(StepTransaction, "on_gradient", on_gradient)


# --- numbers, asking, freezing ----------------------------------------------------------------------------------


@bug("9 (DUPNUM)", CONTROLLERS)
def numbers_repeated(patches: Patches) -> None:
    """Numbers go on from the last plan's, and no incarnation tells the controllers apart."""
    real = Ballots.adopt

    def open_(ballots: Ballots, asked: set[WorkerId], reason: str, now: float) -> Asking:
        tried = ballots.__dict__["tried"] = ballots.__dict__.get("tried", 0) + 1
        ballots.asking = Asking(Ballot(1, ballots.number + tried), now, now, asked, reason)
        return ballots.asking

    def adopt(ballots: Ballots, plan: Plan, now: float) -> None:
        ballots.number = plan.ballot.number
        ballots.__dict__["tried"] = 0
        real(ballots, plan, now)

    patches.put(Ballots, "open", open_)
    patches.put(Ballots, "adopt", adopt)


@bug("9 (LAZYCTL)", CONTROLLERS)
def new_controller_does_not_ask(patches: Patches) -> None:
    """A new incarnation waits for a cause."""
    real = Controller.__init__

    def init(controller: Controller, *args: Any, **kwargs: Any) -> None:
        real(controller, *args, **kwargs)
        controller.cause = ""

    patches.put(Controller, "__init__", init)


@bug("10 (NOFREEZE)", PROMISE)
def nobody_freezes(patches: Patches) -> None:
    """A report is no promise: the worker goes on in its generation until the plan arrives."""

    def frozen(tx: StepTransaction) -> bool:
        return tx.plan is None

    def admit(tx: StepTransaction, frame: Frame) -> int:
        if tx.plan is None or frame.ballot > tx.plan.ballot:
            return 1
        if frame.ballot < tx.plan.ballot:
            return -1
        if frame.kind is FrameKind.SNAPSHOT:
            return 0
        return (frame.step > tx.step) - (frame.step < tx.step)

    patches.put(StepTransaction, "frozen", property(frozen))
    patches.put(StepTransaction, "admit", admit)


@bug("10 (NOPROMISE)", PROMISE)
def plan_below_the_promise_accepted(patches: Patches) -> None:
    """A plan is refused only if it is no newer than the installed one."""

    def accepts(tx: StepTransaction, plan: Plan) -> bool:
        if plan.member(tx.worker) is None or (tx.plan is not None and plan.ballot <= tx.plan.ballot):
            return False
        tx.promise = plan.ballot
        return True

    patches.put(change, "accepts", accepts)


@bug("11 (EARLYPLAN)", FENCE)
def planned_before_all_reports(patches: Patches) -> None:
    """Half of the reports are enough; who hasn't reported is planned with as if it held nothing."""
    real = Controller.conclude

    def conclude(controller: Controller, asking: Asking) -> None:
        missing = asking.missing(controller.roster.lives)
        if 2 * len(asking.reports) > len(asking.asked):
            for worker in missing:
                asking.reports[worker] = Report(asking.ballot, worker, None, -1, False, None, None, (), ())
        real(controller, asking)

    patches.put(Controller, "conclude", conclude)


@bug("A14", CLOCKS)
def wall_clocks_compared(patches: Patches) -> None:
    """News that are a minute old, by the wall clock of who brings them, tell of a host that hangs."""
    real = Controller.handle

    def handle(controller: Controller, event: m.Event, now: float) -> list[m.Action]:
        news = event.event if isinstance(event, m.Told) else event
        old = isinstance(news, m.LinkLost) and abs(controller.wall() - news.time) > 60.0
        if old and controller.roster.lives(news.worker):  # before its time is put right
            controller.evict(news.worker, "it hangs")
        return real(controller, event, now)

    patches.put(Controller, "handle", handle)


# --- planning ---------------------------------------------------------------------------------------------------


@bug("12 (NOLINEAGE)", EVICTED)
def anyone_counts(patches: Patches) -> None:
    """A report of who is no member of the newest plan counts like any other."""

    def who_counts(newest: Plan | None, reports: dict[WorkerId, Report]) -> set[WorkerId]:
        return {worker for worker, report in reports.items() if report.plan is not None}

    patches.put(elastic.plan, "who_counts", who_counts)


@bug("12 (NOFRESHRULE)", EVICTED)
def joiner_counts_before_it_has_joined(patches: Patches) -> None:
    """Whoever the newest plan lists counts, also who joins by it and hasn't installed it."""
    patches.text(elastic.plan, "who_counts", "(newest.checkpoint is None and not listed.joining)", "True")


@bug("13 (NOCERTREP)", UNDONE)
def certified_step_not_counted(patches: Patches) -> None:
    """The plan goes on at the largest step, whether or not that is certified."""
    patches.put(Report, "reached", property(lambda report: report.step))


@bug("13 (MINVER)", UNDONE)
def lowest_version_taken(patches: Patches) -> None:
    """The plan goes on where the slowest is."""
    patches.text(elastic.controller, "make_plan", "version = max(", "version = min(")


@bug("14 (KEEPRECS)", UNDONE)
def records_kept_over_a_change(patches: Patches) -> None:
    """Records of the last generation still count in the next."""
    real = change.install

    def install(tx: StepTransaction, plan: Plan) -> None:
        step, certified, records = tx.step, tx.certificate, tx.records
        real(tx, plan)
        if certified is None and tx.step == step and tx.certificate is None and plan.checkpoint is None:
            for shard, known in records.items():
                tx.records.setdefault(shard, {}).update(known)
            if tx.step < plan.stop_at:
                tx.advance()

    patches.put(change, "install", install)


@bug("14 (NOCERTINPLAN)", UNDONE)
def no_certificate_in_the_plan(patches: Patches) -> None:
    """The plan says where to go on, but not by which certificate."""

    def certificate_before(version: int, counting: Any) -> Certificate:
        return Certificate(version - 1, ())

    def same(ours: Certificate | None, theirs: Certificate) -> bool:
        return theirs.void

    patches.put(elastic.plan, "certificate_before", certificate_before)
    patches.text(change, "go_on", "if tx.previous != plan.certificate:", "if False:")
    patches.text(change, "fall_in", "tx.certificate != plan.certificate:", "False:")


@bug("14 (NORESEND)", STUCK)
def nothing_sent_again(patches: Patches) -> None:
    """Who has contributed to a step doesn't contribute again under the next plan."""
    real_install, real_contribute = change.install, StepTransaction.contribute

    def install(tx: StepTransaction, plan: Plan) -> None:
        tx.done = tx.step if tx.contributed and tx.step == plan.version else None  # type: ignore[attr-defined]
        real_install(tx, plan)

    def contribute(tx: StepTransaction) -> None:
        if getattr(tx, "done", None) != tx.step:
            real_contribute(tx)

    patches.put(change, "install", install)
    patches.put(StepTransaction, "contribute", contribute)


@bug("15 (ROLEONLY)", COPIES)
def unfilled_backup_taken_for_complete(patches: Patches) -> None:
    """A copy is taken for complete by its role, filled or not."""
    patches.text(elastic.plan, "reaches", "holding.complete\n        and holding.version", "holding.version")


@bug("15 (MASKONLY)", COPIES)
def versions_not_looked_at(patches: Patches) -> None:
    """A copy is taken for complete once its snapshot came, whatever gradients it lacks."""
    patches.put(elastic.plan, "reaches", lambda holding, version: holding.complete)


@bug("16 (RETIRE)", COPIES)
def copy_retired_before_the_next_is_filled(patches: Patches) -> None:
    """A move drops the old backup when it names the new one."""
    real = elastic.plan.place_shards

    def place_shards(*args: Any) -> tuple[ShardPlan, ...]:
        return tuple(replace(s, backups=s.fill) if len(s.backups) > 1 and s.fill else s for s in real(*args))

    patches.put(elastic.plan, "place_shards", place_shards)


@bug("16 (RETIRENOW)", COPIES)
def retired_copy_dropped_at_once(patches: Patches) -> None:
    """A retired copy is dropped when the plan is installed, not at the first certificate under it."""
    real = change.take_holdings

    def take_holdings(tx: StepTransaction, plan: Plan) -> None:
        real(tx, plan)
        for shard, where in enumerate(plan.shards):
            if shard in tx.holdings and tx.worker != where.owner and tx.worker not in where.backups:
                del tx.holdings[shard]
                tx.arithmetic.drop(shard)

    patches.put(change, "take_holdings", take_holdings)


@bug("14 (REDEAL)", FENCE)
def step_under_way_dealt_anew(patches: Patches) -> None:
    """Where nobody came or went, the new map holds for the step under way as well, whatever is computed of it."""
    real = elastic.plan.assign_now

    def assign_now(order: Order, newest: Plan, version: int, counting: Mapping[WorkerId, Report], *more: Any) -> Any:
        if set(newest.ids()) == set(order.nodes) == set(counting):
            return spread_by_speed(order.logical_ranks, sorted(counting), order.slowness)
        return real(order, newest, version, counting, *more)

    patches.put(elastic.plan, "assign_now", assign_now)


# --- bad steps ----------------------------------------------------------------------------------------------------


@bug("bad steps", BELIEVED)
def bad_step_skipped_at_once(patches: Patches) -> None:
    """What is bad is taken for the data's doing, without a second attempt."""

    def rule(now: Attempt, before: Sequence[Attempt], alone: bool) -> trial.Ruling:
        return trial.Ruling(now.bad, True)

    patches.put(trial, "rule", rule)


@bug("bad steps", BELIEVED)
def a_good_attempt_is_enough(patches: Patches) -> None:
    """A step that comes out well at last is decided, whether or not anybody else gets the same."""
    real = trial.rule

    def rule(now: Attempt, before: Sequence[Attempt], alone: bool) -> trial.Ruling:
        return trial.Ruling("", True) if not now.bad else real(now, before, alone)

    patches.put(trial, "rule", rule)


@bug("bad steps", BELIEVED)
def attempts_by_the_same_workers(patches: Patches) -> None:
    """A step is computed again by those who computed it, and their word is enough."""

    def other_workers(attempts: Sequence[Attempt], members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
        return tuple(worker if worker in members else members[0] for worker in attempts[-1].workers)

    patches.put(elastic.plan, "other_workers", other_workers)
    patches.put(trial, "_by_several", lambda now, same: True)


@bug("bad steps", BELIEVED)
def parameters_not_compared(patches: Patches) -> None:
    """A worker contributes gradients whatever parameters they were computed with."""
    patches.put(comparing, "check_parameters", lambda tx, step, work: None)


@bug("bad steps", BELIEVED)
def joiners_learn_no_history(patches: Patches) -> None:
    """Who joins looks for spikes by what it has seen itself."""
    known = "tx.plan, tx.history = plan, plan.history\n    take"
    patches.text(change, "install", known, "tx.plan, tx.history = plan, () if me.joining else plan.history\n    take")


# --- the negative control -----------------------------------------------------------------------------------------


@bug("P1", BITS)
def summed_in_order_of_arrival(patches: Patches) -> None:
    """Gradients are added as they come, not in the order of the tree."""

    def reduce(arithmetic: HashArithmetic, shard: int, step: int, parts: Any) -> tuple[float, bytes]:
        total = 0
        for _, payload in parts:
            for part in payload:
                total = hash((total, part if isinstance(part, int) else part.read()))
        arithmetic._set(shard, step, total)
        return squared_norm_of(total), digest_of(total)

    patches.put(HashArithmetic, "reduce", reduce)
