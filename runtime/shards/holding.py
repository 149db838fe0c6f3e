"""One shard held: master parameters in one flat tensor, and a real torch optimizer over its pieces.

The optimizer gets one parameter group per piece, with the options of the recipe's group that the piece lies in.
Its learning rate is set at every step: the group's own, as the recipe gave it, times the schedule's ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dataloader.errors import InternalError, PeerError, RecipeError
from runtime.guard import Verdict
from runtime.recipe import user_code
from runtime.shards.layout import UNIT, FlatLayout
from runtime.shards.state import HoldingState, PieceState

MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
GroupOptions: TypeAlias = Sequence[Mapping[str, Any]]  # by parameter group, without "params"

_PLAIN = (bool, int, float, str, type(None))
_VARIANT = ("amsgrad", "capturable", "foreach", "fused", "maximize", "nesterov")  # options that choose a kernel


class Holding:
    """A shard's parameters and optimizer state at one version.

    ``scratch``: fp32, at least as long as the shard; where the scaled gradient is put. It may be shared by holdings
    that are applied one after another.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shard: int,
        make_optimizer: MakeOptimizer,
        options: GroupOptions,
        scratch: torch.Tensor,
    ) -> None:
        low, high = layout.shard_range(shard)
        self.shard = shard
        self.version = 0
        self.parameters = torch.zeros(high - low)
        self._gradient = scratch[: high - low]
        self._pieces: list[torch.nn.Parameter] = []
        for piece in layout.pieces(shard):
            inside = slice(piece.start - low, piece.stop - low)
            parameter = torch.nn.Parameter(self.parameters[inside])
            parameter.grad = self._gradient[inside]
            self._pieces.append(parameter)
        groups = [
            {**options[piece.group], "params": [parameter]}
            for piece, parameter in zip(layout.pieces(shard), self._pieces, strict=True)
        ]
        self._optimizer = make_optimizer(groups)
        self._initial = [dict(group) for group in self._optimizer.param_groups]
        if len(self._initial) != len(self._pieces):
            raise RecipeError("optimizer: made other parameter groups than it was given; keep them as they are")

    def apply(self, step: int, gradient: torch.Tensor, verdict: Verdict) -> None:
        """Version step -> step + 1. ``gradient``: reduced, unscaled, fp32 [shard's elements]; left as it is."""
        if self.version != step:
            raise InternalError(f"shard {self.shard} is at version {self.version}; step {step} can't be applied")
        if verdict.kind == "commit":
            torch.mul(gradient, verdict.scale, out=self._gradient)
            for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
                if "lr" in initial:
                    group["lr"] = float(initial["lr"]) * verdict.lr_ratio
            first = not self._optimizer.state
            with torch.no_grad(), user_code("of this job", "optimizer.step"):
                self._optimizer.step()
            if first:
                self._refuse_kept_gradients()
        self.version += 1

    def state(self) -> HoldingState:
        """Views of what is held now; ``pack`` makes a copy of them."""
        pairs = zip(self._pieces, self._optimizer.param_groups, self._initial, strict=True)
        pieces = tuple(self._piece_state(parameter, group, initial) for parameter, group, initial in pairs)
        return HoldingState(self.version, self.parameters, pieces)

    def adopt(self, state: HoldingState) -> None:
        """Become that state. PeerError if it is another shard's."""
        if state.parameters.shape != self.parameters.shape or len(state.pieces) != len(self._pieces):
            raise PeerError(f"the state for shard {self.shard} has other sizes than the shard")
        self.version = state.version
        self.parameters.copy_(state.parameters)
        self._optimizer.state.clear()
        groups = self._optimizer.param_groups
        for parameter, piece, group, initial in zip(self._pieces, state.pieces, groups, self._initial, strict=True):
            group.update(initial)
            group.update(piece.options)
            if piece.tensors or piece.plain:
                kept: dict[str, Any] = {key: tensor.clone() for key, tensor in piece.in_order()}
                self._optimizer.state[parameter] = {**kept, **piece.plain}

    def _piece_state(
        self, parameter: torch.nn.Parameter, group: Mapping[str, Any], initial: Mapping[str, Any]
    ) -> PieceState:
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, _PLAIN):
                plain[key] = value
            else:
                kind = type(value).__name__
                raise RecipeError(f"optimizer: keeps a {kind} as {key!r}; only tensors and numbers can be moved")
        changed = {
            key: value
            for key, value in group.items()
            if key != "lr" and isinstance(value, _PLAIN) and (key not in initial or initial[key] != value)
        }
        return PieceState(tensors, plain, changed)

    def _refuse_kept_gradients(self) -> None:
        """The gradient's memory is written anew at every step, so it can't be anybody's state."""
        own = self._gradient.untyped_storage().data_ptr()
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == own:
                    raise RecipeError(f"optimizer: keeps the gradient itself as {key!r}; keep a clone of it")


def optimizer_variant(make_optimizer: MakeOptimizer, options: GroupOptions) -> str:
    """The optimizer's name and the options that choose its kernel: part of the job's numerics.

    Also warms up: the first optimizer of a process takes a second to make, as torch then loads its compiler.
    """
    groups = [{**group, "params": [torch.nn.Parameter(torch.zeros(UNIT))]} for group in options]
    optimizer = make_optimizer(groups)
    chosen = [
        [f"{key}={value}" for key in _VARIANT if (value := group.get(key)) is not None]
        for group in optimizer.param_groups
    ]
    if any(other != chosen[0] for other in chosen):
        raise RecipeError(f"optimizer: parameter groups differ in {', '.join(_VARIANT)}; use one variant for all")
    kind = type(optimizer)
    return " ".join([f"{kind.__module__}.{kind.__qualname__}", *chosen[0]])
