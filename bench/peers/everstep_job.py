"""Everstep, the way a user runs it: a job file, `everstep run --detach` on a local Ray, and the run directory's files.

Four workers and a standby in one node agent. Its samples are known from the ledger: a record names a step's samples
and the digest of their tokens, and `everstep audit` computes that again from the data files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers.accounting import Step
from bench.peers.shape import GLOBAL_BATCH, LEARNING_RATE, MICRO_BATCH, SAMPLES, SEED, SEQ_LEN, VOCABULARY, WORKERS
from bench.peers.step_lines import start_ticks
from bench.peers.systems import ROOT, Command, SetUp, Worker
from bench.peers.workload import rows
from dataloader.dataset import FORMAT, FORMAT_VERSION, INDEX_NAME, DatasetIndex, dtype_for
from dataloader.shards import ShardWriter
from elastic.record_lines import read_events, read_ledger
from elastic.rundir import RunDirectory, holder

EVERSTEP = (sys.executable, "-m", "elastic.cli")
TIMEOUT_SECONDS = 180.0
STEPS = SAMPLES // GLOBAL_BATCH
POLL_SECONDS = 0.25


def no_commands(bin_directory: Path, directory: Path) -> list[Command]:
    return []


SET_UP = SetUp(
    "Everstep",
    "recommended",
    f"{WORKERS} workers and 1 standby in one node agent; no other setting",
    (),
    no_commands,
)


class EverstepJob:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = RunDirectory(directory / "run")
        write_dataset(directory / "data")
        job = directory / "job.yaml"
        job.write_text(json.dumps(job_values(directory)))  # JSON is YAML
        everstep("run", str(job), "--detach")

    def steps_done(self) -> int:
        return sum(1 for _ in read_ledger(self.run.ledger)) if self.run.ledger.exists() else 0

    def workers(self) -> Mapping[int, Worker]:
        members = sorted((m["id"], m["pid"]) for m in self._status()["members"] if m["role"] == "member")
        found = ((slot, pid, start_ticks(pid)) for slot, (_, pid) in enumerate(members))
        return {slot: Worker(pid, ticks) for slot, pid, ticks in found if ticks is not None and is_worker(pid)}

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.run.status.read_text())
        return status

    def stop(self) -> None:
        with contextlib.suppress(SystemExit):
            everstep("inject", str(self.run.path), "stop")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (job := holder(self.run)) is not None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if job is not None and job.pid is not None:
            for _ in range(2):  # the second ends it at once
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGINT)
                time.sleep(1.0)
        everstep("audit", str(self.run.path))  # ends the bench unless every sample was used once, in its place

    def steps(self, until: float) -> list[Step]:
        return [
            Step(record.step, record.time, tuple(range(*record.samples)), record.loss, record.digest)
            for record in read_ledger(self.run.ledger)
            if record.time <= until
        ]

    def commit_times(self, until: float) -> list[float]:
        return [step.time for step in self.steps(until)]

    def samples_in_vain(self, until: float) -> int:
        events = [event for event in read_events(self.run.events) if event["time"] <= until]
        return MICRO_BATCH * sum(int(event["recomputed"]) for event in events if event["kind"] == "recovery")


def job_values(directory: Path) -> dict[str, Any]:
    return {
        "run": {"name": "bench", "dir": str(directory / "run")},
        "recipe": "bench.peers.everstep_recipe:Padded",
        "recipe_dir": str(ROOT),
        "train": {
            "steps": STEPS,
            "seed": SEED,
            "global_batch": GLOBAL_BATCH,
            "micro_batch": MICRO_BATCH,
            "logical_ranks": GLOBAL_BATCH // MICRO_BATCH,
            "grad_clip": None,
        },
        "cluster": {"nodes": 1, "workers_per_node": WORKERS, "standbys": 1},
        "optimizer": {"lr": LEARNING_RATE},
        "schedule": {"kind": "constant"},
        "data": {"path": str(directory / "data"), "seq_len": SEQ_LEN},
    }


def write_dataset(directory: Path) -> None:
    """The same samples that workload.samples gives, as windows of one token file."""
    directory.mkdir()
    tokens = rows().ravel()[: SAMPLES * SEQ_LEN].tolist()
    writer = ShardWriter(directory, "train", VOCABULARY, len(tokens))
    writer.add(tokens, VOCABULARY - 1)
    index = DatasetIndex(
        format=FORMAT,
        version=FORMAT_VERSION,
        dtype=dtype_for(VOCABULARY),
        vocab_size=VOCABULARY,
        end_of_text=VOCABULARY - 1,
        tokenizer=None,
        splits={"train": writer.finish()},
    )
    (directory / INDEX_NAME).write_text(json.dumps(index.model_dump()))


def is_worker(pid: int) -> bool:
    try:
        return b"runtime" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def everstep(*arguments: str) -> None:
    done = subprocess.run(
        [*EVERSTEP, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        raise SystemExit(f"everstep {arguments[0]}: exit code {done.returncode}: {words}")
