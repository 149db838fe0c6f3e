"""The verdict: a pure function of the certificate."""

from __future__ import annotations

import math
import struct

import pytest

from dataloader.errors import InternalError
from runtime.guard import GuardRules, exact_sum, judge, remembered, what_is_bad
from runtime.protocol import Certificate, Header


def certificate(squares, loss=20.0, tokens=10):
    headers = (Header(shard, square, b"g" * 16, loss, tokens, b"d" * 16) for shard, square in enumerate(squares))
    return Certificate(7, tuple(headers))


def test_clipping_is_by_the_norm_of_the_mean_loss():
    verdict = judge(certificate([900.0, 1600.0]), lr_ratio=0.5, base_lr=0.02, grad_clip=2.0)
    assert verdict.kind == "commit"
    assert verdict.grad_norm == 5.0  # sqrt(2500) / 10 tokens
    assert verdict.scale == (2.0 / (5.0 + 1e-6)) / 10
    assert (verdict.loss, verdict.tokens) == (2.0, 10)
    assert (verdict.lr_ratio, verdict.lr) == (0.5, 0.01)


@pytest.mark.parametrize("grad_clip", [None, 5.1, 1000.0])
def test_a_small_gradient_is_only_averaged(grad_clip):
    assert judge(certificate([2500.0]), 1.0, 1.0, grad_clip).scale == 1.0 / 10


def test_the_norm_does_not_depend_on_the_order_of_rounding():
    squares = [1e16, 1.0, 1.0, -0.0, 1.0, 1.0]
    assert judge(certificate(squares, tokens=1), 1.0, 1.0, None).grad_norm == math.sqrt(1e16 + 4)
    assert sum(squares) != 1e16 + 4  # which a plain sum misses


@pytest.mark.parametrize(
    "bad",
    [
        {"squares": [1.0, math.nan]},
        {"squares": [math.inf, 1.0]},
        {"squares": [1.0], "loss": math.nan},
        {"squares": [1.0], "loss": -math.inf},
        {"squares": [1.0], "tokens": 0},
        {"squares": [0.0], "tokens": 0, "loss": 0.0},
    ],
)
def test_what_is_not_finite_is_skipped(bad):
    verdict = judge(certificate(**bad), 1.0, 1.0, 1.0)
    assert (verdict.kind, verdict.scale) == ("skip", 0.0)


def test_headers_of_one_step_must_agree():
    first, second = certificate([1.0, 2.0]).headers
    other = Header(1, 2.0, second.digest, second.loss, second.tokens + 1, second.data_digest)
    with pytest.raises(InternalError, match="shards 0 and 1"):
        judge(Certificate(7, (first, other)), 1.0, 1.0, 1.0)
    with pytest.raises(InternalError, match="nothing to judge"):
        judge(Certificate(7, ()), 1.0, 1.0, 1.0)


def test_exact_sum_never_raises_and_has_one_nan():
    negative_nan = struct.unpack("<d", bytes.fromhex("000000000000f8ff"))[0]
    for values in ([math.inf, -math.inf], [1e308] * 20, [negative_nan], [math.inf, math.nan]):
        assert struct.pack("<d", exact_sum(values)) == struct.pack("<d", math.nan)
    assert exact_sum([math.inf, 1.0]) == math.inf
    assert exact_sum([0.1] * 10) == 1.0


RULES = GuardRules(spike_window=4, spike_factor=10.0)
USUAL = ((2.0, 5.0), (2.1, 5.2), (1.9, 4.8), (2.0, 5.0))  # (loss, norm)


def test_bad_is_what_is_not_finite_or_beyond_fp32():
    assert what_is_bad(certificate([2500.0]).headers, (), RULES) == ""
    assert what_is_bad(certificate([math.nan]).headers, (), RULES) == "the gradient's norm is nan"
    assert what_is_bad(certificate([1.0], loss=math.inf).headers, (), RULES) == "the loss is inf"
    assert what_is_bad(certificate([1.0], tokens=0).headers, (), RULES) == "no token was counted"
    largest = 3.4028234663852886e38
    assert what_is_bad(certificate([largest]).headers, (), GuardRules()) == ""
    assert "beyond fp32" in what_is_bad(certificate([largest, largest]).headers, (), GuardRules())


def test_a_spike_is_measured_by_the_last_committed_steps():
    # norms: median 5, usual distance 0.1, so that the floor counts: 5 + 10 * 0.25
    assert what_is_bad(certificate([74.0**2], loss=20.0).headers, USUAL, RULES) == ""
    assert "the gradient's norm is 7.6, a spike" in what_is_bad(certificate([76.0**2]).headers, USUAL, RULES)
    assert "the loss is 3.1, a spike" in what_is_bad(certificate([2500.0], loss=31.0).headers, USUAL, RULES)
    assert what_is_bad(certificate([76.0**2]).headers, USUAL[1:], RULES) == ""  # too few to say
    assert what_is_bad(certificate([76.0**2]).headers, USUAL, GuardRules()) == ""  # not looked for


def test_the_history_keeps_as_many_steps_as_the_window():
    history = remembered(USUAL, certificate([3600.0]).headers, RULES)
    assert history == (*USUAL[1:], (2.0, 6.0))
    assert remembered(USUAL, certificate([3600.0]).headers, GuardRules()) == ()


def test_a_certificate_that_says_so_is_skipped():
    skipped = Certificate(7, certificate([1.0]).headers, "the loss is 99, a spike")
    assert judge(skipped, 1.0, 1.0, 1.0).kind == "skip"
