"""A recipe of one's own: what `recipe: bigram:Bigram` in a job file beside this one finds.

It predicts each token from the one before it, with a table and a low-rank step, trained by SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bigram:
    """`job` is the whole job file, defaults filled in; a recipe that doesn't need it has a constructor without."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.width = job["model"]["width"]  # `model` and `optimizer` are the recipe's own business
        self.vocabulary = job["model"]["vocabulary"]
        self.options = job["optimizer"]

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(self.vocabulary, self.width),
            nn.Dropout(0.1),
            nn.Linear(self.width, self.vocabulary),
        )

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Summed, not averaged, and over how many tokens: so that it doesn't matter how a batch is cut."""
        tokens = batch["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        biases = [p for p in model.parameters() if p.dim() == 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        return [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]

    def optimizer(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.options["lr"], momentum=0.9, nesterov=True)
