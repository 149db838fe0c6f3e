"""torchrun's elastic restart: DDP over gloo; when one worker dies all are started again, from the last checkpoint.

    torchrun --standalone --nproc-per-node=4 --max-restarts=1000 -m bench.peers.torchrun_ddp DIRECTORY EVERY

As its documentation asks: rank 0 saves model, optimizer and step every so often, and a script that starts loads what
is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.shape import WORKERS
from bench.peers.step_lines import StepLines
from bench.peers.systems import Command, SetUp
from bench.peers.workload import accumulate, digest, optimizer, seeded_model, worker_batch

CHECKPOINT = "checkpoint.pt"


def commands(every: int, variables: Mapping[str, str], bin_directory: Path, directory: Path) -> list[Command]:
    launch = (str(bin_directory / "torchrun"), "--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000")
    return [Command((*launch, "-m", "bench.peers.torchrun_ddp", str(directory), str(every)), variables)]


PACKAGES = ("torch==2.13.0", "numpy==2.4.6")
SET_UPS = (
    SetUp(
        "torchrun",
        "recommended",
        "`--standalone --max-restarts=1000`, a checkpoint every 10 steps. In torch 2.13 workers that start again share"
        " the store of those before them and may find their addresses there; then they fail, and are started once more",
        PACKAGES,
        partial(commands, 10, {}),
    ),
    SetUp(
        "torchrun",
        "tuned",
        "a checkpoint every 2 steps, and `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, a store of their own for each start",
        PACKAGES,
        partial(commands, 2, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ),
)


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    directory, every = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = seeded_model()
    adam = optimizer(model.parameters())
    step = 0
    if (directory / CHECKPOINT).exists():
        saved = torch.load(directory / CHECKPOINT)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    lines = StepLines(directory, rank, resume=step)
    group = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while True:
        train_step(ddp, model, adam, step, rank, group, lines)
        step += 1
        if rank == 0 and step % every == 0:
            partial = directory / f"{CHECKPOINT}.partial"
            torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "step": step}, partial)
            partial.replace(directory / CHECKPOINT)


def train_step(ddp: Any, model: Any, adam: Any, step: int, rank: int, group: int | str, lines: StepLines) -> None:
    """One step of plain DDP; Ray Train's is the same."""
    batch = worker_batch(step, rank)

    def attempt(loss: float) -> None:
        lines.write("attempt", step=step, group=group, samples=list(batch), counts=True, loss=loss)

    adam.zero_grad()
    accumulate(ddp, batch, lines, attempt)
    adam.step()
    lines.write("commit", step=step, group=group, digest=digest(model))


if __name__ == "__main__":
    main()
