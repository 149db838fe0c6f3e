"""The workload as an Everstep recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.peers.workload import build_model, optimizer, padded_loss


class Padded:
    def build_model(self) -> nn.Module:
        return build_model()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return padded_loss(model, batch["tokens"])

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters())}]

    def optimizer(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return optimizer(params)
