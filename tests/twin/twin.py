"""The dumb twin: one process, one plain loop, whole parameters. It restates the documented rules and uses nothing of
Everstep's but the model and the order of samples."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, step: int, micro_batch: int) -> None:
    def draw(stream: str) -> int:
        text = f"{seed}/{step}/{micro_batch}/{stream}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    torch.manual_seed(draw("torch"))
    np.random.seed(draw("numpy"))
    random.seed(draw("python"))


def tree(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Left part: the largest power of two below the size."""
    if len(gradients) == 1:
        return gradients[0]
    half = 1 << ((len(gradients) - 1).bit_length() - 1)
    return tree(gradients[:half]) + tree(gradients[half:])


def squared_norm(flat: torch.Tensor, shards: int) -> float:
    """fp64 squares in blocks of 32,768 from each shard's start, joined exactly, shard by shard."""
    units = flat.numel() // 16
    bounds = [16 * (units * s // shards) for s in range(shards + 1)]
    parts = []
    for low, high in itertools.pairwise(bounds):
        blocks = flat[low:high].double().numpy()
        parts.append(math.fsum(float(np.sum(blocks[i : i + 32768] ** 2)) for i in range(0, len(blocks), 32768)))
    return math.fsum(parts)


def train(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    stream: Any,
    job: dict[str, Any],
    skip: tuple[int, ...] = (),  # steps that are not applied
) -> dict[str, Any]:
    t, lr = job["train"], job["optimizer"]["lr"]
    ranks, micro_batch, batch = t["logical_ranks"], t["micro_batch"], t["global_batch"]
    per_rank = batch // (micro_batch * ranks)
    params = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses, norms = [], []
    for step in range(t["steps"]):
        gradients, loss_parts, count = [], [], 0
        for rank in range(ranks):
            for p in params:
                p.grad = torch.zeros_like(p)
            for m in range(rank * per_rank, (rank + 1) * per_rank):
                tokens = torch.from_numpy(stream.tokens(step * batch + m * micro_batch, micro_batch))
                seed_all(t["seed"], step, m)
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1), reduction="sum")
                loss.backward()
                loss_parts.append(float(loss.detach()))
                count += tokens[:, 1:].numel()
            pads = [torch.nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 16)) for p in params]
            gradients.append(torch.cat(pads))
        total = tree(gradients)
        if step in skip:
            losses.append(math.fsum(loss_parts) / count)
            continue
        norm = math.sqrt(squared_norm(total, t.get("shards", ranks))) / count
        scale = min(1.0, 1.0 / (norm + 1e-6)) / count
        offset = 0
        for p in params:
            p.grad = (total[offset : offset + p.numel()] * scale).view_as(p)
            offset += p.numel() + -p.numel() % 16
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / job["schedule"]["warmup_steps"])
        optimizer.step()
        losses.append(math.fsum(loss_parts) / count)
        norms.append(norm)
    state = [optimizer.state[p] for p in params]
    return {
        "losses": losses,
        "norms": norms,
        "parameters": [p.detach() for p in params],
        "exp_avg": [s["exp_avg"] for s in state],
        "exp_avg_sq": [s["exp_avg_sq"] for s in state],
    }
