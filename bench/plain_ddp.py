"""The peer: plain torch DDP over gloo with fused AdamW, one process per worker, on the same model, data and batches.

    python -m bench.plain_ddp RANK WORLD STORE JOB.json      on stdin: "N" a line, on stdout: N step times as JSON

As fast as torch lets it be without changing what is computed: gradients are views of DDP's buckets, all but the last
micro-batch of a step are accumulated without communication, buffers are not broadcast, the optimizer is fused. The
global norm is clipped, since the job asks for it. Between lines it waits on stdin and uses no CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.config import JobConfig, stored_job
from runtime.numerics import environment

ROOT = Path(__file__).resolve().parent.parent


class PlainDdp:
    """The processes, from outside."""

    def __init__(self, job: JobConfig, job_file: Path, directory: Path) -> None:
        world = job.cluster.workers
        command = [sys.executable, "-m", "bench.plain_ddp"]
        variables = {**os.environ, **environment(job.train), "GLOO_SOCKET_IFNAME": "lo"}
        self._processes = []
        self._logs = [directory / f"ddp-{rank}.log" for rank in range(world)]
        for rank in range(world):
            with self._logs[rank].open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(rank), str(world), str(directory / "store"), str(job_file)],
                        cwd=ROOT,
                        env=variables,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                    )
                )

    def steps(self, count: int) -> list[float]:
        """Run so many; the seconds of each, as rank 0 saw them."""
        answers = []
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
            for process in self._processes:
                assert process.stdout is not None
                answers.append(json.loads(process.stdout.readline()))
        except (OSError, ValueError):
            raise RuntimeError(f"a DDP process has ended: {self._last_words()}") from None
        seconds: list[float] = answers[0]
        return seconds

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _last_words(self) -> str:
        codes = [process.poll() for process in self._processes]
        lines = [(log.read_text().strip().splitlines() or ["nothing"])[-1] for log in self._logs]
        return "; ".join(f"{rank}: {line} ({code})" for rank, (line, code) in enumerate(zip(lines, codes, strict=True)))

    def shut(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


@contextlib.contextmanager
def plain_ddp(job: JobConfig, job_file: Path, directory: Path) -> Iterator[PlainDdp]:
    """`job_file`: the job as a run directory keeps it; `directory`: for logs and the rendezvous file."""
    running = PlainDdp(job, job_file, directory)
    try:
        yield running
    finally:
        running.shut()


# --- one process ----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, rank: int, world: int, job: JobConfig) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from dataloader.shards import TokenShards
        from dataloader.stream import SampleStream
        from runtime.recipe import build_recipe
        from runtime.worker import with_vocabulary

        torch.set_num_threads(job.train.threads_per_worker)
        assert job.data.path is not None
        shards = TokenShards(job.data.path, "train")
        plain = job.model_dump(mode="json")
        plain["model"] = with_vocabulary(plain["model"], shards)
        self.train = job.train
        self.rank, self.world = rank, world
        self.stream = SampleStream(shards, job.data.seq_len, job.shuffle_seed)
        self.recipe = build_recipe(job.recipe, plain)
        self.model = self.recipe.build_model()
        self.ddp = DistributedDataParallel(self.model, broadcast_buffers=False, gradient_as_bucket_view=True)
        self.optimizer = self.recipe.optimizer(self.recipe.param_groups(self.model))
        self.tokens = job.train.global_batch * job.data.seq_len
        self.step_number = 0

    def step(self) -> float:
        """One step; its mean loss per token on this rank."""
        import torch

        each = self.train.micro_batches // self.world
        mine = range(self.rank * each, (self.rank + 1) * each)
        total = 0.0
        for micro_batch in mine:
            last = micro_batch == mine[-1]
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                first = self.train.first_sample(self.step_number, micro_batch)
                tokens = torch.from_numpy(self.stream.tokens(first, self.train.micro_batch))
                loss, _ = self.recipe.loss(self.ddp, {"tokens": tokens})
                self.recipe.backward(loss * (self.world / self.tokens))
                total += float(loss.detach())
        if self.train.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        return total * self.world / self.tokens


def main(rank: int, world: int, store: str, job_file: Path) -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    trainer = Trainer(rank, world, stored_job(job_file))
    for line in sys.stdin:
        torch.distributed.barrier()
        seconds: list[Any] = []
        before = time.perf_counter()
        for _ in range(int(line)):
            loss = trainer.step()
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        print(json.dumps(seconds), flush=True)
        print(f"step {trainer.step_number}: loss {loss:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
