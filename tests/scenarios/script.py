"""What a scenario's file says before the transcript: prose, the setting, the faults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from dataloader.errors import DataError
from elastic.faults import parse_fault
from tests.sim.job import FaultEntry, Job, Profile
from tests.sim.world import Setting

RULE = "-" * 100
SIZES = re.compile(
    r"(?P<workers>\d+) workers? on (?P<nodes>\d+) nodes?"
    r"(?:, (?P<standbys>\d+) standbys?)?"
    r"(?:, at least (?P<min_workers>\d+))?"
    r", (?P<logical_ranks>\d+) logical ranks(?: of (?P<micro_batches>\d+) micro-batches)?"
    r", (?P<shards>\d+) shards, (?P<steps>\d+) steps"
    r"(?:, a checkpoint every (?P<save_every>\d+))?"
)
FAULT = re.compile(r"at step (?P<at_step>\d+)(?P<wait>, held)?: (?P<fault>\S+)")
PROFILE = Profile(  # seconds: a step takes long enough for whoever starts to join in the next or the one after it
    micro_batch_seconds=0.02,
    link_seconds=(0.001, 0.001),
    lazy_senders=frozenset(),
    laziness=1.0,
    control_seconds=0.002,
    settle_seconds=0.003,
    write_seconds=0.005,
    boot_seconds=0.1,
    restart_seconds=0.2,
    notice_seconds=0.02,
    exit_seconds=0.005,
)


class Steady(Random):
    """Nothing is left to chance, and nothing rare happens: a transcript changes when the protocol does."""

    def random(self) -> float:
        return 0.75

    def choice(self, seq: Any) -> Any:
        return seq[0]


@dataclass(frozen=True)
class Script:
    prose: tuple[str, ...]
    job: Job
    schedule: tuple[FaultEntry, ...]

    def setting(self) -> Setting:
        return Setting(self.job, PROFILE, tuple(f for f in self.schedule if not f.wait), random=Steady(0))


def read(text: str) -> Script:
    """The part before the ruler."""
    lines = [line.strip() for line in text.split(RULE)[0].strip().splitlines()]
    prose, sizes, entries = [], None, []
    for line in lines:
        if (match := SIZES.fullmatch(line)) is not None:
            sizes = {name: int(number) for name, number in match.groupdict().items() if number is not None}
        elif (match := FAULT.fullmatch(line)) is not None:
            parse_fault(match["fault"])
            entries.append(FaultEntry(int(match["at_step"]), match["fault"], match["wait"] is not None))
        elif sizes is not None and line:
            raise DataError(f"{line!r} is no fault; write: at step 2: kill-worker=3,during=vote")
        else:
            prose.append(line)
    if sizes is None:
        raise DataError("no line says how many workers there are; write: 4 workers on 2 nodes, 8 logical ranks, ...")
    return Script(tuple(prose), job_of(sizes, entries), tuple(entries))


def job_of(sizes: dict[str, int], entries: list[FaultEntry]) -> Job:
    """Entries that hold their step go to the controller, which does them itself; the simulator plays the others."""
    if sizes["workers"] % sizes["nodes"]:
        raise DataError(f"{sizes['workers']} workers are not the same number on each of {sizes['nodes']} nodes")
    return Job(
        nodes=sizes["nodes"],
        workers_per_node=sizes["workers"] // sizes["nodes"],
        standbys=sizes.get("standbys", 0),
        min_workers=sizes.get("min_workers", 1),
        logical_ranks=sizes["logical_ranks"],
        shards=sizes["shards"],
        steps=sizes["steps"],
        micro_batches=sizes.get("micro_batches", 1),
        save_every=sizes.get("save_every", 0),
        keep=2,
        sdc=False,
        skips=frozenset(),
        faults=tuple(entry for entry in entries if entry.wait),
    )
