"""Each clause of a recipe's contract, broken once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from dataloader.errors import RecipeError
from runtime.recipe import Batch, GuardedRecipe, ParamGroup, build_recipe
from runtime.recipe_checks import check_optimizer, check_recipe, group_names, group_options
from runtime.shards.state import STORABLE

BATCH = {"tokens": torch.arange(18).view(2, 9) % 11}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(nn.functional.dropout(self.norm(self.embedding(tokens)), 0.1))
        return out


class Recipe:
    def build_model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), len(logits)

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
        ]

    def optimizer(self, params: list[ParamGroup]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, fused=True)


def guarded(**methods: Any) -> GuardedRecipe:
    return GuardedRecipe("mine:Recipe", type("Changed", (Recipe,), methods)(), seed=1)


def refusal(**methods: Any) -> str:
    recipe = guarded(**methods)
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe, recipe.build_model(), BATCH, 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_recipe_passes_and_its_model_is_as_before() -> None:
    recipe = guarded()
    model = recipe.build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = torch.ones(11, 8)
    model.embedding.weight.grad = own  # type: ignore[union-attr]
    check_recipe(recipe, model, BATCH, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(grads) == ["embedding.weight"]
    assert grads["embedding.weight"] is own
    assert torch.equal(own, torch.ones(11, 8))


def test_names_come_by_group_in_order_of_definition() -> None:
    recipe, model = guarded(), Model()
    groups = recipe.param_groups(model)
    groups[0]["params"].reverse()
    assert group_names(model, groups) == [
        [("embedding.weight", (11, 8)), ("out.weight", (11, 8))],
        [("norm.weight", (8,)), ("norm.bias", (8,)), ("out.bias", (11,))],
    ]
    assert group_options(groups) == [{"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 0.02}]


def test_tied_parameters_have_one_name() -> None:
    model = Model()
    model.out.weight = model.embedding.weight
    names = group_names(model, guarded().param_groups(model))
    assert names[0] == [("embedding.weight", (11, 8))]


class TestGroups:
    def test_a_parameter_in_no_group(self) -> None:
        message = refusal(param_groups=lambda self, m: Recipe.param_groups(self, m)[:1])
        assert "norm.weight, norm.bias, out.bias are in no group" in message

    def test_a_parameter_in_two_groups(self) -> None:
        message = refusal(param_groups=lambda self, m: [*Recipe.param_groups(self, m), {"params": [m.out.bias]}])
        assert "out.bias is in group 1 and again in group 2" in message

    def test_a_tensor_that_is_no_parameter(self) -> None:
        message = refusal(param_groups=lambda self, m: [{"params": [*m.parameters(), torch.zeros(3)]}])
        assert "group 0 has a tensor of shape [3] that is not a parameter of the model" in message

    def test_a_group_without_params(self) -> None:
        assert "param_groups: KeyError: 'params'" in refusal(param_groups=lambda self, m: [{"lr": 1}])

    def test_groups_that_change_from_call_to_call(self) -> None:
        def shuffled(self: Recipe, model: nn.Module) -> list[ParamGroup]:
            self.calls = getattr(self, "calls", 0) + 1  # type: ignore[attr-defined]
            groups = Recipe.param_groups(self, model)
            return groups if self.calls % 2 else groups[::-1]  # type: ignore[attr-defined]

        assert "other groups when asked again" in refusal(param_groups=shuffled)


class TestParameters:
    def test_of_another_type(self) -> None:
        message = refusal(build_model=lambda self: Model().bfloat16())
        assert "embedding.weight (torch.bfloat16), " in message
        assert "not float32" in message

    def test_frozen(self) -> None:
        def frozen(self: Recipe) -> nn.Module:
            model = Model()
            model.norm.requires_grad_(False)
            return model

        assert "norm.weight, norm.bias are frozen; register" in refusal(build_model=frozen)

    def test_elsewhere_than_on_the_cpu(self) -> None:
        message = refusal(build_model=lambda self: Model().to("meta"))
        assert "build_model: embedding.weight (meta), norm.weight (meta), " in message
        assert "are not on the CPU; build the whole model there" in message


class TestBuffers:
    @staticmethod
    def having(buffer: Tensor) -> Callable[[Recipe], nn.Module]:
        def build(self: Recipe) -> nn.Module:
            model = Model()
            model.register_buffer("turns", buffer, persistent=False)
            return model

        return build

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint64, torch.float8_e4m3fn])
    def test_of_a_type_that_a_checkpoint_cannot_hold(self, dtype: torch.dtype) -> None:
        message = refusal(build_model=self.having(torch.zeros(4).to(dtype)))
        assert f"build_model: buffer turns ({dtype}) is of a type that a checkpoint can't hold" in message
        assert "keep a complex tensor as two real ones, and convert any other to one of int64, float64, " in message

    @pytest.mark.parametrize("dtype", [*STORABLE])
    def test_of_any_other_type_are_taken(self, dtype: torch.dtype) -> None:
        recipe = guarded(build_model=self.having(torch.ones(4).to(dtype)))
        check_recipe(recipe, recipe.build_model(), BATCH, 1)

    def test_elsewhere_than_on_the_cpu(self) -> None:
        message = refusal(build_model=self.having(torch.zeros(4, device="meta")))
        assert "buffer turns (meta) is not on the CPU" in message


class TestLoss:
    def test_changes_a_buffer(self) -> None:
        message = refusal(build_model=lambda self: nn.Sequential(Model(), nn.BatchNorm1d(8)))
        assert "loss: changes buffer 1.running_mean; a forward pass must change nothing (no BatchNorm)" in message

    def test_changes_the_batch(self) -> None:
        def masks(self: Recipe, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
            batch["tokens"][:, 0] = 1
            return Recipe.loss(self, model, batch)

        recipe = guarded(loss=masks)
        with pytest.raises(RecipeError, match=r"loss: changes batch\['tokens'\]"):
            check_recipe(recipe, Model(), {"tokens": BATCH["tokens"].clone()}, 1)

    def test_changes_a_parameter(self) -> None:
        def steps(self: Recipe, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
            return Recipe.loss(self, model, batch)

        assert "loss: changes parameter embedding.weight" in refusal(loss=steps)

    def test_draws_from_a_generator_of_its_own(self) -> None:
        generator = random.Random(4)

        def noisy(self: Recipe, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
            loss, count = Recipe.loss(self, model, batch)
            return loss * (1 + generator.random()), count

        message = refusal(loss=noisy)
        assert "two passes over one micro-batch differ in the loss, the gradient of embedding.weight" in message

    def test_may_draw_from_the_global_generators(self) -> None:
        def noisy(self: Recipe, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
            loss, count = Recipe.loss(self, model, batch)
            return loss * (1 + random.random()), count

        recipe = guarded(loss=noisy)
        check_recipe(recipe, Model(), BATCH, 1)


class NormOptimizer(torch.optim.Optimizer):
    """Steps along the gradient divided by its norm, as LAMB and Muon do in their ways."""

    def __init__(self, params: list[ParamGroup]) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class NoisyOptimizer(NormOptimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.rand_like(p), alpha=group["lr"])


class KeepingOptimizer(torch.optim.Optimizer):
    """Plain descent that keeps a copy of the gradient in a type of its own."""

    def __init__(self, params: list[ParamGroup], dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                self.state[p]["kept"] = p.grad.to(self.dtype)


class TestOptimizer:
    def test_one_that_keeps_what_a_checkpoint_cannot_hold(self) -> None:
        message = refusal(optimizer=lambda self, p: KeepingOptimizer(p, torch.complex64))
        assert "optimizer: in its state, kept (torch.complex64) is of a type that a checkpoint can't hold" in message

    @pytest.mark.parametrize(
        ("make", "kept"),
        [
            (lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), 8),
            (lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True), 12),
            (lambda p: torch.optim.SGD(p, lr=0.01), 0),
            (lambda p: KeepingOptimizer(p, torch.bfloat16), 2),
        ],
    )
    def test_its_bytes_per_parameter_are_counted(
        self, make: Callable[[list[ParamGroup]], torch.optim.Optimizer], kept: int
    ) -> None:
        recipe = guarded(optimizer=lambda self, params: make(params))
        assert kept <= check_recipe(recipe, recipe.build_model(), BATCH, 1) < kept + 0.1

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
            lambda p: torch.optim.RAdam(p),
            lambda p: torch.optim.Adagrad(p),
            lambda p: torch.optim.RMSprop(p, centered=True),
        ],
    )
    def test_elementwise_ones_pass(self, make: Callable[[list[ParamGroup]], torch.optim.Optimizer]) -> None:
        recipe = guarded(optimizer=lambda self, params: make(params))
        check_optimizer(recipe, recipe.param_groups(Model()))

    @pytest.mark.parametrize("make", [NormOptimizer, NoisyOptimizer, torch.optim.Adafactor])
    def test_others_are_refused(self, make: Callable[[list[ParamGroup]], torch.optim.Optimizer]) -> None:
        message = refusal(optimizer=lambda self, params: make(params))
        assert "optimizer: not elementwise" in message
        assert "use one that looks at each element by itself, such as AdamW" in message

    def test_one_that_wants_matrices_is_refused(self) -> None:
        message = refusal(optimizer=lambda self, params: torch.optim.Muon(params))
        assert message.startswith("recipe mine:Recipe: optimizer: ValueError: Muon only supports 2D")

    def test_the_groups_real_options_count(self) -> None:
        """Only the second group goes wrong, and only by its option."""

        class Choosy(NormOptimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(p.grad / (p.grad.norm() if group["by_norm"] else 1.0))

        def groups(self: Recipe, model: nn.Module) -> list[ParamGroup]:
            first, second = Recipe.param_groups(self, model)
            return [{**first, "by_norm": False}, {**second, "by_norm": True}]

        assert "not elementwise" in refusal(optimizer=lambda self, p: Choosy(p), param_groups=groups)

    def test_one_that_raises_in_its_step(self) -> None:
        message = refusal(optimizer=lambda self, p: torch.optim.LBFGS(p[0]["params"]))
        assert "optimizer" in message

    def test_one_with_other_groups(self) -> None:
        def merged(self: Recipe, params: list[ParamGroup]) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for group in params for p in group["params"]], lr=0.1)

        assert "other parameter groups than it was given" in refusal(optimizer=merged)

    def test_one_whose_rate_is_a_tensor(self) -> None:
        message = refusal(optimizer=lambda self, p: torch.optim.SGD(p, lr=torch.tensor(0.1)))
        assert "the schedule needs it as a number" in message


def test_the_example_of_a_recipe_is_sound() -> None:
    folder = Path(__file__).parents[3] / "examples"
    job = yaml.safe_load((folder / "bigram.yaml").read_text()) | {"recipe_dir": str(folder)}
    job["model"]["vocabulary"] = 100
    recipe = build_recipe(job["recipe"], job)
    check_recipe(recipe, recipe.build_model(), {"tokens": torch.arange(36).reshape(4, 9)}, 1)


def test_a_loss_that_counts_nothing_is_refused() -> None:
    def loss(self: Any, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return sum((p.sum() for p in model.parameters()), torch.zeros(())), 0

    assert "counts no token" in refusal(loss=loss)
