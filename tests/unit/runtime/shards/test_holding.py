"""A holding moves: at any moment, with any elementwise optimizer, and trains on to the same bits."""

from __future__ import annotations

import json

import msgpack
import pytest
import torch
import xxhash

from dataloader.errors import PeerError, RecipeError
from runtime.guard import Verdict
from runtime.shards.holding import Holding, optimizer_variant
from runtime.shards.layout import flat_layout
from runtime.shards.state import HoldingState, PieceState, unpack

LAYOUT = flat_layout([[("w", (10, 16))], [("b", (32,))]], 2)  # shard 1 has a piece of each group
GROUPS = [{"weight_decay": 0.1}, {"weight_decay": 0.0}]


class Counting(torch.optim.Optimizer):
    """Keeps a number in its state and another in its group, and no tensor at all at first."""

    def __init__(self, groups, lr=0.1, weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "calls": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > 1:
                    state.setdefault("half", torch.zeros_like(p, dtype=torch.bfloat16)).add_(p.grad)
                p.mul_(1 - group["weight_decay"] / group["calls"]).sub_(p.grad, alpha=group["lr"] / state["step"])


OPTIMIZERS = {
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "counting": Counting,
}


def holding(make, shard=1):
    low, high = LAYOUT.shard_range(shard)
    return Holding(LAYOUT, shard, make, GROUPS, torch.zeros(high - low))


def started(make):
    made = holding(make)
    parameters = torch.randn(made.parameters.shape, generator=torch.Generator().manual_seed(3))
    made.adopt(HoldingState(0, parameters, tuple(PieceState() for _ in LAYOUT.pieces(1))))
    return made


def train(made, steps):
    for step in range(made.version, made.version + steps):
        gradient = torch.randn(made.parameters.shape, generator=torch.Generator().manual_seed(step))
        made.apply(step, gradient, Verdict("commit", 0.5, 1.0 / (step + 1), 0.0, 1.0, 1.0, 1))
    return made


def over_the_wire(state):
    meta, payload = state.pack()
    return unpack(msgpack.unpackb(msgpack.packb(meta)), memoryview(bytes(payload)))


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_moved_holding_trains_on_to_the_same_bits(make, before):
    source, target = train(started(make), before), holding(make)
    target.adopt(over_the_wire(source.state()))
    assert target.version == before
    assert target.state().digest() == source.state().digest()
    train(source, 3)
    train(target, 3)
    assert target.state().digest() == source.state().digest()
    assert torch.equal(target.parameters, source.parameters)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_packed_state_is_a_copy(make):
    made = train(started(make), 2)
    digest = made.state().digest()
    meta, payload = made.state().pack()
    train(made, 2)
    assert made.state().digest() != digest
    assert unpack(meta, payload).digest() == digest
    made.adopt(unpack(meta, payload))  # also back in time
    assert made.state().digest() == digest
    assert train(made, 2).state().digest() == train(started(make), 4).state().digest()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_adopting_leaves_nothing_shared_and_nothing_over(make):
    source, target = train(started(make), 2), train(started(make), 3)
    digest = source.state().digest()
    target.adopt(source.state())
    train(source, 1)
    assert target.state().digest() == digest
    target.adopt(started(make).state())  # nothing kept yet
    assert train(target, 3).state().digest() == source.state().digest()


def test_the_digest_is_the_documented_one():
    made = train(started(OPTIMIZERS["adamw fused"]), 2)
    hasher = xxhash.xxh3_128(made.parameters.numpy().tobytes())
    for parameter in made._pieces:
        state = made._optimizer.state[parameter]
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        for key in sorted(state):
            hasher.update(state[key].numpy().tobytes())
    assert made.state().digest() == hasher.digest()
    made = train(started(Counting), 1)
    hasher = xxhash.xxh3_128(made.parameters.numpy().tobytes())
    for _ in range(2):
        hasher.update(json.dumps([{"step": 1}, {"calls": 1}]).encode())
    assert made.state().digest() == hasher.digest()


def test_the_digest_sees_every_bit_of_the_state():
    made = train(started(OPTIMIZERS["adamw fused"]), 2)
    seen = {made.state().digest()}
    for tensor in made.state().tensors():
        tensor.reshape(-1)[-1] += 1.0
        seen.add(made.state().digest())
    assert len(seen) == 1 + 1 + 2 * 3


def test_each_group_keeps_its_own_rate_and_options():
    made = started(lambda groups: torch.optim.SGD(groups, lr=2.0))
    before = made.parameters.clone()
    made.apply(0, torch.zeros_like(before), Verdict("commit", 1.0, 0.25, 0.0, 1.0, 1.0, 1))
    (first, second) = LAYOUT.pieces(1)
    low = LAYOUT.shard_range(1)[0]
    decayed, kept = slice(first.start - low, first.stop - low), slice(second.start - low, second.stop - low)
    assert torch.equal(made.parameters[kept], before[kept])
    assert torch.allclose(made.parameters[decayed], before[decayed] * (1 - 0.25 * 2.0 * 0.1))


def test_a_malformed_snapshot_is_refused():
    made = train(started(OPTIMIZERS["adamw fused"]), 1)
    meta, payload = made.state().pack()
    for bad_meta, bad_payload in [
        (meta, payload[:-4]),
        (meta, bytes(payload) + b"1234"),
        (meta[:2], payload),
        ([meta[0], 1 << 60, meta[2]], payload),
        ([meta[0], -16, meta[2]], payload),
        ([meta[0], meta[1], [[[["exp_avg", "load", [4]]], {}, {}]]], payload),
    ]:
        with pytest.raises(PeerError, match="a shard's snapshot"):
            unpack(bad_meta, bad_payload)
    with pytest.raises(PeerError, match="other sizes"):
        holding(OPTIMIZERS["sgd"], shard=0).adopt(made.state())


class Aliasing(Counting):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = p.grad


class Hoarding(Counting):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]


def test_optimizers_whose_state_cannot_move_are_refused():
    with pytest.raises(RecipeError, match="'last'; keep a clone"):
        train(started(Aliasing), 1)
    with pytest.raises(RecipeError, match="a list as 'history'"):
        train(started(Hoarding), 1).state()
    with pytest.raises(RecipeError, match="other parameter groups"):
        holding(lambda groups: Counting([p for group in groups for p in group["params"]]))


def test_the_variant_names_what_chooses_the_kernel():
    fused = optimizer_variant(OPTIMIZERS["adamw fused"], GROUPS)
    assert fused.startswith("torch.optim.adamw.AdamW ")
    assert "fused=True" in fused
    assert fused != optimizer_variant(OPTIMIZERS["adamw"], GROUPS)
    with pytest.raises(RecipeError, match="groups differ in"):
        optimizer_variant(OPTIMIZERS["adamw"], [{"foreach": True}, {}])
