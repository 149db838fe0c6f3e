"""Judge a step: pure functions of its certificate, so that every worker reaches the same verdict by itself.

    raw norm    sqrt(fsum(shard squared norms, in shard order)), of the summed loss's gradient
    grad_norm   raw norm / tokens: the norm of the mean loss's gradient
    clip        min(1, grad_clip / (grad_norm + 1e-6)), or 1 without clipping
    scale       clip / tokens: what owners and backups multiply the reduced gradient by
    bad         loss or norm isn't finite, or no token was counted; the squared raw norm is beyond fp32 (there
                torch's own clipping sees an infinite norm too); or a spike, where the job looks for spikes
    spike       loss or grad_norm is over median + spike_factor * max(median distance to it, median / 20) of the last
                spike_window committed steps; nothing is one before there are so many

All in fp64. A bad step is not decided before it was computed again (runtime/trial.py). A skipped step is decided like
any other; its application is the identity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dataloader.errors import InternalError
from runtime.protocol import Certificate, Figures, Header

LARGEST_SQUARED_NORM = (2.0 - 2.0**-23) * 2.0**127  # the largest fp32 number
LEAST_DEVIATION = 0.05  # of the median: a loss that hardly moves has no spikes for that


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The job's `guard` section, as the transaction and the controller need it."""

    on_bad_data: Literal["skip", "stop"] = "skip"
    spike_window: int = 0
    spike_factor: float = 20.0
    compare_every: int = 1

    def compares(self, version: int) -> bool:
        """Whether what is held at this version is compared with what it should be (runtime/comparing.py)."""
        return self.compare_every > 0 and version % self.compare_every == 0


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
    loss, grad_norm = figures(certificate.headers)
    lr = lr_ratio * base_lr
    if certificate.skipped or tokens <= 0 or not math.isfinite(loss) or not math.isfinite(grad_norm):
        return Verdict("skip", 0.0, lr_ratio, lr, grad_norm, loss, tokens)
    clip = 1.0 if grad_clip is None else min(1.0, grad_clip / (grad_norm + 1e-6))
    return Verdict("commit", clip / tokens, lr_ratio, lr, grad_norm, loss, tokens)


def figures(headers: Sequence[Header]) -> Figures:
    """(loss, grad_norm) of a step; NaN without tokens."""
    tokens = headers[0].tokens
    squared = exact_sum(h.squared_norm for h in headers)
    loss = headers[0].loss / tokens if tokens > 0 else math.nan
    return loss, math.sqrt(squared) / tokens if tokens > 0 and squared >= 0.0 else math.nan


def what_is_bad(headers: Sequence[Header], history: Sequence[Figures], rules: GuardRules) -> str:
    """In words; "" if nothing is. `history`: of the last committed steps."""
    if headers[0].tokens <= 0:
        return "no token was counted"
    loss, norm = figures(headers)
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient's norm is {norm}"
    if exact_sum(h.squared_norm for h in headers) > LARGEST_SQUARED_NORM:
        return f"the gradient's norm is {norm:.3g}, beyond fp32"
    if rules.spike_window > 0 and len(history) >= rules.spike_window:
        for name, value, before in (
            ("loss", loss, [h[0] for h in history]),
            ("gradient's norm", norm, [h[1] for h in history]),
        ):
            usual, limit = _limit(before[-rules.spike_window :], rules.spike_factor)
            if value > limit:
                return f"the {name} is {value:.3g}, a spike: {usual:.3g} is usual, {limit:.3g} the limit"
    return ""


def remembered(history: tuple[Figures, ...], headers: Sequence[Header], rules: GuardRules) -> tuple[Figures, ...]:
    """The history after one more committed step."""
    return (*history, figures(headers))[-rules.spike_window :] if rules.spike_window > 0 else ()


def _limit(before: Sequence[float], factor: float) -> tuple[float, float]:
    usual = statistics.median(before)
    deviation = statistics.median(abs(value - usual) for value in before)
    return usual, usual + factor * max(deviation, LEAST_DEVIATION * abs(usual))


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
