"""Logical ranks give the same bits in any process, heap and order, by the documented rule.

Run as a script, it prints this process's digests, for a test to compare with another's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from dataloader.errors import InternalError, RecipeError
from dataloader.stream import data_digest, fold_digests
from runtime.compute import MicroBatches
from runtime.config import TrainConfig
from runtime.numerics import environment, pin, probe
from runtime.recipe import GuardedRecipe, build_recipe
from runtime.recipe_checks import group_names
from runtime.rng import set_streams
from runtime.shards.layout import FlatLayout, flat_layout, views

pytestmark = pytest.mark.usefixtures("pinned")
TRAIN = TrainConfig(steps=4, seed=11, global_batch=24, micro_batch=2, logical_ranks=4)
VOCABULARY, SEQ_LEN = 97, 19
JOB: dict[str, Any] = {
    "train": {"seed": 11},
    "data": {"seq_len": SEQ_LEN},
    "model": {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 72,
        "dropout": 0.1,
    },
    "optimizer": {},
}


class Counting:
    """Tokens by arithmetic."""

    def tokens(self, first: int, count: int) -> NDArray[np.int64]:
        places = np.arange(first * SEQ_LEN, (first + count) * SEQ_LEN, dtype=np.int64).reshape(count, SEQ_LEN)
        ids = np.concatenate((places, places[:, -1:] + 1), axis=1)
        return ids * 2654435761 % 2**32 * VOCABULARY >> 32


def build(recipe: GuardedRecipe | None = None) -> tuple[MicroBatches, FlatLayout, nn.Module]:
    recipe = recipe or build_recipe(None, JOB)
    model = recipe.build_model()
    layout = flat_layout(group_names(model, recipe.param_groups(model)), TRAIN.shards)
    return MicroBatches(recipe, model, layout, Counting(), TRAIN), layout, model


def digest(gradient: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(gradient.numpy().data)


def run(micro_batches: MicroBatches, layout: FlatLayout, step: int, rank: int) -> tuple[str, Any]:
    gradient = torch.full((layout.total,), 7.0)
    work = micro_batches.run_rank(step, rank, gradient, lambda: False, lambda: None)
    return digest(gradient), work


def disturb_heap() -> list[Any]:
    kept = []
    for n in range(300):
        block = torch.full((n * 37 % 5000 + 1,), float("nan"))
        if n % 3:
            kept.append((block, bytearray(n * 13 % 400 + 1)))
    return kept


def digests_of_all_ranks() -> list[str]:
    micro_batches, layout, _ = build()
    return [run(micro_batches, layout, 2, rank)[0] for rank in range(4)] + [probe(micro_batches, layout)]


def test_another_process_with_another_heap_gives_the_same_bits() -> None:
    root = Path(__file__).parents[3]
    variables = {**os.environ, **environment(TRAIN), "PYTHONPATH": str(root), "MALLOC_PERTURB_": "171"}
    done = subprocess.run(
        [sys.executable, __file__], env=variables, cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == digests_of_all_ranks()


def test_order_heap_and_what_was_drawn_before_do_not_matter() -> None:
    micro_batches, layout, _ = build()
    first = [run(micro_batches, layout, 2, rank) for rank in range(4)]
    assert len({found for found, _ in first}) == 4
    kept = disturb_heap()
    again, _, _ = build()
    for rank in (3, 0, 2, 1):
        torch.rand(rank + 1)
        assert run(again, layout, 2, rank) == first[rank]
    assert kept


def test_the_gradient_is_the_left_fold_of_the_micro_batches_gradients() -> None:
    """Restated without the class: zeroes, plus each micro-batch's own gradient in order, dropout on."""
    micro_batches, layout, _ = build()
    found, work = run(micro_batches, layout, step=1, rank=2)

    recipe = build_recipe(None, JOB)
    model = recipe.build_model()
    total, losses, data = torch.zeros(layout.total), [], []
    for micro_batch in (6, 7, 8):
        tokens = Counting().tokens(1 * 24 + micro_batch * 2, 2)
        set_streams(11, 1, micro_batch)
        loss, _ = recipe.loss(model, {"tokens": torch.from_numpy(tokens)})
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        own = torch.zeros(layout.total)
        for name, view in views(own, layout).items():
            view.copy_(model.get_parameter(name).grad)  # type: ignore[arg-type]
        total += own
        losses.append(loss.item())
        data.append(data_digest(tokens))
    assert digest(total) == found
    assert work.losses == tuple(losses)
    assert work.tokens == 3 * 2 * SEQ_LEN
    assert work.data_digest == fold_digests(data)


def test_dropout_makes_steps_with_equal_tokens_differ() -> None:
    micro_batches, layout, _ = build()
    micro_batches.stream = type("Same", (Counting,), {"tokens": lambda _, first, count: Counting().tokens(0, count)})()
    assert run(micro_batches, layout, 0, 0)[0] != run(micro_batches, layout, 1, 0)[0]


def test_installing_moves_the_model() -> None:
    micro_batches, layout, model = build()
    before = micro_batches.parameters()
    assert run(micro_batches, layout, 0, 0) == run(micro_batches, layout, 0, 0)
    kept, _ = run(micro_batches, layout, 0, 0)
    micro_batches.install(before * 1.5)
    assert torch.equal(model.get_parameter("model.norm.weight"), torch.full((48,), 1.5))
    assert run(micro_batches, layout, 0, 0)[0] != kept
    micro_batches.install(before[:100], before[100:])
    assert run(micro_batches, layout, 0, 0)[0] == kept
    with pytest.raises(InternalError, match="99 parameters were given"):
        micro_batches.install(before[:99])
    before.zero_()
    assert run(micro_batches, layout, 0, 0)[0] == kept  # it was copied


def test_taking_the_model_over_keeps_its_bits_and_its_ties() -> None:
    weights = build_recipe(None, JOB).build_model().state_dict()
    micro_batches, layout, model = build()
    flat = views(micro_batches.parameters(), layout)
    assert set(flat) == set(weights)
    assert all(torch.equal(flat[name], weights[name]) for name in weights)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    padding = micro_batches.parameters()
    for view in views(padding, layout).values():
        view.zero_()
    assert not padding.any()


def test_cancelling_stops_before_the_next_micro_batch_and_leaves_nothing() -> None:
    micro_batches, layout, model = build()
    expected = run(micro_batches, layout, 0, 1)
    done: list[int] = []
    gradient = torch.empty(layout.total)
    work = micro_batches.run_rank(0, 1, gradient, lambda: len(done) == 2, lambda: done.append(1))
    assert work is None
    assert len(done) == 2
    assert all(p.grad is None for p in model.parameters())
    assert run(micro_batches, layout, 0, 1) == expected


def test_progress_is_told_after_each_micro_batch() -> None:
    micro_batches, layout, _ = build()
    done: list[int] = []
    micro_batches.run_rank(0, 0, torch.empty(layout.total), lambda: False, lambda: done.append(1))
    assert len(done) == TRAIN.micro_batches_per_rank == 3


def test_a_loss_that_is_not_finite_is_reported_as_it_is() -> None:
    micro_batches, layout, _ = build()
    micro_batches.install(micro_batches.parameters() * float("inf"))
    _, work = run(micro_batches, layout, 0, 0)
    assert all(np.isnan(loss) for loss in work.losses)


def test_buffers_are_the_models_own() -> None:
    micro_batches, layout, _ = build()
    before = run(micro_batches, layout, 0, 0)[0]
    buffers = micro_batches.buffers()
    assert set(buffers) == {"model.rope_cosines", "model.rope_sines"}
    buffers["model.rope_sines"].zero_()
    assert run(micro_batches, layout, 0, 0)[0] != before


@pytest.mark.parametrize("breach", ["model.zero_grad()", "next(model.parameters()).grad = None"])
def test_a_loss_that_touches_gradients_is_refused(breach: str) -> None:
    class Meddling:
        def __init__(self) -> None:
            self.inner = build_recipe(None, JOB).inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def loss(self, model: nn.Module, batch: Any) -> Any:
            exec(breach, {"model": model})
            return self.inner.loss(model, batch)

    micro_batches, layout, model = build(GuardedRecipe("mine:Meddling", Meddling(), seed=1))
    with pytest.raises(RecipeError, match=r"mine:Meddling: loss: replaced the gradient of model\.embed_tokens"):
        run(micro_batches, layout, 0, 0)
    assert all(p.grad is None for p in model.parameters())


if __name__ == "__main__":
    pin(TRAIN)
    held = disturb_heap()
    print("\n".join(digests_of_all_ranks()))
