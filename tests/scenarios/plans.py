"""A plan in words: what it changes against the plan before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from runtime.protocol import Ballot, Plan, ShardPlan, WorkerId


def name(ballot: Ballot) -> str:
    return f"({ballot.incarnation},{ballot.number})"


def listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(numbers)))


def seconds_in_words(seconds: float) -> str:
    return f"{max(1, round(seconds))} s"


def in_words(plan: Plan, before: Plan | None, facts: Mapping[str, Any]) -> Iterator[str]:
    first = before is None or plan.checkpoint is not None
    yield f"plans {name(plan.ballot)} ({facts['reason']}): {going_on(plan)}"
    if coming := [m.worker for m in plan.members if m.joining and not first]:
        yield f"joining: {listed(coming)}"
    if behind := [m.worker for m in plan.members if m.behind and not m.joining and plan.checkpoint is None]:
        yield f"behind, gets version {plan.version}: {listed(behind)}"
    yield from shards(plan, None if first else before)
    yield from ranks(plan, None if first else before)


def going_on(plan: Plan) -> str:
    where = f"go on at step {plan.version}"
    if plan.checkpoint is not None:
        where = "begin at step 0" if plan.version == 0 else f"go back to checkpoint {plan.version}"
    if plan.version >= plan.stop_at:
        where = f"stop at step {plan.version}"
    return f"{where} with {listed(plan.ids())}"


def shards(plan: Plan, before: Plan | None) -> Iterator[str]:
    by_text: dict[str, list[int]] = defaultdict(list)
    for shard, where in enumerate(plan.shards):
        was = before.shards[shard] if before is not None else None
        if where != was:
            by_text[holders(where, was, plan.ids())].append(shard)
    for text, which in by_text.items():
        yield f"shard{'s' if len(which) > 1 else ''} {listed(which)}: {text}"


def holders(where: ShardPlan, was: ShardPlan | None, members: tuple[WorkerId, ...]) -> str:
    filled = [f"{b} (to be filled)" if b in where.fill else str(b) for b in where.backups]
    backups = f"backup {' and '.join(filled)}" if filled else "no backup"
    if was is None:
        return f"owner {where.owner}, {backups}"
    owner = f"owner {where.owner}" if where.owner == was.owner else f"owner {was.owner} -> {where.owner}"
    named = {where.owner, *where.backups}
    gone = [b for b in (was.owner, *was.backups) if b not in named and b in members]
    return f"{owner}, {backups}" + (f"; {listed(gone)} retires" if gone else "")


def ranks(plan: Plan, before: Plan | None) -> Iterator[str]:
    if plan.version >= plan.stop_at:
        return
    if before is None:
        yield f"ranks: {table(plan.ranks_now)}"
        return
    now = before.ranks_now if plan.version == before.version else before.ranks_next
    if plan.ranks_now != now:
        yield f"ranks of step {plan.version}: {moved(now, plan.ranks_now)}"
    if plan.ranks_next != before.ranks_next:
        yield f"ranks from step {plan.version + 1} on: {table(plan.ranks_next)}"


def moved(was: tuple[WorkerId, ...], now: tuple[WorkerId, ...]) -> str:
    changes: dict[tuple[WorkerId, WorkerId], list[int]] = defaultdict(list)
    for rank, (old, new) in enumerate(zip(was, now, strict=True)):
        if old != new:
            changes[old, new].append(rank)
    return ", ".join(f"{listed(which)}: {old} -> {new}" for (old, new), which in sorted(changes.items()))


def table(ranks: tuple[WorkerId, ...]) -> str:
    by_worker: dict[WorkerId, list[int]] = defaultdict(list)
    for rank, worker in enumerate(ranks):
        by_worker[worker].append(rank)
    return ", ".join(f"{listed(which)} at {worker}" for worker, which in sorted(by_worker.items()))
