"""What every system trains: a small model on synthetic data, each micro-batch padded to a fixed wall time.

Two cores give the same tokens per second to one worker as to four, so a worker's loss would cost nothing there. Here
a micro-batch computes for some milliseconds and sleeps the rest of MICRO_BATCH_SECONDS, so that a lost worker is a
quarter of the speed, as on machines with a processor for each.

Imports torch and numpy only: each system's workers import it in that system's own venv.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.peers.shape import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    MICRO_BATCH,
    MICRO_BATCH_SECONDS,
    SAMPLES,
    SEED,
    SEQ_LEN,
    VOCABULARY,
    WORKER_BATCH,
)
from bench.peers.step_lines import StepLines


@cache
def rows() -> NDArray[np.int64]:
    """int64 [SAMPLES + 1, SEQ_LEN]: each next token follows from the last one three times out of four."""
    rng = np.random.default_rng(SEED)
    out = np.empty((SAMPLES + 1, SEQ_LEN), dtype=np.int64)
    out[:, 0] = rng.integers(0, 256, SAMPLES + 1)
    for place in range(1, SEQ_LEN):
        noise = rng.integers(0, 256, SAMPLES + 1)
        out[:, place] = np.where(rng.random(SAMPLES + 1) < 0.75, (out[:, place - 1] * 5 + 17) % 256, noise)
    return out


def samples(indices: Sequence[int]) -> Tensor:
    """int64 [n, SEQ_LEN + 1]: a row and the first token of the next one."""
    index = np.asarray(indices, dtype=np.int64)
    return torch.from_numpy(np.concatenate([rows()[index], rows()[index + 1, :1]], axis=1))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, VOCABULARY))


def seeded_model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return build_model()


def optimizer(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.0)


def padded_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """Summed loss and number of tokens, not before MICRO_BATCH_SECONDS have passed."""
    begun = time.monotonic()
    targets = tokens[:, 1:]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum")
    time.sleep(max(0.0, MICRO_BATCH_SECONDS - (time.monotonic() - begun)))
    return loss, targets.numel()


def accumulate(model: Any, batch: Sequence[int], lines: StepLines, attempt: Callable[[float], None]) -> None:
    """One worker's micro-batches of a step; through DDP, gradients are reduced with the last one.

    `attempt` is called with the mean loss right before that.
    """
    total = 0.0
    for start in range(0, WORKER_BATCH, MICRO_BATCH):
        part = list(batch[start : start + MICRO_BATCH])
        last = start + MICRO_BATCH == WORKER_BATCH
        with model.no_sync() if hasattr(model, "no_sync") and not last else contextlib.nullcontext():
            loss, _ = padded_loss(model, samples(part))
            lines.write("computed", samples=part)
            total += loss.item()
            if last:
                attempt(total / (WORKER_BATCH * SEQ_LEN))
            (loss / (WORKER_BATCH * SEQ_LEN)).backward()  # type: ignore[no-untyped-call]


def worker_batch(step: int, rank: int) -> range:
    """The samples of one rank in the one order that the global batches follow."""
    first = step * GLOBAL_BATCH + rank * WORKER_BATCH
    return range(first, first + WORKER_BATCH)


def digest(model: nn.Module) -> str:
    """Of all parameters' bytes."""
    whole = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        whole.update(parameter.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()
