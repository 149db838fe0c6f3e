"""Loading a user's recipe, and one line for everything that can be wrong with it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataloader.errors import ConfigError, RecipeError
from runtime.recipe import GuardedRecipe, build_recipe

GOOD = """
import torch
from torch import nn

class Mine:
    def __init__(self, job):
        self.job = job
    def build_model(self):
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    def loss(self, model, batch):
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), logits.shape[0]
    def param_groups(self, model):
        return [{"params": model.parameters(), "lr": 0.1}]
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
"""
JOB: dict[str, Any] = {
    "train": {"seed": 3},
    "data": {"seq_len": 8},
    "model": {"vocab_size": 32, "hidden_size": 16, "layers": 1, "heads": 2},
    "optimizer": {"lr": 0.01},
}
BATCH = {"tokens": torch.arange(18).view(2, 9) % 11}
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a module of its own name into the job's folder; gives the recipe's spec."""
    numbers = itertools.count()
    path, modules = list(sys.path), set(sys.modules)

    def module(source: str) -> str:
        name = f"recipe_{tmp_path.name}_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return f"{name}:Mine"

    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("recipe_test_"):
            del sys.modules[name]


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    return {**JOB, "recipe_dir": str(tmp_path)}


def refusal(spec: str, job: dict[str, Any], call: Callable[[GuardedRecipe], Any] | None = None) -> str:
    def load_and_call() -> None:
        recipe = build_recipe(spec, job)
        if call is not None:
            call(recipe)

    with pytest.raises(RecipeError) as caught:
        load_and_call()
    message = str(caught.value)
    assert message.startswith(f"recipe {spec}: ")
    assert "\n" not in message
    return message.removeprefix(f"recipe {spec}: ")


def test_a_recipe_from_the_job_files_folder_trains(write: Write, job: dict[str, Any]) -> None:
    recipe = build_recipe(write(GOOD), job)
    model = recipe.build_model()
    loss, tokens = recipe.loss(model, BATCH)
    recipe.backward(loss)
    (group,) = recipe.param_groups(model)
    recipe.optimizer([group]).step()
    assert tokens == 16
    assert len(group["params"]) == 3
    assert recipe.inner.job is job  # type: ignore[attr-defined]


def test_models_are_built_from_the_seed(write: Write, job: dict[str, Any]) -> None:
    spec = write(GOOD)
    first = build_recipe(spec, job).build_model().state_dict()
    torch.rand(7)
    again = build_recipe(spec, job).build_model().state_dict()
    other = build_recipe(spec, {**job, "train": {"seed": 4}}).build_model().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_no_spec_is_the_built_in_recipe() -> None:
    recipe = build_recipe(None, JOB)
    model = recipe.build_model()
    assert "model.embed_tokens.weight" in model.state_dict()
    optimizer = recipe.optimizer(recipe.param_groups(model))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize(
    ("head", "gets_job"),
    [
        ("def __init__(self, settings): self.got = settings", True),
        ("def __init__(self, job=None): self.got = job", True),
        ("def __init__(self, hidden=8): self.got = hidden", False),
        ("def __init__(self, *, job=None): self.got = job", False),
        ("got = None", False),
    ],
)
def test_the_constructor_gets_the_job_if_it_wants_it(
    write: Write, job: dict[str, Any], head: str, gets_job: bool
) -> None:
    body = GOOD.replace("def __init__(self, job):\n        self.job = job", head)
    recipe = build_recipe(write(body), job)
    assert (recipe.inner.got is job) is gets_job  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["mine", "mine:", ":Mine", "mine:a-b"])
def test_a_malformed_path_is_a_config_error(spec: str) -> None:
    with pytest.raises(ConfigError, match="write it as module:Class"):
        build_recipe(spec, JOB)


def test_what_cannot_be_loaded_is_named(write: Write, job: dict[str, Any], tmp_path: Path) -> None:
    missing = refusal("no_such_recipe_module:Mine", job)
    assert f"import (looked in {tmp_path} first): ModuleNotFoundError" in missing
    assert "SyntaxError" in refusal(write("def"), job)
    assert "import" in refusal(write("import sys; sys.exit(4)"), job)
    assert "has no class Mine" in refusal(write("x = 1"), job)
    assert "no method param_groups, optimizer" in refusal(
        write("class Mine:\n def build_model(self): ...\n def loss(self): ..."), job
    )
    wants = refusal(write("class Mine:\n def __init__(self, a, b): ..."), job)
    assert wants.startswith("constructor: TypeError: ")
    raises = refusal(write("class Mine:\n def __init__(self):\n  raise KeyError('width\\nof it')"), job)
    assert raises == r"constructor: KeyError: 'width\nof it'"


@pytest.mark.parametrize("method", ["build_model", "loss", "param_groups", "optimizer"])
def test_what_a_method_raises_is_the_recipes(write: Write, job: dict[str, Any], method: str) -> None:
    spec = write(GOOD + f"    def {method}(self, *args):\n        raise ValueError('one\\n two')\n")
    calls: dict[str, Callable[[GuardedRecipe], Any]] = {
        "build_model": lambda r: r.build_model(),
        "loss": lambda r: r.loss(torch.nn.Linear(1, 1), BATCH),
        "param_groups": lambda r: r.param_groups(torch.nn.Linear(1, 1)),
        "optimizer": lambda r: r.optimizer([]),
    }
    assert refusal(spec, job, calls[method]) == f"{method}: ValueError: one two"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("loss", "returned a Tensor; return (summed loss, number of tokens)"),
        ("None", "returned a None"),
        ("(loss.item(), 4)", "gave a float as the loss"),
        ("(loss.view(1), 4)", "gave a Tensor of torch.float32 [1] as the loss"),
        ("(loss.double(), 4)", "gave a Tensor of torch.float64 [] as the loss; give a 0-dim float32"),
        ("(loss.detach(), 4)", "without a gradient"),
        ("(loss, torch.tensor(4))", "as the number of tokens; give an int"),
        ("(loss, 4.0)", "gave 4.0 (float)"),
        ("(loss, True)", "gave True (bool)"),
        ("(loss, -1)", "gave -1 (int)"),
    ],
)
def test_loss_gives_a_summed_scalar_and_a_count(write: Write, job: dict[str, Any], answer: str, words: str) -> None:
    body = f"    def loss(self, model, batch):\n        loss = model[1].weight.sum()\n        return {answer}\n"
    message = refusal(write(GOOD + body), job, lambda r: r.loss(r.build_model(), BATCH))
    assert message.startswith("loss: ")
    assert words in message


def test_wrong_kinds_are_refused(write: Write, job: dict[str, Any]) -> None:
    body = "    def build_model(self): return [1]\n    def optimizer(self, params): return 3\n"
    spec = write(GOOD + body)
    assert refusal(spec, job, lambda r: r.build_model()) == "build_model: returned a list; return a torch.nn.Module"
    assert "returned a int" in refusal(spec, job, lambda r: r.optimizer([]))


def test_an_error_in_the_backward_pass_is_the_recipes(write: Write, job: dict[str, Any]) -> None:
    source = GOOD + (
        "    def loss(self, model, batch):\n"
        "        loss = model[1].weight.sum()\n"
        "        loss.register_hook(lambda g: 1 / 0)\n"
        "        return loss * 1, 1\n"
    )
    message = refusal(write(source), job, lambda r: r.backward(r.loss(r.build_model(), BATCH)[0]))
    assert message == "backward of loss: ZeroDivisionError: division by zero"


def test_the_built_in_recipe_needs_a_vocabulary_and_room() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: not known"):
        build_recipe(None, {**JOB, "model": {}})
    with pytest.raises(ConfigError, match=r"model\.max_seq_len: 4 is less than data\.seq_len \(8\)"):
        build_recipe(None, {**JOB, "model": {**JOB["model"], "max_seq_len": 4}})
