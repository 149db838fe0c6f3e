"""A folder with a small job, a terminal in it, and an eye on everything that the commands start.

Every process carries a mark in its environment, and all temporary files go to a directory of our own: so what is left
behind is found exactly, whatever else runs on this machine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloader.corpus import build_dataset
from dataloader.dataset import read_index
from dataloader.shards import TokenShards
from dataloader.stdlib_text import SourceFile
from dataloader.stream import SampleStream, data_digest
from elastic.record_lines import read_events, read_ledger
from elastic.rundir import RunDirectory, holder
from runtime.protocol import StepRecord
from tests.chaos.leftovers import Eye, links
from tests.chaos.scraper import Scraper

COMMAND = (sys.executable, "-P", "-m", "elastic.cli")
PATIENCE_SECONDS = 240.0  # for one run, on a machine with many other things to do

SEED, SEQ_LEN = 3, 32
STEPS, GLOBAL_BATCH, RANKS = 24, 16, 8  # micro_batch 1: two micro-batches a logical rank, 16 a step
JOB = f"""\
run: {{name: small}}
train: {{steps: {STEPS}, seed: {SEED}, global_batch: {GLOBAL_BATCH}, micro_batch: 1, logical_ranks: {RANKS}}}
cluster: {{nodes: 2, workers_per_node: 2}}
model: {{hidden_size: 64, intermediate_size: 176, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}}
data: {{path: data, seq_len: {SEQ_LEN}}}
optimizer: {{lr: 2.0e-3}}
schedule: {{warmup_steps: 3}}
"""

# The built-in recipe, which also leaves a trace of each micro-batch that any worker gives to the model.
COUNTING = """\
import os
from dataloader.stream import data_digest
from runtime.model.causal_lm import CausalLM

class Counting(CausalLM):
    def loss(self, model, batch):
        answer = super().loss(model, batch)
        with open(os.environ["EVERSTEP_CHAOS_TRACE"], "ab", buffering=0) as trace:
            trace.write(data_digest(batch["tokens"].numpy()))
        return answer
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def said(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Command:
    """A command that was started; its output goes to files, which no leftover process can hold open for us."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process, self._out, self._err = process, out, err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> Ended:
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.out}\n{self.err}") from None
        return Ended(code, self.out, self.err)


class House:
    """`folder` holds job.yaml, its data, and the run directories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "t"  # a short path: Ray puts sockets far below it
        self.temporary.mkdir()
        self.eye = Eye(f"EVERSTEP_CHAOS={os.urandom(8).hex()}", self.temporary)
        name, _, value = self.eye.mark.partition("=")
        self.environment = {**os.environ, name: value, "TMPDIR": str(self.temporary)}
        self._count = 0
        self.trace = folder / "trace"
        self.environment["EVERSTEP_CHAOS_TRACE"] = str(self.trace)
        (folder / "job.yaml").write_text(JOB)
        (folder / "counting.py").write_text(COUNTING)
        (folder / "data").mkdir()
        build_dataset(folder / "data", small_books(), vocab_size=320)
        self.vocab_size = read_index(folder / "data").vocab_size

    # --- commands ---------------------------------------------------------------------------------------------

    def start(self, *arguments: str) -> Command:
        self._count += 1
        out, err = (self.folder / f"{self._count:02d}.{kind}" for kind in ("out", "err"))
        with out.open("wb") as o, err.open("wb") as e:
            process = subprocess.Popen(
                [*COMMAND, *arguments], cwd=self.folder, env=self.environment, stdout=o, stderr=e
            )
        return Command(process, out, err)

    def __call__(self, *arguments: str, seconds: float = PATIENCE_SECONDS) -> Ended:
        return self.start(*arguments).wait(seconds)

    def run_arguments(self, name: str, *, resume: bool = False, **settings: Any) -> list[str]:
        """`everstep run` of the small job into runs/NAME; `a__b=value` sets `a.b`."""
        given = {"run.dir": f"runs/{name}", **{key.replace("__", "."): value for key, value in settings.items()}}
        sets = [part for key, value in given.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return ["run", "job.yaml", *sets, *(["--resume"] if resume else [])]

    def begin(self, name: str, **settings: Any) -> tuple[Command, Run]:
        return self.start(*self.run_arguments(name, **settings)), self.at(name)

    def train(self, name: str, **settings: Any) -> Run:
        """A whole run, in the foreground, that must end well and leave nothing."""
        command, run = self.begin(name, **settings)
        with Scraper(run.directory.prometheus_targets) as run.scraper, Sockets(run) as run.sockets:
            run.ended = command.wait()
        assert run.ended.code == 0, f"{run.ended.said()}\n{run.story()}"
        assert run.ended.err == "", run.ended.said()
        seen = self.eye.nothing_left()
        assert len(seen.processes) > 4, "the eye is blind"  # a command, a job process, Ray, workers
        assert seen.listening
        return run

    def computed(self) -> Counter[int]:
        """How often each micro-batch of the job was computed, by what the counting recipe left. A worker that starts
        also computes the first one and a probe, which is none of the job's."""
        with TokenShards(self.folder / "data", "train") as shards:
            stream = SampleStream(shards, SEQ_LEN, SEED)
            numbers = {data_digest(stream.tokens(n, 1)): n for n in range(STEPS * GLOBAL_BATCH)}
        assert len(numbers) == STEPS * GLOBAL_BATCH  # all differ
        trace = self.trace.read_bytes()
        times = Counter(trace[at : at + 16] for at in range(0, len(trace), 16))
        assert len(times.keys() - numbers.keys()) == 1, "only the probe"
        return Counter({numbers[digest]: count for digest, count in times.items() if digest in numbers})

    def same(self, a: Run, b: Run) -> None:
        """Two whole runs, step by step and byte by byte, as `everstep diff` sees it and as we do."""
        answer = self("diff", str(a.path), str(b.path))
        assert answer.code == 0, f"{answer.said()}\n{b.story()}"
        assert answer.out == f"equal over {STEPS} steps\nweights: the same bytes\n"
        assert a.weights == b.weights

    def at(self, name: str) -> Run:
        return Run(self.folder / "runs" / name)

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.eye.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Run:
    """A run directory, read as its user would."""

    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, RunDirectory(path)
        self.ended: Ended | None = None
        self.scraper = Scraper(self.directory.prometheus_targets)
        self.sockets = Sockets(self)

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.directory.events)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def end(self) -> dict[str, Any]:
        last = self.events[-1]
        assert last["kind"] == "run_ended", last
        return last

    @property
    def records(self) -> list[StepRecord]:
        return read_ledger(self.directory.ledger)

    @property
    def weights(self) -> bytes:
        return self.directory.weights.read_bytes()

    @property
    def status(self) -> dict[str, Any]:
        """What status.json says."""
        return dict(json.loads(self.directory.status.read_bytes()))

    def pids(self, **wanted: Any) -> list[int]:
        """Of the members that look so."""
        members = self.status["members"]
        return [m["pid"] for m in members if m["pid"] and all(m[key] == value for key, value in wanted.items())]

    def job_pid(self) -> int:
        there = holder(self.directory)
        assert there is not None
        assert there.pid is not None
        return there.pid

    def wait_for(self, what: str, until: Callable[[], bool], command: Command | None = None) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not until():
            assert time.monotonic() < deadline, f"{what}: it did not come\n{self.story()}"
            if command is not None and command.process.poll() is not None:
                raise AssertionError(f"{what}: the command has ended\n{command.wait().said()}\n{self.story()}")
            time.sleep(0.02)

    def wait_for_steps(self, count: int, command: Command | None = None) -> None:
        self.wait_for(
            f"{count} steps",
            lambda: self.directory.ledger.exists() and self.directory.ledger.read_bytes().count(b"\n") >= count,
            command,
        )

    def story(self) -> str:
        """For whoever has to find out what went wrong."""
        lines = [line_of(event) for event in self.events]
        for log in sorted(self.directory.logs.glob("*")) if self.directory.logs.is_dir() else []:
            if text := log.read_text(errors="replace").strip():
                lines += [f"--- {log.name}", *text.splitlines()[-15:]]
        return "\n".join([f"--- {self.path}", *lines])


class Sockets:
    """The connections between a run's members, looked at again and again while the block runs."""

    def __init__(self, run: Run) -> None:
        self.ends: dict[frozenset[int], set[frozenset[str]]] = {}  # two worker IDs -> the sockets they ever had
        self._run = run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Sockets:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._ended.wait(0.1):
            if not self._run.directory.status.exists():
                continue
            ids = {m["pid"]: m["id"] for m in self._run.status["members"] if m["role"] == "member"}
            for pair, ends in links(sorted(ids)).items():
                self.ends.setdefault(frozenset(ids[pid] for pid in pair), set()).add(ends)


def line_of(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("time", "kind", "step", "generation")}
    return f"{event['time']:.3f} step {event['step']} generation {event['generation']} {event['kind']} {rest}"


def small_books() -> list[SourceFile]:
    """The same text at every call."""
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8))) for _ in range(300)]
    return [SourceFile(f"book/{n}.txt", (" ".join(chance.choices(words, k=400)) + "\n").encode()) for n in range(60)]


def make_house() -> House:
    """Under /tmp, whose name is short."""
    return House(Path(tempfile.mkdtemp(prefix="evc-", dir="/tmp")))
