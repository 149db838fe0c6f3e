"""What a recipe must keep to, looked at once before training, so that P1 is not broken behind one's back.

    parameters    fp32, on the CPU, trainable, each in exactly one group, the same groups each time
    buffers       on the CPU, of a type that a checkpoint can hold
    loss          the same bits for the same tokens and random streams; changes no buffer, parameter or token
    optimizer     elementwise: whole tensors and pieces of them, cut as shards are cut, give the same parameters; its
                  state of types that a checkpoint can hold

A breach is a RecipeError that says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dataloader.errors import RecipeError
from runtime.recipe import Batch, GuardedRecipe, ParamGroup, user_code
from runtime.rng import set_streams
from runtime.shards.state import DTYPES, STORABLE

# Small parameters to try an optimizer on, in floats: pieces start at multiples of 16, as those of shards do.
WHOLE = 336
CUTS = (0, 16, 112, 240, WHOLE)
STEPS = 4
RATIOS = (0.5, 1.0, 1.0, 0.25)  # of the learning rate, by step
NAMES_SHOWN = 5
NOT_STORABLE = (
    "of a type that a checkpoint can't hold; keep a complex tensor as two real ones, and convert any other to one of"
    f" {', '.join(DTYPES)}"
)


def check_recipe(recipe: GuardedRecipe, model: nn.Module, batch: Batch, seed: int) -> float:
    """All checks, on one real micro-batch. Costs two forward and backward passes; leaves the model as it was.

    Returns how many bytes the optimizer keeps for a parameter, at most.
    """
    first = group_names(model, recipe.param_groups(model))
    groups = recipe.param_groups(model)
    if group_names(model, groups) != first:
        raise recipe.broken("param_groups", "gave other groups when asked again; make it depend on the model only")
    check_buffers(model)
    kept = check_optimizer(recipe, groups)
    check_loss(recipe, model, batch, seed)
    return kept


def group_names(model: nn.Module, groups: Sequence[ParamGroup]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """(name, shape) of every parameter, by group, in order of definition: what the flat layout is made from."""
    place = {id(parameter): n for n, parameter in enumerate(model.parameters())}
    named = list(model.named_parameters())
    owner: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            at = place.get(id(parameter))
            if at is None:
                raise RecipeError(
                    f"recipe: param_groups: group {number} has a tensor of shape {list(parameter.shape)} that is not"
                    " a parameter of the model; pass the model's own"
                )
            if at in owner:
                raise RecipeError(
                    f"recipe: param_groups: {named[at][0]} is in group {owner[at]} and again in group {number};"
                    " put every parameter in exactly one group"
                )
            owner[at] = number
    _check_parameters(named, owner)
    names: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in groups]
    for at, (name, parameter) in enumerate(named):
        names[owner[at]].append((name, tuple(parameter.shape)))
    return names


def group_options(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """The groups' options, without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _check_parameters(named: Sequence[tuple[str, nn.Parameter]], owner: dict[int, int]) -> None:
    left = [name for at, (name, _) in enumerate(named) if at not in owner]
    if left:
        raise RecipeError(f"recipe: param_groups: {_some(left)} in no group; put every parameter in exactly one group")
    other = [f"{name} ({p.dtype})" for name, p in named if p.dtype != torch.float32]
    if other:
        raise RecipeError(
            f"recipe: build_model: {_some(other)} not float32; keep parameters in float32 (autocast is fine)"
        )
    _check_place(named)
    frozen = [name for name, p in named if not p.requires_grad]
    if frozen:
        raise RecipeError(
            f"recipe: build_model: {_some(frozen)} frozen; register what is not trained as a buffer instead"
        )


def _check_place(named: Sequence[tuple[str, Tensor]]) -> None:
    elsewhere = [f"{name} ({tensor.device})" for name, tensor in named if tensor.device.type != "cpu"]
    if elsewhere:
        raise RecipeError(f"recipe: build_model: {_some(elsewhere)} not on the CPU; build the whole model there")


def check_buffers(model: nn.Module) -> None:
    """One worker writes them, all others take them from its checkpoint."""
    named = [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    _check_place(named)
    other = [f"{name} ({buffer.dtype})" for name, buffer in named if buffer.dtype not in STORABLE]
    if other:
        raise RecipeError(f"recipe: build_model: {_some(other)} {NOT_STORABLE}")


def check_optimizer(recipe: GuardedRecipe, groups: Sequence[ParamGroup]) -> float:
    """Whole parameters against pieces of them, with the real groups' options, through a few steps.

    Returns how many bytes of state are kept for a parameter, at most.
    """
    options = group_options(groups)
    whole, kept = _train(recipe, [(option, [(0, WHOLE)]) for option in options])
    other = sorted({f"{k} ({t.dtype})" for state in kept for k, t in state.items() if t.dtype not in STORABLE})
    if other:
        raise recipe.broken("optimizer", f"in its state, {_some(other)} {NOT_STORABLE}")
    torch.rand(1)  # an optimizer that draws random numbers differs from here on
    pieces, _ = _train(recipe, [(option, list(pairwise(CUTS))) for option in options])
    for step, (one, two) in enumerate(zip(whole, pieces, strict=True)):
        if not torch.equal(one.view(torch.int32), two.view(torch.int32)):
            raise recipe.broken(
                "optimizer",
                f"not elementwise: whole parameters and pieces of them differ after step {step + 1}; use one that"
                " looks at each element by itself, such as AdamW, and not at whole tensors (Muon, LAMB) or at chance",
            )
    return max((sum(tensor.nbytes for tensor in state.values()) for state in kept), default=0) / WHOLE


def _train(
    recipe: GuardedRecipe, plan: Sequence[tuple[dict[str, Any], list[tuple[int, int]]]]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """All parameters, flat, after each step of an optimizer over the given pieces of one tensor per group; and the
    tensors that it keeps in the end, by piece."""
    pieces: list[tuple[nn.Parameter, int, int, int]] = []
    groups: list[ParamGroup] = []
    for number, (options, ranges) in enumerate(plan):
        start = _pattern(WHOLE, number)
        for low, high in ranges:
            parameter = nn.Parameter(start[low:high].clone())
            pieces.append((parameter, number, low, high))
            groups.append({**options, "params": [parameter]})
    optimizer = recipe.optimizer(groups)
    if len(optimizer.param_groups) != len(groups):
        raise recipe.broken("optimizer", "made other parameter groups than it was given; keep them as they are")
    rates: list[float] = []
    for group in optimizer.param_groups:
        if not isinstance(rate := group.get("lr"), (int, float)):
            raise recipe.broken("optimizer", f"a group's lr is {rate!r}; the schedule needs it as a number")
        rates.append(float(rate))
    after = []
    for step, ratio in enumerate(RATIOS[:STEPS]):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * ratio
        for parameter, number, low, high in pieces:
            # Later elements have much larger gradients, so a norm over a piece is not that over the whole.
            size = torch.arange(WHOLE, dtype=torch.float32) / 64
            parameter.grad = (_pattern(WHOLE, 7 * number + step + 1) * size)[low:high].clone()
        with user_code(recipe, "optimizer.step"):
            optimizer.step()
        after.append(torch.cat([parameter.detach() for parameter, *_ in pieces]))
    kept = [{k: t for k, t in state.items() if isinstance(t, Tensor)} for state in optimizer.state.values()]
    return after, kept


def check_loss(recipe: GuardedRecipe, model: nn.Module, batch: Batch, seed: int) -> None:
    """Two passes over one micro-batch with the same random streams: the same bits, and nothing else changed."""
    kept = {f"buffer {name}": (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    kept |= {f"parameter {name}": (p, p.detach().clone()) for name, p in model.named_parameters()}
    kept |= {f"batch[{name!r}]": (tensor, tensor.clone()) for name, tensor in batch.items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    try:
        first = _pass(recipe, model, batch, seed)
        for name, (now, before) in kept.items():
            if not _same(now, before):
                raise recipe.broken("loss", f"changes {name}; a forward pass must change nothing (no BatchNorm)")
        second = _pass(recipe, model, batch, seed)
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
    differing = [name for name in first if not _same(first[name], second[name])]
    if differing:
        raise recipe.broken(
            "loss",
            f"two passes over one micro-batch differ in {_some(differing, verb=False)}; draw random numbers from the"
            " global generators of torch, numpy and random only, and keep nothing between calls",
        )


def _pass(recipe: GuardedRecipe, model: nn.Module, batch: Batch, seed: int) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    set_streams(seed, 0, 0)
    loss, tokens = recipe.loss(model, batch)
    if tokens == 0:
        raise recipe.broken("loss", "counts no token of a real micro-batch; count those that the loss is summed over")
    recipe.backward(loss)
    results = {f"the gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"the loss": loss.detach(), **results}


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def _pattern(count: int, salt: int) -> Tensor:
    """Numbers in [-1, 1), the same everywhere."""
    integers = (torch.arange(count, dtype=torch.int64) + 1) * 2654435761 + salt * 40503
    return ((integers >> 7) % 65536 - 32768).to(torch.float32) / 32768


def _some(names: Sequence[str], verb: bool = True) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        shown += f" and {len(names) - NAMES_SHOWN} more"
    return f"{shown} {'is' if len(names) == 1 else 'are'}" if verb else shown
