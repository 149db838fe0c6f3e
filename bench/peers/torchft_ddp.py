"""torchft: each worker a replica group of its own under a torchrun of its own, with a lighthouse between them.

    torchrun --standalone --nproc-per-node=1 --max-restarts=1000 \\
        -m bench.peers.torchft_ddp DIRECTORY REPLICA COLLECTIVE_SECONDS RPC_SECONDS

As in its example for fault tolerant DDP, and with what that leaves to the user: the loader's place is kept at every
step, so that a replica that starts again goes on in its own part of the data.
"""

from __future__ import annotations

import socket
import sys
import time
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


@dataclass(frozen=True, slots=True)
class Times:
    lighthouse: tuple[str, ...]
    collective_seconds: float  # of the process group
    rpc_seconds: float  # of the manager


def commands(times: Times, bin_directory: Path, directory: Path) -> list[Command]:
    port = free_port()
    lighthouse = (str(bin_directory / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "1")
    variables = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    torchrun = (str(bin_directory / "torchrun"), "--standalone", "--nproc-per-node=1", "--max-restarts=1000")
    seconds = (str(times.collective_seconds), str(times.rpc_seconds))
    replicas = [
        Command((*torchrun, "-m", "bench.peers.torchft_ddp", str(directory), str(replica), *seconds), variables)
        for replica in range(WORKERS)
    ]
    return [Command((*lighthouse, *times.lighthouse), {"RUST_BACKTRACE": "1"}), *replicas]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


SET_UPS = (
    SetUp(
        "torchft",
        "recommended",
        "lighthouse `--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000`, gloo 5 s, manager 30 s, a torchrun"
        " for each replica",
        PACKAGES,
        partial(commands, Times(("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"), 5.0, 30.0)),
        streams=WORKERS,
    ),
    SetUp(
        "torchft",
        "tuned",
        "the same with `--quorum_tick_ms 20 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000`, gloo 2 s, manager"
        " 10 s",
        PACKAGES,
        partial(
            commands,
            Times(("--quorum_tick_ms", "20", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"), 2.0, 10.0),
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

    directory, replica = Path(sys.argv[1]), int(sys.argv[2])
    collective, rpc = (timedelta(seconds=float(seconds)) for seconds in sys.argv[3:5])
    model = seeded_model()
    adam = optimizer(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=collective),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"bench_{replica}",
        timeout=rpc,
        hostname="localhost",
        init_sync=False,  # all begin with the same seed, and the documentation asks for this then
    )
    ddp = DistributedDataParallel(manager, model)
    managed = Optimizer(manager, adam)
    sampler: Any = DistributedSampler(
        range(SAMPLES), replica_rank=replica, num_replica_groups=WORKERS, group_rank=0, num_replicas=1, shuffle=False
    )
    mine = list(sampler)
    begin_together(directory, replica)
    lines = StepLines(directory, replica, resume=None)
    place = kept_place(directory, replica)
    while True:
        batch = mine[place : place + WORKER_BATCH]
        train_step(manager, managed, ddp, model, batch, lines)
        place += WORKER_BATCH
        keep_place(directory, replica, place)


def train_step(manager: Any, managed: Any, ddp: Any, model: Any, batch: list[int], lines: StepLines) -> None:
    at: dict[str, int] = {}

    def attempt(loss: float) -> None:
        counts = manager.is_participating() if manager.num_participants() else False  # waits for the quorum
        at.update(step=manager.current_step(), group=manager._quorum_id)  # healed: the others' step
        lines.write("attempt", **at, samples=batch, counts=counts, loss=loss)

    managed.zero_grad()  # begins the quorum
    accumulate(ddp, batch, lines, attempt)
    managed.step()  # if the vote is for it
    if manager.current_step() > at["step"]:
        lines.write("commit", **at, digest=digest(model))


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


if __name__ == "__main__":
    main()
