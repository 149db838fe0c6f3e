import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataloader.errors import InternalError
from elastic import messages as m
from elastic.config import JobConfig, parse_job
from elastic.durable import read_state
from elastic.messages import Action, Event
from elastic.record_lines import read_events
from elastic.rundir import RunDirectory
from elastic.shell import LedgerFigures, Shell, controller_facts
from runtime.checkpoint.catalogue import commit, newest, read_manifest
from runtime.checkpoint.manifest import FileEntry, Manifest, ShardEntry
from runtime.checkpoint.store import LocalStore
from runtime.protocol import StepRecord

JOB = {
    "run": {"name": "small"},
    "train": {"steps": 40, "global_batch": 4, "micro_batch": 1, "logical_ranks": 2},
    "data": {"path": "tokens", "seq_len": 8},
    "checkpoint": {"keep": 1},
    "cluster": {"nodes": 2},
}
Record = Callable[..., StepRecord]


class Script:
    """A core that says what it is told to say, event by event."""

    def __init__(self, answers: Sequence[list[Action]] = ()) -> None:
        self.answers = list(answers)
        self.heard: list[Event] = []
        self.begun: tuple[int, int | None] = (-1, None)
        self.digest: Callable[[int], str | None] = lambda step: None

    def start(self, now: float) -> list[Action]:
        return self.answers.pop(0) if self.answers else []

    def handle(self, event: Event, now: float) -> list[Action]:
        self.heard.append(event)
        return self.answers.pop(0) if self.answers else []

    def status(self) -> dict[str, Any]:
        return {"state": "training", "step": len(self.heard), "generation": 3, "loss": float("nan")}

    def place(self) -> tuple[int, int]:
        return 4, 3


class Outside:
    """Notes what it is asked for, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.over = threading.Event()

    def start_agent(self, slot: int) -> None:
        self.done.append(("start", slot))

    def deliver(self, slot: int, actions: list[dict[str, Any]]) -> None:
        self.done.append(("deliver", slot, *(a["kind"] for a in actions)))

    def kill_agent(self, slot: int, again: bool) -> float | None:
        self.done.append(("kill", slot, again))
        return 12.5 if slot == 0 else None

    def kill_controller(self) -> None:
        self.done.append(("kill controller",))

    def slots(self) -> list[int]:
        return [0]

    def wake(self, after_seconds: float) -> None:
        self.done.append(("wake", after_seconds))

    def ended(self, state: str, reason: str) -> None:
        self.done.append(("ended", state, reason))
        self.over.set()


class Stage:
    def __init__(self, path: Path) -> None:
        self.run, self.outside, self.core = RunDirectory(path), Outside(), Script()
        for directory in (self.run.logs, self.run.checkpoints):
            directory.mkdir(exist_ok=True)
        self.job: JobConfig = parse_job(JOB, "job")
        self.shell: Shell

    def open(self, *answers: list[Action]) -> Shell:
        self.core.answers = list(answers)

        def make(
            ledger_next: int, digest: Callable[[int], str | None], checkpoint: int | None, figures: LedgerFigures
        ) -> Script:
            self.core.begun, self.core.digest = (ledger_next, checkpoint), digest
            return self.core

        self.shell = Shell(self.run, self.job, self.outside, make)
        return self.shell

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.run.status.read_text())
        return value


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def entry(stage: Stage, version: int, shard: int) -> dict[str, Any]:
    key = f"v{version:08d}/shard-{shard:04d}.aa.safetensors"
    LocalStore(stage.run.checkpoints).put(key, [b"data"])
    return ShardEntry(file=key, bytes=4, checksum="a" * 32, shard=shard, digest="b" * 32).model_dump()


def first_checkpoint(stage: Stage) -> None:
    store = LocalStore(stage.run.checkpoints)
    store.put("buffers.aa.safetensors", [b"buf"])
    shards = tuple(ShardEntry(**entry(stage, 0, shard)) for shard in (0, 1))
    buffers = FileEntry(file="buffers.aa.safetensors", bytes=3, checksum="c" * 32)
    commit(
        store,
        Manifest(version=0, layout="d" * 32, bounds=(0, 16, 32), optimizer="x", shards=shards, buffers=buffers),
    )


def test_actions_are_done_in_order_and_those_for_agents_together(stage: Stage) -> None:
    told = {"kind": "ask"}
    shell = stage.open(
        [
            m.ToWorker(0, 1, told),
            m.ToWorker(1, 2, told),
            m.KillWorker(0, 3),
            m.StartAgent(2),
            m.ToWorker(0, 1, told),
            m.Wake(1.5),
            m.WelcomeAgent(0, 7),
        ]
    )
    shell.start()
    assert stage.outside.done == [
        ("deliver", 0, "ToWorker", "KillWorker"),
        ("deliver", 1, "ToWorker"),
        ("start", 2),
        ("wake", 1.5),
        ("deliver", 0, "ToWorker", "WelcomeAgent"),
    ]


def test_what_is_persisted_is_there_before_what_follows(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    shell = stage.open([m.Persist({"n": 1}), m.AppendEvent("fault_injected", {"fault": "stop"}), m.StartAgent(0)])
    monkeypatch.setattr(
        stage.outside, "start_agent", lambda slot: seen.append((read_state(stage.run), read_events(stage.run.events)))
    )
    shell.start()
    ((state, events),) = seen
    assert state == {"n": 1}
    assert [e["kind"] for e in events] == ["fault_injected"]


def test_an_event_record_has_its_place_unless_it_says_one(stage: Stage) -> None:
    shell = stage.open(
        [m.AppendEvent("plan", {"step": 9, "generation": 8}), m.AppendEvent("recovery", {"pause_ms": 5})]
    )
    shell.start()
    plan, recovery = read_events(stage.run.events)
    assert (plan["step"], plan["generation"]) == (9, 8)
    assert (recovery["step"], recovery["generation"]) == (4, 3)
    assert abs(recovery["time"] - time.time()) < 10


def test_the_core_learns_what_is_written(stage: Stage, step_record: Record) -> None:
    first_checkpoint(stage)
    stage.open([], [m.AppendLedger(step_record(0)), m.AppendLedger(step_record(1))]).handle(m.Tick())
    stage.shell.handle(m.Tick())
    assert stage.core.begun == (0, 0)
    assert stage.core.digest(1) == step_record(1).digest
    again = Stage(stage.run.path)
    again.open()
    assert again.core.begun == (2, 0)
    assert [again.core.digest(step) for step in (0, 1, 2, -1)] == [
        step_record(0).digest,
        step_record(1).digest,
        None,
        None,
    ]


def test_a_step_with_other_bits_ends_the_job(stage: Stage, step_record: Record) -> None:
    shell = stage.open([m.AppendLedger(step_record(0))], [m.AppendLedger(step_record(0, digest="f" * 32))])
    shell.handle(m.Tick(), m.Tick(), m.Tick())
    assert stage.outside.done[-1][:2] == ("ended", "failed")
    assert "step 0 was decided again with another digest" in stage.outside.done[-1][2]
    assert len(stage.core.heard) == 2  # nothing is heard after the end
    assert stage.status()["state"] == "failed"
    assert read_events(stage.run.events)[-1]["kind"] == "run_ended"


def test_a_broken_core_ends_the_job_with_one_line(stage: Stage) -> None:
    shell = stage.open()

    def broken(event: Event, now: float) -> list[Action]:
        raise ZeroDivisionError("oops")

    stage.core.handle = broken  # type: ignore[method-assign]
    shell.handle(m.Tick())
    assert stage.outside.done[-1][:2] == ("ended", "failed")
    assert "ZeroDivisionError: oops" in stage.outside.done[-1][2]


def test_an_end_is_final(stage: Stage) -> None:
    shell = stage.open([m.End("done", "40 steps"), m.StartAgent(0)])
    shell.handle(m.Tick())
    shell.fail("too late")
    shell.handle(m.Tick())
    assert [d for d in stage.outside.done if d[0] == "ended"] == [("ended", "done", "40 steps")]
    assert stage.status()["state"] == "done"


def test_the_moment_of_a_kill_is_told_to_the_core(stage: Stage) -> None:
    shell = stage.open([m.KillAgent(0, True), m.KillAgent(1, False)])
    shell.handle(m.Tick())
    assert stage.outside.done == [("kill", 0, True), ("kill", 1, False)]
    assert stage.core.heard[1:] == [m.Killed(-1, 12.5, 0)]


def test_a_request_is_answered_with_the_events_it_led_to(stage: Stage) -> None:
    skipped = m.AppendEvent("fault_skipped", {"fault": "kill-worker=9", "reason": "worker 9 is not there"})
    shell = stage.open([skipped, m.PublishStatus()])
    assert shell.handle(m.FaultRequested("kill-worker=9")) == [skipped]


def test_the_status_is_limited_but_the_last_is_written(stage: Stage) -> None:
    shell = stage.open(*[[m.PublishStatus()] for _ in range(5)])
    for _ in range(5):
        shell.handle(m.Tick())
    assert stage.status()["step"] == 1
    assert [d for d in stage.outside.done if d[0] == "deliver"] == [("deliver", 0, "JobFacts")]
    wait = shell.due()
    assert wait is not None
    assert 0.0 < wait <= 0.2
    shell.refresh()
    assert stage.status()["step"] == 1
    time.sleep(wait + 0.01)
    shell.refresh()
    assert stage.status()["step"] == 5
    assert stage.status()["loss"] == "nan"
    assert shell.due() is None


def test_a_checkpoint_is_published_when_the_ledger_has_its_steps(stage: Stage, step_record: Record) -> None:
    first_checkpoint(stage)
    files = {shard: entry(stage, 2, shard) for shard in (0, 1)}
    told = [m.AppendLedger(step_record(0)), m.WriteManifest(2, files)], [m.AppendLedger(step_record(1))]
    shell = stage.open(*told, [m.PruneCheckpoints()])
    shell.handle(m.Tick())
    time.sleep(0.1)
    assert [type(e).__name__ for e in stage.core.heard] == ["Tick"]
    shell.handle(m.Tick())
    deadline = time.monotonic() + 5
    while len(stage.core.heard) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stage.core.heard[-1] == m.CheckpointWritten(2)
    store = LocalStore(stage.run.checkpoints)
    whole = newest(store)
    assert whole is not None
    assert (whole.version, whole.layout, whole.optimizer) == (2, "d" * 32, "x")
    assert whole.buffers is not None
    assert whole.buffers.file == "buffers.aa.safetensors"
    while store.size("v00000000/manifest.json") is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.size("v00000000/manifest.json") is None  # keep: 1
    assert read_manifest(store, 2).shards[1].shard == 1


def test_a_checkpoint_that_lacks_a_file_ends_the_job(stage: Stage, step_record: Record) -> None:
    first_checkpoint(stage)
    files = {shard: entry(stage, 1, shard) for shard in (0, 1)}
    LocalStore(stage.run.checkpoints).delete(files[1]["file"])
    stage.open([m.AppendLedger(step_record(0)), m.WriteManifest(1, files)]).handle(m.Tick())
    assert stage.outside.over.wait(5)
    assert "version 1 isn't saved" in stage.outside.done[-1][2]


def test_an_unknown_action_is_a_bug_that_is_told(stage: Stage) -> None:
    stage.open([object()]).handle(m.Tick())  # type: ignore[list-item]
    assert "doesn't know" in stage.outside.done[-1][2]


def test_the_tally_counts_on_after_a_restart(stage: Stage) -> None:
    injected = m.AppendEvent("fault_injected", {"fault": "kill-worker=1"})
    stage.open(
        [injected, m.AppendEvent("fault_detected", {"notice": "exit"}), m.AppendEvent("recovery", {"pause_ms": 40})]
    )
    stage.shell.handle(m.Tick())
    again = Stage(stage.run.path)
    again.open([injected]).handle(m.Tick())
    assert again.shell.tally.plain() == {
        "injected": {"kill-worker": 2},
        "detected": {"exit": 1},
        "rebalances": 0,
        "pauses": 1,
        "pause_seconds": 0.04,
    }


def test_the_controller_gets_its_facts_from_the_job(stage: Stage) -> None:
    facts = controller_facts(stage.job)
    assert (facts.nodes, facts.workers_per_node, facts.shards, facts.micro_batches_per_rank) == (2, 1, 2, 2)


def test_errors_of_a_rule_are_not_swallowed(stage: Stage) -> None:
    def broken(event: Event, now: float) -> list[Action]:
        raise InternalError("a rule does not hold")

    shell = stage.open()
    stage.core.handle = broken  # type: ignore[method-assign]
    shell.handle(m.Tick())
    assert stage.outside.done[-1] == ("ended", "failed", "a rule does not hold")
