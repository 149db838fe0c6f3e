"""One worker's micro-batches: tokens in, a logical rank's summed gradient out.

The model's parameters are views of one flat buffer, so that new ones are installed by one copy. A logical rank's
gradient buffer is zeroed, and each of its micro-batches in order adds into it: there is no other path for a
gradient, since 0 + -0 and -0 differ. Everything runs on the calling thread, the one that called numerics.pin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from dataloader.errors import InternalError
from dataloader.stream import data_digest, fold_digests
from runtime.config import TrainConfig
from runtime.guard import GuardRules
from runtime.protocol import RankWork
from runtime.recipe import GuardedRecipe
from runtime.rng import set_streams
from runtime.sabotage import Sabotage
from runtime.shards.layout import FlatLayout, views


class Tokens(Protocol):
    """Where samples come from, by global index: int64 [count, seq_len + 1]."""

    def tokens(self, first: int, count: int) -> NDArray[np.int64]: ...


class MicroBatches:
    """Runs logical ranks. Takes the model over: its parameters become views of one flat buffer, bits unchanged."""

    def __init__(
        self,
        recipe: GuardedRecipe,
        model: nn.Module,
        layout: FlatLayout,
        stream: Tokens,
        train: TrainConfig,
        guard: GuardRules | None = None,
        sabotage: Sabotage | None = None,
    ) -> None:
        self._recipe, self._model, self._layout = recipe, model, layout
        self.stream, self.train = stream, train
        self.guard, self.sabotage = guard or GuardRules(), sabotage or Sabotage()
        self._flat = torch.zeros(layout.total)
        self._parameters = dict(model.named_parameters())
        for name, view in views(self._flat, layout).items():
            view.copy_(self._parameters[name].detach())
            self._parameters[name].data = view
        model.train()

    def run_rank(
        self,
        step: int,
        rank: int,
        gradient: Tensor,
        cancelled: Callable[[], bool],
        on_micro_batch: Callable[[], None],
    ) -> RankWork | None:
        """All micro-batches of one logical rank in one step.

        ``gradient``: fp32 [layout.total], with anything in it; holds the sum of the summed losses' gradients after,
        and anything if None is returned. ``cancelled`` is asked before each micro-batch, ``on_micro_batch`` told
        after each. RecipeError: the recipe raised, or breaks its contract.
        """
        losses: list[float] = []
        digests: list[bytes] = []
        counted = 0
        grads = self._point_at(gradient)
        try:
            count = self.train.micro_batches_per_rank
            for micro_batch in range(rank * count, (rank + 1) * count):
                if cancelled():
                    return None
                tokens = self.stream.tokens(self.train.first_sample(step, micro_batch), self.train.micro_batch)
                digests.append(data_digest(tokens))
                loss, number = self._add(tokens, step, micro_batch)
                losses.append(loss)
                counted += number
                self.sabotage.micro_batch_done(step, micro_batch, gradient)
                on_micro_batch()
            self._check_gradients(grads)
            self.sabotage.rank_done(gradient)
        finally:
            self._release()
        used = self._parameter_digests() if self.guard.compares(step) else ()
        return RankWork(tuple(losses), counted, fold_digests(digests), _digest(gradient), used)

    def gradient_of(self, tokens: NDArray[np.int64], gradient: Tensor) -> float:
        """The summed loss of one micro-batch of any tokens, its gradient into ``gradient``; streams of step 0."""
        grads = self._point_at(gradient)
        try:
            loss, _ = self._add(tokens, 0, 0)
            self._check_gradients(grads)
        finally:
            self._release()
        return loss

    def install(self, *pieces: Tensor) -> None:
        """Take new parameters, copied: pieces that put end to end are fp32 [layout.total]."""
        if (given := sum(piece.numel() for piece in pieces)) != self._layout.total:
            raise InternalError(f"{given} parameters were given to a model of {self._layout.total}")
        torch.cat(pieces, out=self._flat)
        self.sabotage.installed(self._flat)

    def parameters(self) -> Tensor:
        """A copy of the parameters: fp32 [layout.total], padding zero."""
        return self._flat.clone()

    def buffers(self) -> dict[str, Tensor]:
        """The model's own buffers, live, by name. Loss leaves them as they are; write them before training only."""
        return dict(self._model.named_buffers())

    def _parameter_digests(self) -> tuple[bytes, ...]:
        """Of what the model has now, by shard."""
        return tuple(_digest(self._flat[slice(*self._layout.shard_range(s))]) for s in range(self._layout.shards))

    def _add(self, tokens: NDArray[np.int64], step: int, micro_batch: int) -> tuple[float, int]:
        set_streams(self.train.seed, step, micro_batch)
        loss, counted = self._recipe.loss(self._model, {"tokens": torch.from_numpy(tokens)})
        self._recipe.backward(loss)
        return float(loss.detach()), counted

    def _point_at(self, gradient: Tensor) -> dict[str, Tensor]:
        if gradient.dtype != torch.float32:
            raise InternalError(f"a gradient buffer of {gradient.dtype} was given; float32 is wanted")
        gradient.zero_()
        grads = views(gradient, self._layout)
        for name, grad in grads.items():
            self._parameters[name].grad = grad
        return grads

    def _check_gradients(self, grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            if self._parameters[name].grad is not grad:
                raise self._recipe.broken(
                    "loss", f"replaced the gradient of {name}; leave .grad alone (no zero_grad, no optimizer in loss)"
                )

    def _release(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _digest(flat: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(flat.numpy().data)
