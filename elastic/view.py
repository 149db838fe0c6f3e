"""What a viewer knows of a run, and how it looks: a live picture on a terminal, plain lines elsewhere.

Rules of this room: `RunView` only folds records, events and status into values; it reads no file and no clock. A
viewer meets files of other versions and half-filled events, so nothing here relies on a field that may be missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

RATE_STEPS = 10  # tokens per second are shown over this many steps
SHOWN_MEMBERS = 16
QUIET_KEYS = frozenset({"time", "kind", "step", "generation"})
STYLES = {
    "fault_injected": "bold red",
    "fault_skipped": "dim",
    "fault_detected": "red",
    "bad_step": "bold red",
    "recovery": "bold green",
    "member_joined": "green",
    "member_left": "yellow",
    "preempted": "bold yellow",
    "departure": "bold green",
    "waiting": "bold yellow",
    "plan": "cyan",
    "rebalance": "cyan",
    "rebalance_gain": "cyan",
    "standby": "dim",
    "cut_off": "yellow",
    "checkpoint": "blue",
    "save_failed": "red",
    "run_ended": "bold",
}


class RunView:
    """The state of one run as its files tell it. Feed it with `record`, `event` and `status`, in any order."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.done_steps = 0
        self.last: Mapping[str, Any] = {}
        self.members: Sequence[Mapping[str, Any]] = ()
        self.leaving: Sequence[Any] = ()  # nodes
        self.state = "starting"
        self.generation: int | None = None
        self.ended: Mapping[str, Any] | None = None
        self.faults = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RATE_STEPS)  # (tokens, seconds)

    def record(self, record: Mapping[str, Any]) -> None:
        """A line of the ledger."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        self.done_steps = max(self.done_steps, step + 1)
        self.last = record
        self.generation = record.get("generation", self.generation)
        self._recent.append((_number(record.get("tokens")), _number(record.get("seconds"))))

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of the events."""
        self.generation = event.get("generation", self.generation)
        if event.get("kind") == "fault_detected":
            self.faults += 1
        self.ended = event if event.get("kind") == "run_ended" else None

    def status(self, status: Mapping[str, Any]) -> None:
        """The contents of status.json."""
        members = status.get("members")
        self.members = [m for m in members if isinstance(m, dict)] if isinstance(members, list) else ()
        leaving = status.get("leaving")
        self.leaving = leaving if isinstance(leaving, list) else ()
        self.state = str(status.get("state", self.state))
        self.generation = status.get("generation", self.generation)

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(s for _, s in self._recent)
        return sum(t for t, _ in self._recent) / seconds if seconds > 0 else 0.0

    def __rich__(self) -> RenderableType:
        """The live picture."""
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        bar = ProgressBar(total=max(1, self.steps), completed=self.done_steps)
        head.add_row(Text(self.name, style="bold"), bar, f"{self.done_steps}/{self.steps} steps")
        numbers = Text("  ").join(Text(part) for part in self._numbers())
        parts: list[RenderableType] = [head, numbers]
        if self.members:
            parts.append(member_table(self.members[:SHOWN_MEMBERS]))
            if len(self.members) > SHOWN_MEMBERS:
                parts.append(Text(f"and {len(self.members) - SHOWN_MEMBERS} more"))
        return Group(*parts)

    def _numbers(self) -> list[str]:
        parts = [str(self.ended.get("state", "ended")) if self.ended is not None else self.state]
        if self.last:
            parts += [
                f"loss {_number(self.last.get('loss')):.4f}",
                f"lr {_number(self.last.get('lr')):.2e}",
                f"{self.tokens_per_second:,.0f} tokens/s",
            ]
        if self.generation is not None:
            parts.append(f"generation {self.generation}")
        parts.append(counted(self.faults, "fault"))
        parts += [f"node {node} leaves" for node in self.leaving]
        return parts


def member_table(members: Sequence[Mapping[str, Any]]) -> Table:
    """One row per worker and standby."""
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for name, right in (
        ("worker", True),
        ("node", True),
        ("role", False),
        ("logical ranks", False),
        ("optimizer", True),
    ):
        table.add_column(name, justify="right" if right else "left")
    for member in members:
        table.add_row(
            str(member.get("id", "?")),
            str(member.get("node", "?")),
            str(member.get("role", "?")),
            _ranks(member.get("logical_ranks")),
            _size(_number(member.get("optimizer_bytes"))),
        )
    return table


# --- plain lines ---------------------------------------------------------------------------------------------


def record_line(record: Mapping[str, Any], steps: int) -> str:
    """A ledger record as one line."""
    seconds = _number(record.get("seconds"))
    rate = f"  {_number(record.get('tokens')) / seconds:,.0f} tokens/s" if seconds > 0 else ""
    verdict = record.get("verdict", "commit")
    return (
        f"{clock(record)}  step {record.get('step', '?'):>{len(str(steps))}} of {steps}"
        f"  loss {_number(record.get('loss')):.4f}  grad {_number(record.get('grad_norm')):.3f}"
        f"  lr {_number(record.get('lr')):.2e}{rate}  {counted(record.get('workers', 0), 'worker')}"
        f"  generation {record.get('generation', '?')}{'' if verdict == 'commit' else f'  ({verdict})'}"
    )


def event_line(event: Mapping[str, Any]) -> str:
    """An event as one line."""
    kind = str(event.get("kind", "event"))
    words = f"{clock(event)}  {kind.replace('_', ' ')}"
    if kind == "recovery":
        return f"{words} in step {event.get('step', '?')}: {_recovery(event)}"
    if kind == "preempted":
        seconds = _number(event.get("seconds"))
        return f"{words} at step {event.get('step', '?')}: node {event.get('node', '?')} goes away in {seconds:.0f} s"
    if kind == "departure":
        return f"{words} at step {event.get('step', '?')}: {_departure(event)}"
    if kind in ("rebalance", "rebalance_gain"):
        told = _rebalance(event) if kind == "rebalance" else _gain(event)
        return f"{words} at step {event.get('step', '?')}: {told}"
    if kind == "run_ended":
        reason, faults = event.get("reason"), event.get("faults")
        how_many = f"; {counted(faults, 'fault')}" if isinstance(faults, int) else ""
        return f"{words}: {event.get('state', '?')}{f': {reason}' if reason else ''}{how_many}"
    details = [f"{_value(event['fault'])}"] if "fault" in event else []
    details += [f"{k} {_value(v)}" for k, v in event.items() if k not in QUIET_KEYS and k != "fault" and _tells(v)]
    return f"{words} at step {event.get('step', '?')}{': ' if details else ''}{', '.join(details)}"


def _tells(value: Any) -> bool:
    """What isn't so isn't worth a word: no rollback, nobody behind, nothing to fill."""
    return value is not None and value is not False and value != []


def _recovery(event: Mapping[str, Any]) -> str:
    parts = [
        f"noticed after {_number(event['detect_ms']):.0f} ms" if event.get("detect_ms") is not None else "",
        f"survivors paused {_number(event['pause_ms']):.0f} ms" if event.get("pause_ms") is not None else "",
        f"{event['recomputed']} micro-batches recomputed" if "recomputed" in event else "",
        f"{_size(_number(event['bytes_moved']))} moved" if "bytes_moved" in event else "",
        f"links +{event['links_opened']} -{event['links_closed']}"
        if "links_opened" in event and "links_closed" in event
        else "",
    ]
    return ", ".join(part for part in parts if part)


def _departure(event: Mapping[str, Any]) -> str:
    within = f"{_number(event.get('seconds')):.1f} of {_number(event.get('deadline_seconds')):.0f} s"
    if not event.get("handed_over"):
        return f"node {event.get('node', '?')} is gone after {within}, before all was handed over"
    left = event.get("checkpoint")
    how = "all handed over" if left is None else f"all left in the checkpoint of version {left}"
    again, moved = event.get("recomputed", 0), _size(_number(event.get("bytes_moved")))
    return f"node {event.get('node', '?')} left after {within}, {how}, {again} micro-batches recomputed, {moved} moved"


def _rebalance(event: Mapping[str, Any]) -> str:
    """logical ranks of worker 0 3 -> 4, worker 3 (3 x slower) 3 -> 1; a step 1.88 -> 0.88 s expected"""
    before, after, slowness = (
        given if isinstance(given := event.get(key), dict) else {} for key in ("from", "to", "slowness")
    )
    moved = [
        f"worker {worker}{f' ({_slower(slowness[worker])})' if worker in slowness else ''}"
        f" {before.get(worker, 0)} -> {after.get(worker, 0)}"
        for worker in sorted(before.keys() | after.keys(), key=lambda number: (len(str(number)), str(number)))
        if before.get(worker, 0) != after.get(worker, 0)
    ]
    now, then = _number(event.get("step_seconds")), _number(event.get("predicted_seconds"))
    ranks = f"logical ranks of {', '.join(moved)}; " if moved else ""
    return f"{ranks}a step {now:.3g} -> {then:.3g} s expected"


def _slower(value: Any) -> str:
    slowness = _number(value)
    return f"{slowness:.2g} x slower" if slowness >= 1.0 or slowness <= 0.0 else f"{1.0 / slowness:.2g} x faster"


def _gain(event: Mapping[str, Any]) -> str:
    before, after = _number(event.get("before_seconds")), _number(event.get("after_seconds"))
    expected = _number(event.get("predicted_seconds"))
    return f"a step {before:.3g} -> {after:.3g} s ({expected:.3g} s expected), {_number(event.get('gain')):.0%} less"


def event_text(event: Mapping[str, Any]) -> Text:
    """The same, coloured by kind."""
    return Text(event_line(event), style=STYLES.get(str(event.get("kind")), ""))


def clock(line: Mapping[str, Any]) -> str:
    """The local time of a record or event."""
    stamp = line.get("time")
    if not isinstance(stamp, (int, float)):
        return "--:--:--"
    try:
        return time.strftime("%H:%M:%S", time.localtime(stamp))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"


def counted(count: int, what: str) -> str:
    """1 fault, 2 faults"""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _number(value: Any) -> float:
    """What may be a number, or a number as text (NaN has no other form in JSON)."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return " ".join(_value(v) for v in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{k}={_value(v)}" for k, v in value.items())
    return str(value)


def _ranks(ranks: Any) -> str:
    """[0, 1, 2, 5] -> 0-2 5"""
    if not isinstance(ranks, list) or not all(isinstance(r, int) for r in ranks):
        return "-"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""
