"""Writes docs/faults.md: each fault of the vocabulary, done to a real job, and what came of it.

    python -m tests.chaos.matrix [--only TEXT] [--write]

One run for each row, through the command line, on a small job of four workers on two nodes; its bits are compared with
those of an undisturbed run. Without --write the table is only printed. Ends with 1 if any row isn't what it should be.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.house import House, Run

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
AT = 6  # the step at which it happens
LONG = {"train__pad_micro_batch_seconds": 0.1}  # long enough for what takes seconds to be found and replaced


@dataclass(frozen=True)
class Row:
    """`also`: faults that bring the target to the point; `like`: the settings of the run that it must equal."""

    what: str
    fault: str
    also: tuple[tuple[int, str], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    like: tuple[str, ...] = ()
    resumed: bool = False


SAVES = {"checkpoint__full_every": 4}
ROWS = (
    Row("worker", "kill-worker=3"),
    *(Row("worker", f"kill-worker=3,during={point}") for point in ("reduce", "vote", "publish")),
    Row("worker, in the change after another's death", "kill-worker=2,during=plan", ((AT, "kill-worker=3"),)),
    Row("worker, source or target of a copy", "kill-worker=4,during=handover", ((AT, "kill-worker=3"),)),
    Row("standby that takes a place", "kill-worker=4,during=join", ((AT, "kill-worker=3"),)),
    Row("worker, writing a checkpoint", "kill-worker=1,during=save", settings=SAVES),
    Row("standby", "kill-worker=4"),
    Row("worker", "freeze-worker=3"),
    Row("worker", "freeze-worker=3,during=vote"),
    Row("worker, for a moment", "freeze-worker=3,seconds=0.1"),
    Row("standby", "freeze-worker=4", settings=LONG),
    Row("agent", "kill-agent=1"),
    Row("agent", "kill-agent=1,during=vote"),
    Row("agent", "freeze-agent=1", settings=LONG),
    Row("node", "kill-node=1"),
    Row("node", "kill-node=1,during=publish"),
    Row("node", "freeze-node=1", settings=LONG),
    Row("node, with notice", "preempt-node=1,seconds=20", settings=LONG),
    Row("controller", "kill-controller", settings=LONG),
    Row("controller", "kill-controller,during=plan", ((AT, "kill-worker=3"),), LONG),
    Row("controller", "kill-controller,during=save", settings=SAVES | LONG),
    Row("controller", "freeze-controller", settings=LONG),
    Row("driver, then `--resume`", "kill-driver", settings=SAVES, resumed=True),
    Row("every holder", "kill-worker=0", tuple((AT, f"kill-worker={w}") for w in (1, 2, 3)), {"cluster__standbys": 0}),
    Row("a pair of workers", "partition-worker=3,peer=0", settings=LONG),
    Row("worker and all others", "partition-worker=3", settings=LONG),
    Row("frames to a worker", "partition-worker=3,way=in", settings=LONG),
    Row("two halves, then healed", "partition-node=1,seconds=3", settings=LONG),
    Row("worker's frames", "delay-worker=2,seconds=0.05"),
    Row("a bit on a link", "corrupt-worker=1,what=link"),
    Row("a bit in a gradient", "corrupt-worker=1,what=gradient"),
    Row("a bit in a worker's parameters", "corrupt-worker=1,what=parameter"),
    Row("NaN in a batch", "poison,what=nan", like=("poison,what=nan",)),
    Row("worker, four times slower", "slow-worker=2,factor=4"),
    Row("a node's wall clock, an hour ahead", "clock-jump=1,seconds=3600", ((AT + 2, "kill-worker=3"),)),
    Row("disk", "disk-full,seconds=1", settings=SAVES),
    Row("store", "store-down,seconds=1", settings=SAVES),
    Row("new node", "add-node", settings=LONG),
)
HEAD = ("fault", "hits", "response", "noticed as", "detect ms", "pause ms", "recomputed", "moved", "same bits")


def entries(faults: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"at_step": step, "fault": fault} for step, fault in faults]


class Matrix:
    def __init__(self, house: House) -> None:
        self.house = house
        self.references: dict[tuple[str, ...], Run] = {}

    def reference(self, faults: tuple[str, ...]) -> Run:
        """Undisturbed, but for what is the data's; on one worker."""
        if faults not in self.references:
            name = f"reference-{len(self.references)}"
            given = entries([(AT, fault) for fault in faults])
            self.references[faults] = self.ended(name, cluster__nodes=1, cluster__workers_per_node=1, faults=given)
        return self.references[faults]

    def ended(self, name: str, *, resume: bool = False, **settings: Any) -> Run:
        ended = self.house(*self.house.run_arguments(name, resume=resume, **settings))
        run = self.house.at(name)
        if ended.code != 0:
            raise SystemExit(f"{name}: {ended.said()}\n{run.story()}")
        return run

    def played(self, number: int, row: Row) -> Run:
        name = f"row-{number}"
        settings = {"cluster__standbys": 1, **row.settings, "faults": entries([(AT, row.fault), *row.also])}
        if not row.resumed:
            return self.ended(name, **settings)
        command = self.house.start(*self.house.run_arguments(name, **settings))
        command.wait()
        return self.ended(name, resume=True, **settings)

    def line(self, number: int, row: Row) -> tuple[list[str], bool]:
        run = self.played(number, row)
        same = self.house("diff", str(self.reference(row.like).path), str(run.path)).code == 0
        audited = self.house("audit", str(run.path)).code == 0
        told = [*figures(run), "yes" if same and audited else "**no**"]
        return [f"`{row.fault}`", row.what, *told], same and audited


def figures(run: Run) -> list[str]:
    recoveries = run.of_kind("recovery")
    injected = [event["time"] for event in run.of_kind("fault_injected")]
    since = min(injected, default=0.0)
    notices = sorted({e["notice"] for e in run.of_kind("fault_detected")})
    reasons = [e["reason"] for e in run.of_kind("member_left") if e["time"] >= since and "killed" in e["reason"]]
    detect = [e["detect_ms"] for e in recoveries if e["detect_ms"] is not None]
    return [
        response(run, since),
        ", ".join([*notices, *reasons[:1]]) or "-",
        f"{max(detect):.0f}" if detect else "-",
        f"{max((e['pause_ms'] for e in recoveries), default=0.0):.0f}",
        str(run.end["recomputed"]),
        f"{sum(e['bytes_moved'] for e in recoveries) / 1e6:.1f} MB",
    ]


def response(run: Run, since: float) -> str:
    """The tiers of the plans, and what else was done, in order."""
    said = []
    for event in run.events:
        if event["time"] < since:
            continue
        match event["kind"]:
            case "plan" if event["tier"] != "move":
                said.append(str(event["tier"]))
            case "departure":
                said.append(f"left after {event['seconds']:.1f} s")
            case "save_failed":
                said.append("written later")
            case "bad_step":
                said.append(f"bad step: {event.get('outcome', 'computed again')}")
            case "run_resumed":
                said.append("resumed")
    incarnations = run.status["incarnation"]
    if incarnations > 1:
        said.append(f"controller {incarnations}")
    return ", ".join(dict.fromkeys(said)) or "goes on"


INTRODUCTION = """\
# What happens when something breaks

Each row is one run of a small job (4 workers and a standby on 2 nodes, 8 logical ranks, {cores} cores) to which that
fault was done while it trained. `python -m tests.chaos.matrix --write` writes this page. The vocabulary is that of
`elastic/faults.py`; `everstep inject RUN FAULT` does the same to any run.

*response*: the tiers in which it was met ([architecture](architecture.md)), in order. *noticed as*: link (a peer saw
its link close), exit (its agent saw it end), agent (its agent is gone), silent (its agent says nothing). *detect*:
from the fault to its first notice anywhere, where the moment of the fault is known. *pause*: how long the last survivor
waited that had nothing else to compute. *recomputed*: micro-batches. *moved*: state that was sent before training went
on. *same bits*: `everstep diff` with an undisturbed run on one worker (after a poisoned batch: with one that was
poisoned as well), and `everstep audit`.

"""


def page(lines: Sequence[Sequence[str]]) -> str:
    table = [HEAD, ["---"] * len(HEAD), *lines]
    return INTRODUCTION.format(cores=os.cpu_count()) + "".join(f"| {' | '.join(line)} |\n" for line in table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.matrix", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose fault has this in it")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    house = House(Path(tempfile.mkdtemp(prefix="fm-", dir="/tmp")))
    lines, right = [], True
    try:
        matrix = Matrix(house)
        for number, row in enumerate(ROWS):
            if chosen.only in row.fault:
                line, as_it_should_be = matrix.line(number, row)
                right = right and as_it_should_be
                lines.append(line)
                print(" | ".join(line), flush=True)
                if chosen.write:  # row by row: it takes minutes
                    PAGE.write_text(page(lines))
    finally:
        house.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
