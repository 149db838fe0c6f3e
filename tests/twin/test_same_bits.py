"""P1 on real tensors: the same bits for any workers and any changes, and the same as a plain loop's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataloader.corpus import build_dataset
from dataloader.shards import TokenShards
from dataloader.stdlib_text import SourceFile
from dataloader.stream import SampleStream
from runtime.recipe import build_recipe
from runtime.shards.layout import views
from tests.twin import twin
from tests.twin.house import House

SEQ_LEN = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some tokens."""
    words = random.Random(1)
    names = [f"name_{i}" for i in range(200)]
    files = [
        SourceFile(f"{n}.py", "\n".join(" ".join(words.choices(names, k=8)) for _ in range(60)).encode())
        for n in range(40)
    ]
    directory = tmp_path_factory.mktemp("data")
    build_dataset(directory, files, 400)
    return directory


def job_of(data: Path, **train: Any) -> dict[str, Any]:
    given = {"steps": 20, "seed": 5, "global_batch": 16, "micro_batch": 1, "logical_ranks": 8, **train}
    return {
        "run": {"name": "twin"},
        "train": given,
        "recipe": None,
        "data": {"path": str(data), "seq_len": SEQ_LEN},
        "model": {
            "vocab_size": TokenShards(data, "train").vocab_size,
            "hidden_size": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "intermediate_size": 80,
            "dropout": 0.1,
        },
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "constant", "warmup_steps": 4},
        "checkpoint": {},
        "faults": [],
    }


def house_of(data: Path, tmp_path: Path, seed: int = 0, **train: Any) -> House:
    return House(job_of(data, **train), tmp_path / f"checkpoints-{seed}-{random.random()}", seed)


def undisturbed(data: Path, tmp_path: Path, workers: int, seed: int = 0, **train: Any) -> House:
    house = house_of(data, tmp_path, seed, **train)
    house.change(list(range(workers)))
    house.run()
    return house


def digests(house: House) -> list[str]:
    return [house.records[step].digest for step in sorted(house.records)]


def test_the_dumb_twin_gives_the_same_bits(data: Path, tmp_path: Path) -> None:
    check_against_twin(undisturbed(data, tmp_path, 3))


def test_a_poisoned_step_is_the_twins_that_skips_it(data: Path, tmp_path: Path) -> None:
    """By three workers, who must agree on it, and by one, who can only compute it again itself."""
    for workers in (3, 1):
        house = house_of(data, tmp_path, workers, steps=8)
        poison = [{"at_step": 4, "fault": "poison,what=nan", "wait": False}]
        house = House({**house.job, "faults": poison}, tmp_path / f"poisoned-{workers}", workers)
        house.change(list(range(workers)))
        house.run()
        assert [house.records[step].verdict == "skip" for step in range(8)] == [step == 4 for step in range(8)]
        assert (house.records[4].attempts, house.records[4].reason) == (2, "the gradient's norm is nan")
        assert house.computed == 9 * 8  # ranks, of one step twice
        check_against_twin(house, skip=(4,))


def check_against_twin(house: House, skip: tuple[int, ...] = ()) -> None:
    steps = house.train.steps
    recipe = build_recipe(None, house.job)
    model = recipe.build_model()
    stream = SampleStream(TokenShards(Path(house.job["data"]["path"]), "train"), SEQ_LEN, house.train.seed)
    groups = recipe.param_groups(model)
    plain = twin.train(model, groups, stream, house.job, skip)

    records = [house.records[step] for step in range(steps)]
    assert [r.loss for r in records] == plain["losses"]
    assert [r.grad_norm for r in records if r.verdict == "commit"] == plain["norms"]
    assert records[-1].loss < records[0].loss
    order = {id(p): n for n, p in enumerate(p for g in groups for p in g["params"])}
    place = {name: order[id(p)] for name, p in model.named_parameters()}
    for flat, whole in (
        (house.parameters(), plain["parameters"]),
        (house.moments("exp_avg"), plain["exp_avg"]),
        (house.moments("exp_avg_sq"), plain["exp_avg_sq"]),
    ):
        for name, view in views(flat, house.built.layout).items():
            assert same_bits(view, whole[place[name]]), name


@pytest.mark.parametrize("logical_ranks", [8, 6])
def test_any_number_of_workers_gives_the_same_bits(data: Path, tmp_path: Path, logical_ranks: int) -> None:
    batch = {"steps": 6, "logical_ranks": logical_ranks, "global_batch": logical_ranks * 2}
    reference = digests(undisturbed(data, tmp_path, 1, **batch))
    assert len(reference) == 6
    for workers in (2, 3, 4, logical_ranks):
        house = undisturbed(data, tmp_path, workers, seed=workers, **batch)
        assert digests(house) == reference, workers
        assert house.computed == 6 * logical_ranks


@pytest.mark.parametrize("seed", range(12))
def test_deaths_and_joins_at_any_moment_give_the_same_bits(data: Path, tmp_path: Path, seed: int) -> None:
    reference = digests(undisturbed(data, tmp_path, 1, steps=10))
    chance = random.Random(seed)
    house = house_of(data, tmp_path, seed, steps=10)
    members = [0, 1, 2, 3]
    house.change(members)
    newest = 3
    for _ in range(4):
        events = chance.randrange(20, 200)

        def passed() -> bool:
            nonlocal events
            events -= 1
            return events <= 0

        house.run(passed)
        if any(w.ended for w in house.workers.values()):
            break
        if len(members) > 2 and chance.random() < 0.6 and backed(house):
            members = [w for w in members if w != chance.choice(members)]
        else:
            newest += 1
            members = [*members, newest]
        house.change(members)
    house.run()
    assert digests(house) == reference


def backed(house: House) -> bool:
    """Every shard has two complete copies, so that losing one worker loses nothing."""
    copies = dict.fromkeys(range(house.train.shards), 0)
    for worker in house.workers.values():
        for shard, holding in worker.tx.holdings.items():
            copies[shard] += holding.complete
    return min(copies.values()) >= 2


def test_no_worker_sends_much_more_than_another(data: Path, tmp_path: Path) -> None:
    for workers in (2, 4, 8):
        house = undisturbed(data, tmp_path, workers, steps=4)
        sent = sorted(w.bytes_sent for w in house.workers.values())
        assert sent[-1] <= 1.5 * sent[len(sent) // 2]


def test_optimizer_state_is_held_twice_and_no_more(data: Path, tmp_path: Path) -> None:
    one = undisturbed(data, tmp_path, 1, steps=2).workers[0].arithmetic.optimizer_bytes()
    for workers in (2, 3, 4):
        house = undisturbed(data, tmp_path, workers, steps=2)
        held = sum(w.arithmetic.optimizer_bytes() for w in house.workers.values())
        assert 2.0 * one <= held <= 2.1 * one


def test_adding_in_order_of_arrival_gives_other_bits() -> None:
    """The negative control: what the tree is for."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, generator=generator) for _ in range(8)]
    sums = {bytes_of(twin.tree(gradients))}
    for seed in range(8):
        arrival = random.Random(seed).sample(gradients, len(gradients))
        total = torch.zeros(4096)
        for gradient in arrival:
            total += gradient
        sums.add(bytes_of(total))
    assert len(sums) > 4


def bytes_of(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bytes_of(a) == bytes_of(b)
