"""What a user brings: model, loss, parameter groups, optimizer. Loading it, and whose fault an error is.

A recipe is found by an import path, ``module:Class``, with the job file's folder first on ``sys.path``, in every
process. What its code raises becomes a RecipeError of one line that names the recipe, the method and the error;
the original error stays its cause. What a recipe must keep to is checked by runtime/recipe_checks.py.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from dataloader.errors import ConfigError, EverstepError, RecipeError
from runtime.rng import set_build_streams

Batch: TypeAlias = Mapping[str, Tensor]  # "tokens": int64 [micro_batch, seq_len + 1]
ParamGroup: TypeAlias = dict[str, Any]  # "params": list of tensors, and the optimizer's options for them

BUILT_IN = "runtime.model.causal_lm:CausalLM"
METHODS = ("build_model", "loss", "param_groups", "optimizer")
LONGEST_MESSAGE = 400  # characters of a user's error that are shown


class Recipe(Protocol):
    """One job's model and how it is trained. Its parameters are fp32, and they and its buffers are on the CPU."""

    def build_model(self) -> nn.Module:
        """A fresh model. The global generators of torch, numpy and random have been set from the job's seed."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Summed loss (fp32, 0-dim) of a micro-batch, and how many tokens it counts. Changes no buffer."""

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """Every parameter in exactly one group; other keys are options of the optimizer."""

    def optimizer(self, params: list[ParamGroup]) -> torch.optim.Optimizer:
        """An elementwise optimizer over flat pieces of parameters, one group per piece, options as in its group."""


def build_recipe(spec: str | None, job: Mapping[str, Any]) -> GuardedRecipe:
    """The recipe of a job: the built-in one, or ``module:Class``.

    ``job``: the job file's values, plain, with ``recipe_dir``, the folder to look in first. The class gets it if its
    one required argument is positional, or its first is called ``job``. ConfigError: the path is malformed.
    RecipeError: the module, the class or its constructor fails, or a method is missing.
    """
    seed = int(job["train"]["seed"])
    name, spec = ("built-in", BUILT_IN) if spec is None else (spec, spec)
    module_name, colon, class_name = spec.partition(":")
    if not (colon and module_name and class_name.isidentifier()):
        raise ConfigError(f"recipe: {spec!r} is not an import path; write it as module:Class")
    made = _make(_find(spec, module_name, class_name, job.get("recipe_dir")), spec, job)
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise RecipeError(f"recipe {spec}: has no method {', '.join(missing)}; a recipe has {', '.join(METHODS)}")
    return GuardedRecipe(name, made, seed)


class GuardedRecipe:
    """A recipe whose errors say whose they are, and whose answers have been looked at."""

    def __init__(self, name: str, inner: Recipe, seed: int) -> None:
        self.name = name
        self.inner = inner
        self._seed = seed

    def build_model(self) -> nn.Module:
        """Built from the job's seed alone, so the same in every process of one numerics class; in training mode."""
        set_build_streams(self._seed)
        with user_code(self, "build_model"):
            model = self.inner.build_model()
        if not isinstance(model, nn.Module):
            raise self.broken("build_model", f"returned a {_kind(model)}; return a torch.nn.Module")
        return model.train()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        with user_code(self, "loss"):
            answer = self.inner.loss(model, batch)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self.broken("loss", f"returned a {_kind(answer)}; return (summed loss, number of tokens)")
        loss, tokens = answer
        if not isinstance(loss, Tensor) or loss.dim() != 0 or loss.dtype != torch.float32:
            shape = f" of {loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise self.broken("loss", f"gave a {_kind(loss)}{shape} as the loss; give a 0-dim float32 tensor, summed")
        if not loss.requires_grad:
            raise self.broken("loss", "gave a loss without a gradient; don't detach it from the model")
        if type(tokens) is not int or tokens < 0:
            raise self.broken("loss", f"gave {tokens!r} ({_kind(tokens)}) as the number of tokens; give an int >= 0")
        return loss, tokens

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients into the parameters' ``.grad``."""
        with user_code(self, "backward of loss"):
            loss.backward()  # type: ignore[no-untyped-call]

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        with user_code(self, "param_groups"):
            given = self.inner.param_groups(model)
            groups = [dict(group) for group in given]
            for group in groups:
                params = group["params"]
                group["params"] = [params] if isinstance(params, Tensor) else list(params)
        return groups

    def optimizer(self, params: list[ParamGroup]) -> torch.optim.Optimizer:
        with user_code(self, "optimizer"):
            optimizer = self.inner.optimizer(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self.broken("optimizer", f"returned a {_kind(optimizer)}; return a torch.optim.Optimizer")
        return optimizer

    def broken(self, method: str, what: str) -> RecipeError:
        """The error for an answer that breaks the contract."""
        return RecipeError(f"recipe {self.name}: {method}: {what}")


@contextmanager
def user_code(recipe: GuardedRecipe | str, method: str) -> Iterator[None]:
    """Run a user's code: what it raises becomes a RecipeError of one line."""
    try:
        yield
    except EverstepError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything: this is the edge to it
        name = recipe if isinstance(recipe, str) else recipe.name
        raise RecipeError(f"recipe {name}: {method}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if len(text) > LONGEST_MESSAGE:
        text = text[:LONGEST_MESSAGE] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find(spec: str, module_name: str, class_name: str, folder: Any) -> Callable[..., Any]:
    if folder is not None and (not sys.path or sys.path[0] != str(folder)):
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    where = f" (looked in {folder} first)" if folder is not None else ""
    with user_code(spec, f"import{where}"):
        module: ModuleType = importlib.import_module(module_name)
    found = getattr(module, class_name, None)
    if not callable(found):
        raise RecipeError(f"recipe {spec}: {module.__file__ or module_name} has no class {class_name}")
    return found  # type: ignore[no-any-return]


def _make(found: Callable[..., Any], spec: str, job: Mapping[str, Any]) -> Recipe:
    with user_code(spec, "constructor"):
        made: Recipe = found(job) if _wants_job(found) else found()
    return made


def _wants_job(found: Callable[..., Any]) -> bool:
    positional = [
        p
        for p in inspect.signature(found).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p for p in positional if p.default is p.empty]
    return len(required) == 1 or (bool(positional) and positional[0].name == "job")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
