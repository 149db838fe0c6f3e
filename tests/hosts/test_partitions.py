"""Real workers cut from each other: who goes on, who waits, and that the bits stay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.local_job import LocalJob, local_job
from elastic import messages as m
from elastic.config import JobConfig, parse_job
from tests.tokens import write_tokens

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ENOUGH_SECONDS = 150.0
STEPS = 125


def job(tokens: Path, nodes: int, workers_per_node: int) -> JobConfig:
    return parse_job(
        {
            "run": {"name": "tiny"},
            "train": {"steps": STEPS, "seed": 3, "global_batch": 8, "micro_batch": 1, "logical_ranks": 4},
            "cluster": {"nodes": nodes, "workers_per_node": workers_per_node},
            "data": {"path": str(tokens), "seq_len": 32},
            "model": {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 2, "kv_heads": 1},
            "links": {"silence_seconds": 1.2},
        },
        "test",
    )


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens")


@pytest.fixture
def undisturbed(tokens: Path, tmp_path: Path) -> dict[int, str]:
    with local_job(job(tokens, 1, 1), tmp_path / "undisturbed") as running:
        running.until(lambda: len(running.records) == STEPS, ENOUGH_SECONDS)
        return digests(running)


@pytest.fixture
def running(tokens: Path, tmp_path: Path) -> Iterator[LocalJob]:
    """Workers 0 and 1 on node 0, 2 and 3 on node 1."""
    with local_job(job(tokens, 2, 2), tmp_path / "run", hold_at=frozenset({20, 50, 80, 110})) as started:
        started.until(lambda: started.all_parked_at(20), ENOUGH_SECONDS)
        yield started


def digests(running: LocalJob) -> dict[int, str]:
    return {step: record.digest for step, record in running.records.items()}


def members(running: LocalJob) -> set[int]:
    return set(running.controller.ballots.members)


def told(running: LocalJob, kind: str) -> list[str]:
    return [f"{fields.get('worker')}: {fields['reason']}" for said, fields in running.events if said == kind]


def test_partitions(running: LocalJob, undisturbed: dict[int, str]) -> None:
    def happen(fault: str, release: int) -> float:
        running.release(release)
        running.until(lambda: len(running.records) > release + 3, ENOUGH_SECONDS)
        running._pending.append(m.FaultRequested(fault))
        return time.monotonic()

    def is_whole(step: int) -> bool:
        return running.all_parked_at(step) and len(members(running)) == 4

    # Half from half: the younger goes; whoever comes in its place waits until it can reach the others.
    begun = happen("partition-node=0", 20)
    running.until(lambda: members(running) == {0, 1}, ENOUGH_SECONDS)
    print(f"half from half: decided after {time.monotonic() - begun:.1f} s", told(running, "member_left"))
    running.until(lambda: len(told(running, "cut_off")) == 2 and running.all_parked_at(50), ENOUGH_SECONDS)
    assert members(running) == {0, 1}
    assert [member["role"] for member in running.controller.status()["members"]] == ["member"] * 2 + ["cut off"] * 2
    running._pending.append(m.FaultRequested("partition-node=0,seconds=0"))
    running.until(lambda: is_whole(50), ENOUGH_SECONDS)
    print(f"half from half: healed after {time.monotonic() - begun:.1f} s", told(running, "cut_off"))
    assert members(running) == {0, 1, 4, 5}

    # A pair that can't talk, while both live: the younger goes, for another in its place.
    begun = happen("partition-worker=0,peer=4", 50)
    running.until(lambda: members(running) == {0, 1, 5}, ENOUGH_SECONDS)
    print(f"pair cut: decided after {time.monotonic() - begun:.1f} s", told(running, "member_left")[2:])
    running.until(lambda: is_whole(80), ENOUGH_SECONDS)
    assert members(running) == {0, 1, 5, 6}

    # One that can't talk to anybody: that one goes, although it is the oldest.
    begun = happen("partition-worker=0", 80)
    running.until(lambda: members(running) == {1, 5, 6}, ENOUGH_SECONDS)
    print(f"one cut from all: decided after {time.monotonic() - begun:.1f} s", told(running, "member_left")[3:])

    # A damaged frame costs a link, and nothing else.
    running.until(lambda: running.all_parked_at(110), ENOUGH_SECONDS)
    happen("corrupt-worker=1,what=link", 110)
    running.until(lambda: len(running.records) == STEPS, ENOUGH_SECONDS)
    assert {1, 5, 6} <= members(running)
    assert len(told(running, "member_left")) == 4
    assert digests(running) == undisturbed
    assert not [fields for kind, fields in running.events if kind == "plan" and fields["rollback"]]
