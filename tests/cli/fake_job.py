"""A stand-in for the job process: keeps its side of the contract with viewers and trains nothing.

FAKE_JOB is a list of words:
    held        wait after three steps until there is a file `go`, or a Ctrl-C that it hears
    deaf        don't hear the first Ctrl-C
    die         SIGKILL oneself in the middle
    refuse      end with exit code 2 before being up
    fail        end the run as failed
    other-bits  have digests of one's own
    linger      having ended the run, stay until there is a file `go`
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from dataloader.shards import TokenShards
from dataloader.stream import SampleStream, step_digest
from elastic.config import JobConfig, stored_job
from elastic.records import EventLog, Ledger
from elastic.rundir import RunDirectory, hold, write_atomic
from runtime.protocol import StepRecord


class Job:
    def __init__(self, run: RunDirectory, words: list[str]) -> None:
        self.run, self.words = run, words
        self.job: JobConfig = stored_job(run.job)
        self.interrupts = 0
        signal.signal(signal.SIGINT, self.interrupted)
        signal.signal(signal.SIGTERM, self.interrupted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        assert self.job.data.path is not None
        self.stream = SampleStream(
            TokenShards(self.job.data.path, "train"), self.job.data.seq_len, self.job.shuffle_seed
        )

    def interrupted(self, *_: object) -> None:
        self.interrupts += 1
        if self.interrupts == 2:
            os._exit(130)

    def status(self, step: int) -> None:
        ranks = list(range(self.job.train.logical_ranks))
        member = {
            "id": 0,
            "node": 0,
            "role": "worker",
            "pid": os.getpid(),
            "logical_ranks": ranks,
            "optimizer_bytes": 1000,
        }
        steps = self.job.train.steps
        said = {"state": "running", "step": step, "steps": steps, "generation": 1, "members": [member]}
        write_atomic(self.run.status, json.dumps(said).encode(), durable=False)

    def record(self, step: int) -> StepRecord:
        train = self.job.train
        first = step * train.global_batch
        parts = (train.micro_batch, train.micro_batches_per_rank, train.logical_ranks)
        data = step_digest(self.stream, first, *parts).hex()
        salt = os.getpid() if "other-bits" in self.words else 0
        return StepRecord(
            step=step,
            generation=1,
            workers=1,
            copies=2,
            samples=(first, first + train.global_batch),
            tokens=train.global_batch * self.job.data.seq_len,
            loss=5.0 - step / 10,
            grad_norm=1.0,
            lr=1e-3,
            verdict="commit",
            digest=f"{step + salt:032x}",
            data_digest=data,
            time=time.time(),
            seconds=0.1,
        )

    def wait(self) -> None:
        while not (self.run.path / "go").exists() and not (self.interrupts and "deaf" not in self.words):
            time.sleep(0.02)

    def train(self, ledger: Ledger, events: EventLog) -> int:
        def end(state: str, reason: str, code: int) -> int:
            events.append(
                "run_ended", time=time.time(), step=ledger.next_step, generation=1, state=state, reason=reason
            )
            return code

        if "fail" in self.words:
            return end("failed", "metrics.port: 9100 is taken; set it to 0", 3)
        write_atomic(self.run.cluster, b"{}")
        for step in range(ledger.next_step, self.job.train.steps):
            self.status(step)
            for fault in self.job.faults:
                if fault.at_step == step:
                    events.append("fault_injected", time=time.time(), step=step, generation=1, fault=fault.fault)
                    numbers = {"detect_ms": 20.0, "pause_ms": 30.0, "recomputed": 1, "bytes_moved": 0}
                    events.append("recovery", time=time.time(), step=step, generation=2, **numbers)
            if "die" in self.words and step == 3:
                print("the last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            ledger.append(self.record(step))
            if "held" in self.words and step == 2:
                self.wait()
            if self.interrupts and "deaf" not in self.words:
                return end("stopped", "Ctrl-C", 130)
        self.run.weights.write_bytes(b"weights" + bytes(self.record(0).digest, "ascii"))
        code = end("done", "", 0)
        if "linger" in self.words:
            self.wait()
        return code


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--address")
    parser.add_argument("--lock", type=int)
    arguments = parser.parse_args()
    run = RunDirectory(arguments.run)
    words = os.environ.get("FAKE_JOB", "").split()
    if "refuse" in words:
        print("everstep: train.threads_per_worker: 64 is more than this machine's 2 cores; set it to 2", flush=True)
        return 2
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold(run, arguments.lock))
        ledger = stack.enter_context(Ledger(run.ledger))
        events = stack.enter_context(EventLog(run.events))
        return Job(run, words).train(ledger, events)


if __name__ == "__main__":
    sys.exit(main())
