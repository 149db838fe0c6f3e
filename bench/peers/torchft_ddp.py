"""torchft: each worker a replica group of its own under a torchrun of its own, with a lighthouse between them.

    torchrun --standalone --nproc-per-node=1 --max-restarts=1000 -m bench.peers.torchft_ddp DIRECTORY REPLICA OPTIONS

As in its example for fault tolerant DDP, and with what that leaves to the user: the loader's place is kept at every
step, so that a replica that starts again goes on in its own part of the data, and model, optimizer and manager are
saved every so often, for when all replicas go down.

In torchft 0.2.0 they do: over gloo, its DistributedDataParallel ends the process (an assertion in its communication
hook) when a reduction fails, that is, in all survivors. So the tuned set-up has the manager reduce the gradients, which
is what the same class does inside, and survives.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.shape import SAMPLES, WORKER_BATCH, WORKERS
from bench.peers.step_lines import StepLines
from bench.peers.systems import Command, SetUp
from bench.peers.workload import accumulate, digest, optimizer, seeded_model

PACKAGES = ("torch==2.13.0", "torchft==0.2.0", "numpy==2.4.6")
CHECKPOINT = "checkpoint-{}.pt"


@dataclass(frozen=True, slots=True)
class Options:
    lighthouse: tuple[str, ...]
    wrapper: str  # "ddp": torchft's DistributedDataParallel; "manager": its manager's allreduce, called by hand
    collective_seconds: float  # of the process group
    rpc_seconds: float  # of the manager
    every: int  # steps a checkpoint


def commands(options: Options, bin_directory: Path, directory: Path) -> list[Command]:
    port = free_port()
    lighthouse = (str(bin_directory / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "1")
    variables = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    torchrun = (str(bin_directory / "torchrun"), "--standalone", "--nproc-per-node=1", "--max-restarts=1000")
    values = (options.wrapper, str(options.collective_seconds), str(options.rpc_seconds), str(options.every))
    replicas = [
        Command((*torchrun, "-m", "bench.peers.torchft_ddp", str(directory), str(replica), *values), variables)
        for replica in range(WORKERS)
    ]
    return [Command((*lighthouse, *options.lighthouse), {"RUST_BACKTRACE": "1"}), *replicas]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


SET_UPS = (
    SetUp(
        "torchft",
        "recommended",
        "its DistributedDataParallel over gloo (5 s) under its manager (30 s), lighthouse `--min_replicas 1"
        " --quorum_tick_ms 100 --join_timeout_ms 10000`, a torchrun for each replica, the loader's place kept at every"
        " step and a checkpoint every 10; in 0.2.0 this class ends the process when a reduction over gloo fails, so the"
        " survivors of a kill are started again as well",
        PACKAGES,
        partial(commands, Options(("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"), "ddp", 5.0, 30.0, 10)),
        streams=WORKERS,
    ),
    SetUp(
        "torchft",
        "tuned",
        "gradients reduced by `manager.allreduce` without that class, which survives; gloo 2 s, manager 10 s,"
        " lighthouse `--quorum_tick_ms 20 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000`, a checkpoint every 2"
        " steps",
        PACKAGES,
        partial(
            commands,
            Options(
                ("--quorum_tick_ms", "20", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
                "manager",
                2.0,
                10.0,
                2,
            ),
        ),
        streams=WORKERS,
    ),
)


def main() -> None:
    from torchft import (  # type: ignore[import-not-found]
        DistributedDataParallel,
        DistributedSampler,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    directory, replica, wrapper = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    collective, rpc = (timedelta(seconds=float(seconds)) for seconds in sys.argv[4:6])
    every = int(sys.argv[6])
    model = seeded_model()
    adam = optimizer(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=collective),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"bench_{replica}",
        timeout=rpc,
        hostname="localhost",
        init_sync=False,  # all begin with the same seed, and the documentation asks for this then
    )
    restore(directory, replica, load, manager)
    reduced = DistributedDataParallel(manager, model) if wrapper == "ddp" else model
    managed = Optimizer(manager, adam)
    sampler: Any = DistributedSampler(
        range(SAMPLES), replica_rank=replica, num_replica_groups=WORKERS, group_rank=0, num_replicas=1, shuffle=False
    )
    mine = list(sampler)
    begin_together(directory, replica)
    lines = StepLines(directory, replica, resume=None)
    place = kept_place(directory, replica)
    while True:
        train_step(manager, managed, reduced, model, mine[place : place + WORKER_BATCH], lines)
        place += WORKER_BATCH
        keep_place(directory, replica, place)
        if manager.current_step() % every == 0:
            save(directory, replica, {**state(), "torchft": manager.state_dict()})


def train_step(manager: Any, managed: Any, reduced: Any, model: Any, batch: list[int], lines: StepLines) -> None:
    at: dict[str, int] = {}

    def attempt(loss: float) -> None:
        counts = manager.is_participating() if manager.num_participants() else False  # waits for the quorum
        at.update(step=manager.current_step(), group=manager._quorum_id)  # healed: the others' step
        lines.write("attempt", **at, samples=batch, counts=counts, loss=loss)

    managed.zero_grad()  # begins the quorum
    accumulate(reduced, batch, lines, attempt)
    if reduced is model:
        allreduce(manager, model)
    managed.step()  # if the vote is for it
    if manager.current_step() > at["step"]:
        lines.write("commit", **at, digest=digest(model))


def allreduce(manager: Any, model: Any) -> None:
    """All gradients at once. A failure is the manager's to know, and its vote's."""
    import torch

    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def begin_together(directory: Path, replica: int) -> None:
    """The first quorum has all replicas, so that runs can be compared. One that starts again finds all files there."""
    (directory / f"ready-{replica}").touch()
    while len(list(directory.glob("ready-*"))) < WORKERS:
        time.sleep(0.05)


def kept_place(directory: Path, replica: int) -> int:
    path = directory / f"place-{replica}"
    return int(path.read_text()) if path.exists() else 0


def keep_place(directory: Path, replica: int, place: int) -> None:
    partial = directory / f"place-{replica}.partial"
    partial.write_text(str(place))
    partial.replace(directory / f"place-{replica}")


def restore(directory: Path, replica: int, load: Callable[[dict[str, Any]], None], manager: Any) -> None:
    import torch

    path = directory / CHECKPOINT.format(replica)
    if path.exists():
        saved = torch.load(path)
        load(saved)
        manager.load_state_dict(saved["torchft"])


def save(directory: Path, replica: int, state: dict[str, Any]) -> None:
    import torch

    path = directory / CHECKPOINT.format(replica)
    partial_path = path.with_suffix(".partial")
    torch.save(state, partial_path)
    partial_path.replace(path)


if __name__ == "__main__":
    main()
