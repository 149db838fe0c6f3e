"""Ray Train (v2): a TorchTrainer with FailureConfig; the worker group starts again from the last reported checkpoint.

python -m bench.peers.ray_train_ddp DIRECTORY EVERY
"""

from __future__ import annotations

import sys
import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.shape import WORKERS
from bench.peers.step_lines import StepLines
from bench.peers.systems import Command, SetUp
from bench.peers.torchrun_ddp import train_step
from bench.peers.workload import optimizer, seeded_model

CHECKPOINT = "checkpoint.pt"
PACKAGES = ("torch==2.13.0", "ray[train]==2.60.0", "numpy==2.4.6")


def commands(every: int, health_check: str | None, bin_directory: Path, directory: Path) -> list[Command]:
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if health_check is not None:
        variables["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = health_check
    script = ("-m", "bench.peers.ray_train_ddp", str(directory), str(every))
    return [Command((str(bin_directory / "python"), *script), variables)]


SET_UPS = (
    SetUp(
        "Ray Train",
        "recommended",
        "v2, `FailureConfig(max_failures=-1)`, a checkpoint reported every 10 steps",
        PACKAGES,
        partial(commands, 10, None),
    ),
    SetUp(
        "Ray Train",
        "tuned",
        "the same with a checkpoint every 2 steps and `RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.2` (2 s)",
        PACKAGES,
        partial(commands, 2, "0.2"),
    ),
)


def main() -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from bench.peers.ray_train_ddp import train  # by its module's name, so that it is not pickled by value

    directory, every = Path(sys.argv[1]), int(sys.argv[2])
    ray.init(
        address="local",
        num_cpus=WORKERS + 2,
        include_dashboard=False,
        _temp_dir=str(directory / "r"),
        log_to_driver=False,
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"directory": str(directory), "every": every},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run",
            storage_path=str(directory / "storage"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def train(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    directory, every = Path(config["directory"]), config["every"]
    rank = ray.train.get_context().get_world_rank()
    model = seeded_model()
    adam = optimizer(model.parameters())
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / CHECKPOINT)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = ray.train.torch.prepare_model(model)
    group = _shared_name()
    lines = StepLines(directory, rank, resume=step)
    while True:
        train_step(ddp, model, adam, step, rank, group, lines)
        step += 1
        if step % every == 0:
            _report(model, adam, step, rank)


def _shared_name() -> str:
    """One for this start of the worker group."""
    import torch.distributed as dist

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    return name[0]


def _report(model: Any, adam: Any, step: int, rank: int) -> None:
    import ray.train
    import torch

    if rank != 0:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": adam.state_dict(), "step": step}
        torch.save(state, Path(folder) / CHECKPOINT)
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    main()
