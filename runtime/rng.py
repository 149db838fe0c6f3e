"""Random streams as a function of (job seed, step, micro-batch): nothing to save, nothing to move.

All generators that a model may draw from are set before each micro-batch, so that whoever computes it draws the
same numbers. torch's CPU generator keeps 32 bits of its seed, so the hash is cut to 32 bits here, for all alike.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch


def stream_seed(seed: int, step: int, micro_batch: int, stream: str) -> int:
    """The 32-bit seed of one named stream of one micro-batch of one step."""
    name = f"{seed}/{step}/{micro_batch}/{stream}".encode()
    return int.from_bytes(blake2b(name, digest_size=4).digest(), "little")


def set_streams(seed: int, step: int, micro_batch: int) -> None:
    """Set the global generators of torch (CPU, and CUDA where ``pin`` found it), numpy and ``random``."""
    _set(seed, step, micro_batch, prefix="")


def set_build_streams(seed: int) -> None:
    """Set the same generators for building a model, apart from every step's streams."""
    _set(seed, 0, 0, prefix="build.")


def _set(seed: int, step: int, micro_batch: int, prefix: str) -> None:
    # The generator's own method: torch.manual_seed gives the same stream at 75 times the cost.
    torch.default_generator.manual_seed(stream_seed(seed, step, micro_batch, f"{prefix}torch"))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(stream_seed(seed, step, micro_batch, f"{prefix}cuda"))
    np.random.seed(stream_seed(seed, step, micro_batch, f"{prefix}numpy"))
    random.seed(stream_seed(seed, step, micro_batch, f"{prefix}python"))
