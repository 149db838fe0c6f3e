"""Families of operations whose last bits differ between machines, run on small inputs and hashed.

Inputs come from exact integer arithmetic. Sizes are odd where kernels have tails, and large enough where they have
blocks, but all together take some 50 ms.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from runtime.model.decoder import ATTENTION_ON_CPU

Results: TypeAlias = Iterable[Tensor]


def operation_digests() -> dict[str, str]:
    """A digest (16 hex digits) of each family's results on this machine, with the settings in force."""
    return {name: _digest(run()) for name, run in OPERATIONS.items()}


def _digest(results: Results) -> str:
    hasher = xxhash.xxh3_64()
    for result in results:
        hasher.update(result.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def numbers(*shape: int, salt: int = 0) -> Tensor:
    """Fp32 in [-1, 1) with 16 bits each, the same on any host."""
    integers = torch.arange(math.prod(shape), dtype=torch.int64) * 2654435761 + salt * 1000003
    return (((integers >> 9) % 65536 - 32768).to(torch.float32) / 32768).view(shape)


def _both_ways(function: Callable[..., Tensor], *inputs: Tensor) -> Results:
    """The result and, for a gradient of its own shape, the inputs' gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, numbers(*out.shape, salt=99))]


def _matmul() -> Results:
    for rows, inner, columns in ((1, 256, 688), (37, 129, 65), (128, 256, 512)):
        yield numbers(rows, inner) @ numbers(columns, inner, salt=1).T


def _linear_gradients() -> Results:
    return _both_ways(F.linear, numbers(96, 257), numbers(129, 257, salt=1), numbers(129, salt=2))


def _batched_matmul() -> Results:
    return [torch.bmm(numbers(6, 33, 32), numbers(6, 32, 65, salt=1))]


def _attention() -> Results:
    shapes = ((2, 4, 65, 32), (2, 2, 65, 32), (2, 2, 65, 32))
    q, k, v = (numbers(*shape, salt=n) for n, shape in enumerate(shapes))
    with sdpa_kernel(ATTENTION_ON_CPU):
        return _both_ways(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), q, k, v
        )


def _softmax() -> Results:
    return [*_both_ways(lambda x: x.softmax(-1), numbers(17, 333)), numbers(17, 333).logsumexp(-1)]


def _cross_entropy() -> Results:
    targets = torch.arange(33) * 31 % 1021
    return _both_ways(lambda x: F.cross_entropy(x * 8, targets, reduction="sum"), numbers(33, 1021))


def _sums() -> Results:
    x = numbers(301, 203)
    return [x.sum(), x.mean(), x.sum(0), x.mean(-1), x.var(-1), x.reshape(-1).dot(x.reshape(-1))]


def _norms() -> Results:
    x = numbers(40009)
    return [x.norm(), torch.linalg.vector_norm(x.view(-1), 2, dtype=torch.float64), x.double().square().sum()]


def _layer_norm() -> Results:
    return _both_ways(
        lambda x, w, b: F.layer_norm(x, (255,), w, b), numbers(33, 255), numbers(255, salt=1), numbers(255, salt=2)
    )


def _rms_norm() -> Results:
    return _both_ways(lambda x, w: F.rms_norm(x, (256,), w, 1e-5), numbers(33, 256), numbers(256, salt=1))


def _activations() -> Results:
    for function in (F.silu, F.gelu, torch.tanh, torch.sigmoid, torch.erf):
        yield from _both_ways(function, numbers(1003) * 6)


def _exponentials() -> Results:
    x = numbers(1003) * 10
    return [x.exp(), x.abs().add(1e-3).log(), x.expm1(), x.abs().log1p(), x.double().exp()]


def _trigonometry() -> Results:
    x = numbers(1003) * 300
    return [x.sin(), x.cos(), x.double().sin(), x.double().cos()]


def _powers_and_roots() -> Results:
    x = numbers(1003).abs() + 0.001
    return [x.pow(1.7), torch.pow(10000.0, -x), x.sqrt(), x.rsqrt(), x.reciprocal(), x.double().pow(0.3)]


def _embedding() -> Results:
    tokens = torch.arange(400) ** 2 % 61
    return _both_ways(lambda w: F.embedding(tokens, w), numbers(61, 48))


def _indexing() -> Results:
    places = torch.arange(400) ** 2 % 61
    added = torch.zeros(61, 33).index_add_(0, places, numbers(400, 33))
    return [added, *_both_ways(lambda w: w[places], numbers(61, 33))]


def _convolution() -> Results:
    return _both_ways(lambda x, w: F.conv1d(x, w, padding=2), numbers(2, 16, 67), numbers(8, 16, 5, salt=1))


def _running_sums() -> Results:
    x = numbers(31, 203)
    return [x.cumsum(-1), x.cumsum(0), x.abs().cumprod(-1)]


def _bfloat16() -> Results:
    a, b = numbers(33, 64).bfloat16(), numbers(64, 48, salt=1).bfloat16()
    return [a @ b, a.sum(-1), a.float().softmax(-1).bfloat16()]


def _random() -> Results:
    generator = torch.Generator().manual_seed(20)
    x = torch.empty(1003)
    yield torch.rand(1003, generator=generator)
    yield torch.randn(1003, generator=generator)
    yield x.bernoulli_(0.1, generator=generator).clone()
    yield x.exponential_(generator=generator).clone()
    yield torch.randperm(257, generator=generator)
    yield torch.empty(257, dtype=torch.int64).random_(-(2**63), None, generator=generator)


def _adamw() -> Results:
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(numbers(2048))
    optimizer = torch.optim.AdamW([parameter], **options, fused=True)
    for step in range(5):
        parameter.grad = numbers(2048, salt=step + 1) / 64
        optimizer.step()
    return [parameter, *(value for _, value in sorted(optimizer.state[parameter].items()))]


def _numpy() -> Results:
    x = numbers(1003).double().abs().numpy() + 0.01
    for out in (np.exp(x), np.log(x), np.power(x, 1.7), np.cos(x), x.sum(), x.astype(np.float32).sum(), x @ x):
        yield torch.from_numpy(np.atleast_1d(out))


def _libm() -> Results:
    values = [0.9 + n / 4096 for n in range(200)]
    out = [f(v) for v in values for f in (math.exp, math.log, math.sin, math.cos, math.tanh)]
    out += [v**n for n, v in enumerate(values)]
    return [torch.frombuffer(bytearray(struct.pack(f"<{len(out)}d", *out)), dtype=torch.uint8)]


OPERATIONS: dict[str, Callable[[], Results]] = {
    "matmul": _matmul,
    "linear gradients": _linear_gradients,
    "batched matmul": _batched_matmul,
    "attention": _attention,
    "softmax": _softmax,
    "cross entropy": _cross_entropy,
    "sums": _sums,
    "norms": _norms,
    "layer norm": _layer_norm,
    "RMS norm": _rms_norm,
    "activations": _activations,
    "exponentials": _exponentials,
    "trigonometry": _trigonometry,
    "powers and roots": _powers_and_roots,
    "embedding": _embedding,
    "indexing": _indexing,
    "convolution": _convolution,
    "running sums": _running_sums,
    "bfloat16": _bfloat16,
    "random numbers": _random,
    "AdamW": _adamw,
    "numpy": _numpy,
    "libm": _libm,
}
