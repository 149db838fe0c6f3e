"""Pins that are in force, a class that tells machines apart, a probe that any host can make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.deterministic
import xxhash
from numpy.typing import NDArray

from dataloader.errors import InternalError
from runtime import numerics, operations
from runtime.compute import MicroBatches
from runtime.config import TrainConfig
from runtime.numerics import environment, numerics_class, pin, probe, probe_weights
from runtime.recipe import build_recipe
from runtime.recipe_checks import group_names
from runtime.rng import set_build_streams, stream_seed
from runtime.shards.layout import FlatLayout, flat_layout, views

pytestmark = pytest.mark.usefixtures("pinned")
TRAIN = TrainConfig(steps=1, global_batch=4, micro_batch=2, logical_ranks=2)
JOB = {
    "train": {"seed": 1},
    "data": {"seq_len": 16},
    "model": {"vocab_size": 50, "hidden_size": 32, "layers": 1, "heads": 4, "dropout": 0.2},
    "optimizer": {},
}


class Few:
    """Every token is below 40, of a vocabulary of 50."""

    def tokens(self, first: int, count: int) -> NDArray[np.int64]:
        return (np.arange(first, first + count * 17, dtype=np.int64) % 40).reshape(count, 17)


def build() -> tuple[MicroBatches, FlatLayout]:
    recipe = build_recipe(None, JOB)
    model = recipe.build_model()
    layout = flat_layout(group_names(model, recipe.param_groups(model)), 2)
    return MicroBatches(recipe, model, layout, Few(), TRAIN), layout


def test_the_environment_fixes_threads_and_waits_passively() -> None:
    values = environment(TRAIN.model_copy(update={"threads_per_worker": 3}))
    assert values["OMP_NUM_THREADS"] == values["MKL_NUM_THREADS"] == "3"
    assert values["OMP_DYNAMIC"] == values["MKL_DYNAMIC"] == "FALSE"
    assert values["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "MKL_CBWR" not in values
    portable = environment(TRAIN.model_copy(update={"numerics": "portable"}))
    assert portable["ATEN_CPU_CAPABILITY"] == "avx2"
    assert portable["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert portable["MKL_CBWR"] == "COMPATIBLE"


def test_pins_are_in_force() -> None:
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    pin(TRAIN)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert float(torch.tensor(1e-40) * 1) > 0  # denormals aren't flushed


def test_the_class_is_the_same_when_asked_again_also_on_another_thread() -> None:
    first = numerics_class(TRAIN)
    later: list[dict[str, str]] = []

    def ask() -> None:
        pin(TRAIN)
        later.append(numerics_class(TRAIN))

    torch.rand(3)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert later == [first]


def test_the_class_names_versions_and_some_twenty_families() -> None:
    facts = numerics_class(TRAIN)
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert facts["threads per worker"] == "1"
    assert facts["attention"] == "flash_attention"
    assert "fused" in facts["optimizer"]
    assert sum(name.startswith("operation: ") for name in facts) >= 20
    assert all(isinstance(value, str) and value for value in facts.values())


def test_a_process_that_is_not_pinned_has_no_class() -> None:
    with pytest.raises(InternalError, match="not 4: not pinned"):
        numerics_class(TRAIN.model_copy(update={"threads_per_worker": 4}))


class FakeCuda:
    """As much of torch.cuda as is looked at, on a host with two kinds of GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready, self.seeds = False, list[int]()
        names = ["NVIDIA H200", "NVIDIA A100", "NVIDIA H200"]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: setattr(self, "ready", True))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.ready)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.seeds.append)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)


def test_generators_of_cuda_are_set_from_the_first_build_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    pin(TRAIN)
    set_build_streams(5)
    assert cuda.seeds == [stream_seed(5, 0, 0, "build.cuda")]


@pytest.mark.parametrize(
    ("says", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\nGCC 12.3.0\n",
            "560.35.03",
        ),
        ("nothing of the kind", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_class_names_what_cuda_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None, driver: str
) -> None:
    without = numerics_class(TRAIN)
    FakeCuda(monkeypatch)
    monkeypatch.setattr(numerics, "DRIVER_VERSION", tmp_path / "version")
    if says is not None:
        (tmp_path / "version").write_text(says)
    added = numerics_class(TRAIN).items() - without.items()
    assert dict(added) == {
        "GPU": "NVIDIA A100, NVIDIA H200",
        "GPU driver": driver,
        "CUDA": "12.8",
        "cuDNN": "91002",
    }


def test_operations_leave_the_global_generators_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    operations.operation_digests()
    assert torch.equal(state, torch.get_rng_state())


def test_another_kind_of_machine_is_told_apart() -> None:
    """The same host without its wide vectors stands in for another one."""
    script = (
        "from runtime.config import TrainConfig; from runtime.numerics import pin, numerics_class; import json;"
        f"t = TrainConfig.model_validate({TRAIN.model_dump()}); pin(t); print(json.dumps(numerics_class(t)))"
    )
    root = Path(__file__).parents[3]
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this machine has no wide vectors to leave out")
    mine, theirs = numerics_class(TRAIN), json.loads(done.stdout)
    differing = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
    assert "operation: exponentials" in differing
    assert all(name.startswith("operation: ") for name in differing)


def test_the_probe_repeats_and_leaves_the_model_as_it_was() -> None:
    micro_batches, layout = build()
    before = micro_batches.parameters()
    first = probe(micro_batches, layout)
    assert torch.equal(micro_batches.parameters(), before)
    micro_batches.install(before + 1)
    torch.rand(5)
    assert probe(micro_batches, layout) == first
    assert len(first) == 32


def test_the_probe_sees_a_change_of_one_bit_in_the_arithmetic() -> None:
    micro_batches, layout = build()
    first = probe(micro_batches, layout)
    sines = micro_batches.buffers()["model.rope_sines"]
    sines[5, 0, 2] = torch.nextafter(sines[5, 0, 2], torch.tensor(2.0))
    assert probe(micro_batches, layout) != first


def test_probe_weights_are_the_same_on_every_host_and_sane() -> None:
    _, layout = build()
    flat = probe_weights(layout)
    named = views(flat, layout)
    assert xxhash.xxh3_64_hexdigest(flat.numpy().data) == "32edf8ca2507ac2b"
    assert named["model.norm.weight"].mean().item() == pytest.approx(1.0, abs=0.03)
    matrix = named["model.layers.0.mlp.up_proj.weight"]
    assert matrix.mean().abs().item() < 0.01
    assert 0.3 < matrix.std().item() * 32**0.5 < 1.5


def test_the_probe_gradient_is_finite_and_touches_every_parameter() -> None:
    micro_batches, layout = build()
    micro_batches.install(probe_weights(layout))
    gradient = torch.empty(layout.total)
    loss = micro_batches.gradient_of(Few().tokens(0, 2), gradient)
    assert np.isfinite(loss)
    assert bool(gradient.isfinite().all())
    assert all(bool(view.any()) for view in views(gradient, layout).values())
