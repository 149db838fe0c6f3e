"""The trained model as one safetensors file, under the model's own parameter names: same bits, same bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.checkpoint.format import encode
from runtime.checkpoint.store import write_atomic
from runtime.shards.layout import FlatLayout, views


def write_weights(path: Path, flat: torch.Tensor, layout: FlatLayout) -> None:
    """Write the parameters of `flat` (fp32 [layout.total]) to `path`, whole or not at all. HostError if it can't."""
    write_atomic(path, encode(views(flat, layout), {"format": "pt"}))
