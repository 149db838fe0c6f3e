"""The built-in recipe: causal language modelling on the built-in decoder, trained with fused AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataloader.errors import ConfigError
from runtime.config import ModelConfig, OptimizerConfig
from runtime.model.decoder import Decoder, initialise
from runtime.recipe import Batch, ParamGroup
from runtime.rng import stream_seed


class CausalLM:
    """``job``: its ``train.seed``, ``data.seq_len``, ``model`` (with vocab_size filled in) and ``optimizer``."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        config = ModelConfig.model_validate(job["model"])
        self.optimizer_config = OptimizerConfig.model_validate(job["optimizer"])
        self.seed = int(job["train"]["seed"])
        seq_len = int(job["data"]["seq_len"])
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: not known; set it to the vocabulary size of the data's tokenizer")
        if config.max_seq_len is not None and config.max_seq_len < seq_len:
            raise ConfigError(
                f"model.max_seq_len: {config.max_seq_len} is less than data.seq_len ({seq_len});"
                f" set it to {seq_len} or more, or leave it away"
            )
        self.config = config.model_copy(update={"max_seq_len": config.max_seq_len or seq_len})

    def build_model(self) -> nn.Module:
        model = Decoder(self.config)
        initialise(model, stream_seed(self.seed, 0, 0, "build.weights"))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Cross entropy of every token but the first, summed, and their number."""
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:].reshape(-1)
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()

    def param_groups(self, model: nn.Module) -> list[ParamGroup]:
        """Matrices decay; vectors, the norms' weights, don't."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        return [
            {"params": matrices, "weight_decay": self.optimizer_config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def optimizer(self, params: list[ParamGroup]) -> torch.optim.Optimizer:
        config = self.optimizer_config
        # Fused is the one variant whose bits are the same for pieces cut at multiples of 16 floats on any host.
        return torch.optim.AdamW(params, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
