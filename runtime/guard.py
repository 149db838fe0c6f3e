"""Judge a step: a pure function of its certificate, so that every worker reaches the same verdict by itself.

    raw norm    sqrt(fsum(shard squared norms, in shard order)), of the summed loss's gradient
    grad_norm   raw norm / tokens: the norm of the mean loss's gradient
    clip        min(1, grad_clip / (grad_norm + 1e-6)), or 1 without clipping
    scale       clip / tokens: what owners and backups multiply the reduced gradient by
    verdict     "skip" if the loss or the norm isn't finite or no token was counted, else "commit"

All in fp64. A skipped step is decided like any other; its application is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dataloader.errors import InternalError
from runtime.protocol import Certificate, Header


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a certified step."""

    kind: Literal["commit", "skip"]
    scale: float  # factor on the reduced gradient; 0.0 when skipped
    lr_ratio: float  # the schedule's ratio, multiplied with each parameter group's own lr
    lr: float  # as shown: ratio * base lr
    grad_norm: float  # of the mean loss per token, before clipping
    loss: float  # mean per token; NaN without tokens
    tokens: int


def judge(certificate: Certificate, lr_ratio: float, base_lr: float, grad_clip: float | None) -> Verdict:
    """The verdict of a certified step. InternalError if the headers contradict each other, or there are none."""
    if certificate.void:
        raise InternalError(f"step {certificate.step} came from a checkpoint; there is nothing to judge")
    first = certificate.headers[0]
    for header in certificate.headers:
        if not _agree(first, header):
            pair = f"shards {first.shard} and {header.shard}"
            raise InternalError(f"step {certificate.step}: {pair} give different totals for one global batch")
    tokens = first.tokens
    squared = exact_sum(h.squared_norm for h in certificate.headers)
    loss = first.loss / tokens if tokens > 0 else math.nan
    grad_norm = math.sqrt(squared) / tokens if tokens > 0 and squared >= 0.0 else math.nan
    lr = lr_ratio * base_lr
    if tokens <= 0 or not math.isfinite(loss) or not math.isfinite(grad_norm):
        return Verdict("skip", 0.0, lr_ratio, lr, grad_norm, loss, tokens)
    clip = 1.0 if grad_clip is None else min(1.0, grad_clip / (grad_norm + 1e-6))
    return Verdict("commit", clip / tokens, lr_ratio, lr, grad_norm, loss, tokens)


def exact_sum(values: Iterable[float]) -> float:
    """math.fsum, but NaN (always of the same bits) where it would raise: opposite infinities, or beyond fp64."""
    try:
        total = math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan
    return math.nan if math.isnan(total) else total


def _agree(a: Header, b: Header) -> bool:
    same_loss = a.loss == b.loss or (math.isnan(a.loss) and math.isnan(b.loss))
    return same_loss and a.tokens == b.tokens and a.data_digest == b.data_digest
