"""The arithmetic on tensors, beside a plain one that adds whole buffers and trains whole parameters."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
import xxhash

from dataloader.errors import DataError, InternalError, PeerError
from runtime.comm.order import children, cover, is_leaf, root
from runtime.guard import Verdict
from runtime.shards.layout import flat_layout, views
from runtime.shards.state import HoldingState, PieceState
from runtime.shards.tensors import TensorArithmetic, addition_program

BLOCK = 32_768
SHAPES = [[("a", (66, 1024)), ("b", (33, 16))], [("n", (48,)), ("m", (272,))]]  # all multiples of 16
GROUPS = [{"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 3e-3}]
COMMIT = Verdict("commit", 0.0371, 0.5, 5e-4, 1.0, 1.0, 8)
SKIP = Verdict("skip", 0.0, 0.5, 5e-4, math.nan, math.nan, 0)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


class Start:
    """Version 0, from one flat tensor; as the checkpoint reader gives it."""

    def __init__(self, layout, flat):
        self.layout, self.flat = layout, flat

    def check(self, version, layout, optimizer):
        if version != 0:
            raise DataError("no such version")

    def load_shard(self, version, shard):
        low, high = self.layout.shard_range(shard)
        return HoldingState(
            version, self.flat[low:high].clone(), tuple(PieceState() for _ in self.layout.pieces(shard))
        )


def random_flat(layout, seed):
    """Values in the parameters' places, zeros in the padding."""
    flat = torch.zeros(layout.total)
    generator = torch.Generator().manual_seed(seed)
    for view in views(flat, layout).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return flat


def arithmetic(shards=3, shapes=SHAPES, make=adamw, groups=GROUPS, holdings=None):
    layout = flat_layout(shapes, shards)
    made = TensorArithmetic(layout, make, groups, Start(layout, random_flat(layout, 1)))
    made.load(0, tuple(range(shards)) if holdings is None else holdings)
    return made


def gradients(layout, ranks, seed=5):
    return [random_flat(layout, seed + rank) * 10.0 ** (rank % 3) for rank in range(ranks)]


def keep_all(made, flats):
    for rank, flat in enumerate(flats):
        buffer = made.take_buffer()
        buffer.copy_(flat)
        made.keep(rank, buffer)


def pre_add(made, node):
    """Merge every subtree below `node`, as the step transaction does for the ranks of one worker."""
    if not is_leaf(node):
        left, right = children(node)
        pre_add(made, left)
        pre_add(made, right)
        made.merge(left, right)


def reduce_as(owners, layout, flats, shard, through=lambda payload: payload):
    """Reduce one shard with the ranks computed by these workers, pre-added; through: what a link does to payloads."""
    parts = []
    for worker in sorted(set(owners)):
        sender = TensorArithmetic(layout, adamw, GROUPS, Start(layout, flats[0]))
        nodes = cover([rank for rank, owner in enumerate(owners) if owner == worker], len(owners))
        for node in nodes:
            for rank in range(*node):
                buffer = sender.take_buffer()
                buffer.copy_(flats[rank])
                sender.keep(rank, buffer)
            pre_add(sender, node)
        parts.append((nodes, through(sender.contribution(nodes, shard))))
    receiver = TensorArithmetic(layout, adamw, GROUPS, Start(layout, flats[0]))
    answer = receiver.reduce(shard, 4, parts)
    return *answer, bytes(receiver.gradient(shard, 4))


def plain_sum(node, flats):
    if is_leaf(node):
        return flats[node[0]]
    left, right = children(node)
    return plain_sum(left, flats) + plain_sum(right, flats)


def plain_reduction(layout, flats, shard):
    low, high = layout.shard_range(shard)
    total = plain_sum(root(len(flats)), flats)[low:high].numpy()
    blocks = [total[i : i + BLOCK].astype(np.float64) for i in range(0, len(total), BLOCK)]
    squared = math.fsum(float(np.square(block).sum()) for block in blocks)
    return squared, xxhash.xxh3_128_digest(total.tobytes()), total.tobytes()


def contiguous(payload):
    """One read-only buffer that isn't aligned: the worst that a link may deliver."""
    return memoryview(b"x" + b"".join(payload))[1:]


MAPS = [[0] * 8, list(range(8)), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 2, 0, 2], [3, 0, 0, 0, 0, 1, 1, 2]]


@pytest.mark.parametrize("through", [list, contiguous])
@pytest.mark.parametrize("owners", MAPS)
def test_a_reduction_does_not_depend_on_who_computed_what(owners, through):
    layout = flat_layout(SHAPES, 2)
    flats = gradients(layout, 8)
    for shard in range(2):
        assert layout.shard_range(shard)[1] - layout.shard_range(shard)[0] > BLOCK
        assert reduce_as(owners, layout, flats, shard, through) == plain_reduction(layout, flats, shard)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_any_number_of_logical_ranks_is_reduced(ranks):
    layout = flat_layout(SHAPES, 2)
    flats = gradients(layout, ranks)
    assert reduce_as(list(range(ranks)), layout, flats, 1) == plain_reduction(layout, flats, 1)


def test_a_plain_sum_in_order_of_arrival_gives_other_bits():
    """The negative control: the comparison above would notice."""
    layout = flat_layout(SHAPES, 1)
    flats = gradients(layout, 8)
    left_fold = sum(flats[1:], flats[0])
    backwards = sum(flats[-2::-1], flats[-1])
    results = {reduce_as(MAPS[2], layout, flats, 0)[2], left_fold.numpy().tobytes(), backwards.numpy().tobytes()}
    assert len(results) == 3


def test_programs_are_checked():
    assert addition_program(((0, 4), (4, 5))) == [(2, 0, 1)]
    with pytest.raises(InternalError, match="logical rank 2"):
        addition_program(((0, 2), (3, 4)))
    with pytest.raises(InternalError, match="overlap"):
        addition_program(((0, 1), (0, 2), (2, 4)))


class Peeking:
    """Parameters whose copying shows what the compute thread would see meanwhile."""

    def __init__(self, made, shard, values):
        self.made, self.shard, self.values = made, shard, values
        self.seen = None

    @property
    def parameters(self):
        return self

    def numpy(self):
        self.seen = self.made.staged_pieces()[self.shard].clone()
        return self.values.numpy()


def test_what_is_staged_is_whole_at_every_moment():
    made = arithmetic()
    before = made.staged_pieces()[1].clone()
    assert before.any()
    made.holdings[1] = peeking = Peeking(made, 1, before + 1)
    made.stage(1, None)
    assert torch.equal(peeking.seen, before)
    assert torch.equal(made.staged_pieces()[1], before + 1)


def test_nothing_that_can_be_asked_for_again_is_written():
    made = arithmetic()
    flats = gradients(made.layout, 4)
    keep_all(made, flats)
    nodes = tuple(sorted(made.nodes))
    for shard in range(3):
        low, high = made.layout.shard_range(shard)
        made.reduce(shard, 0, [(nodes, made.contribution(nodes, shard))])
        before = bytes(made.gradient(shard, 0))
        made.reduce(shard, 1, [(nodes, made.contribution(nodes, shard))])
        made.holdings[shard].apply(0, torch.from_numpy(made.pending[shard, 0]), COMMIT)
        assert bytes(made.gradient(shard, 0)) == bytes(made.gradient(shard, 1)) == before
        for node, flat in zip(nodes, flats, strict=True):
            (payload,) = made.contribution((node,), shard)
            assert bytes(payload) == flat[low:high].numpy().tobytes()


def test_buffers_are_used_again():
    made = arithmetic()
    keep_all(made, gradients(made.layout, 4))
    first = {buffer.data_ptr() for buffer in made.nodes.values()}
    pre_add(made, (0, 4))
    made.forget((0, 4))
    taken = [made.take_buffer() for _ in range(4)]
    assert {buffer.data_ptr() for buffer in taken} == first
    made.give_back(taken[0])
    assert made.take_buffer().data_ptr() == taken[0].data_ptr()
    made.keep(0, taken[0])
    with pytest.raises(InternalError, match="rank 0 was computed twice"):
        made.keep(0, taken[1])


def test_a_stored_gradient_is_what_came_with_the_owners_digest():
    owner, backup = arithmetic(), arithmetic()
    keep_all(owner, gradients(owner.layout, 2))
    nodes = ((0, 1), (1, 2))
    _, digest = owner.reduce(1, 0, [(nodes, owner.contribution(nodes, 1))])
    sent = bytearray(owner.gradient(1, 0))
    assert backup.store_gradient(1, 0, memoryview(sent)) == digest
    assert np.shares_memory(np.frombuffer(sent, np.uint8), np.frombuffer(backup.gradient(1, 0), np.uint8))
    assert owner.apply(1, 0, COMMIT) == backup.apply(1, 0, COMMIT) == owner.digest(1)
    assert owner.pending == backup.pending == {}
    taken = owner.reduce(1, 1, [(nodes, owner.contribution(nodes, 1))])
    assert backup.reduce(1, 1, [(nodes, owner.contribution(nodes, 1))]) == taken
    assert not np.shares_memory(np.frombuffer(sent, np.uint8), np.frombuffer(backup.gradient(1, 1), np.uint8))


def test_received_payloads_are_let_go():
    made = arithmetic()
    size = made._sizes[0]
    for step in range(3):
        gradient, parameters = np.ones(size, np.float32), np.full(size, step, np.float32)
        watched = [weakref.ref(gradient), weakref.ref(parameters)]
        made.store_gradient(0, step, gradient.data)
        made.stage(0, parameters.data)
        del gradient, parameters
        assert all(ref() is not None for ref in watched)
        made.apply(0, step, COMMIT)
        made.stage(0, None)
        assert [ref() for ref in watched] == [None, None]


class Whole:
    """The plain trainer: one optimizer over whole parameters, no layout, no shards."""

    def __init__(self, layout, flat, make=adamw, groups=GROUPS):
        self.parameters = {name: torch.nn.Parameter(view.clone()) for name, view in views(flat, layout).items()}
        members = [[self.parameters[s.name] for s in layout.slots if s.group == g] for g in range(len(groups))]
        self.optimizer = make([{**options, "params": p} for options, p in zip(groups, members, strict=True)])
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, layout, gradient, verdict):
        for name, view in views(gradient, layout).items():
            self.parameters[name].grad = view * verdict.scale
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * verdict.lr_ratio
        self.optimizer.step()


def momentum(groups):
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_optimizers_on_pieces_train_as_on_whole_parameters(shards, make):
    made = arithmetic(shards, make=make)
    whole = Whole(made.layout, random_flat(made.layout, 1), make)
    for step in range(4):
        gradient = random_flat(made.layout, 50 + step)
        verdict = Verdict("commit", 0.01 * (step + 1), 1.0 / (step + 1), 0.0, 1.0, 1.0, 1)
        whole.step(made.layout, gradient, verdict)
        for shard in range(shards):
            low, high = made.layout.shard_range(shard)
            made.store_gradient(shard, step, gradient[low:high].numpy())
            made.apply(shard, step, verdict)
            made.stage(shard, None)
    for name, view in views(made.staged, made.layout).items():
        assert torch.equal(view, whole.parameters[name].detach())


def test_odd_sizes_train_as_whole_parameters_padded_to_16():
    """Fused kernels treat the tail of a parameter differently, so a whole parameter must be padded to be equal."""
    odd = [[("a", (39,)), ("b", (7, 9))], [("n", (5,))]]
    made = arithmetic(2, shapes=odd)
    padded = {slot.name: torch.nn.Parameter(torch.zeros(slot.stop - slot.start)) for slot in made.layout.slots}
    for slot in made.layout.slots:
        padded[slot.name].data.copy_(random_flat(made.layout, 1)[slot.start : slot.stop])
    optimizer = adamw([{**GROUPS[0], "params": [padded["a"], padded["b"]]}, {**GROUPS[1], "params": [padded["n"]]}])
    for step in range(20):
        gradient = random_flat(made.layout, 50 + step)
        for slot in made.layout.slots:
            padded[slot.name].grad = gradient[slot.start : slot.stop].clone()
        optimizer.step()
        for shard in range(2):
            low, high = made.layout.shard_range(shard)
            made.store_gradient(shard, step, gradient[low:high].numpy())
            made.apply(shard, step, Verdict("commit", 1.0, 1.0, 0.0, 1.0, 1.0, 1))
            made.stage(shard, None)
    for slot in made.layout.slots:
        assert torch.equal(made.staged[slot.start : slot.stop], padded[slot.name].detach())
    padding = [made.staged[slot.start + slot.numel : slot.stop] for slot in made.layout.slots]
    assert not torch.cat(padding).any()


def test_a_skipped_step_is_the_identity():
    made, twin = arithmetic(), arithmetic()
    for step, verdict in enumerate([COMMIT, SKIP, COMMIT]):
        before = made.digest(0)
        made.store_gradient(0, step, torch.full((made._sizes[0],), math.nan if verdict is SKIP else 1.0).numpy())
        after = made.apply(0, step, verdict)
        assert (after == before) is (verdict is SKIP)
    for step in range(2):
        twin.store_gradient(0, step, torch.ones(made._sizes[0]).numpy())
        twin.apply(0, step, COMMIT)
    assert made.digest(0) == twin.digest(0)
    assert made.pending == {}


def test_staging_and_publishing_share_no_copy_but_the_last():
    made, other = arithmetic(), arithmetic(holdings=(1,))
    payload = made.parameters(1)
    low, high = made.layout.shard_range(1)
    made.store_gradient(1, 0, torch.ones(high - low).numpy())
    made.apply(1, 0, COMMIT)
    assert bytes(payload) == made.holdings[1].parameters.numpy().tobytes()  # live
    other.stage(1, payload)
    made.stage(1, None)
    assert torch.equal(other.staged[low:high], made.holdings[1].parameters)
    assert torch.equal(other.staged, made.staged)
    assert np.shares_memory(other.staged_pieces()[1].numpy(), np.frombuffer(payload, np.float32))
    before = made.staged
    made.store_gradient(1, 1, torch.ones(high - low).numpy())
    made.apply(1, 1, COMMIT)
    assert torch.equal(made.staged, before)  # its own are copied: a later apply doesn't reach them
    assert torch.equal(torch.cat(made.staged_pieces()), before)


def test_load_forgets_and_brings_exactly_what_is_asked():
    made = arithmetic(holdings=(0, 2))
    start = random_flat(made.layout, 1)
    assert torch.equal(made.staged, start)
    made.store_gradient(1, 0, torch.ones(made._sizes[1]).numpy())
    made.store_gradient(2, 0, torch.ones(made._sizes[2]).numpy())
    made.apply(2, 0, COMMIT)
    assert made.optimizer_bytes() == sum(
        t.numel() * t.element_size() for h in made.holdings.values() for t in h.state().tensors()
    )
    made.load(0, (2, 1))
    assert sorted(made.holdings) == [1, 2]
    assert made.pending == {}
    assert made.optimizer_bytes() == 4 * (made._sizes[1] + made._sizes[2])  # nothing but parameters yet
    assert made.digest(2) == arithmetic().digest(2)
    made.drop(2)
    made.drop(2)
    with pytest.raises(DataError):
        made.load(3, (0,))


def test_what_does_not_fit_is_refused():
    made = arithmetic()
    with pytest.raises(PeerError, match="8 bytes where 1 x"):
        made.store_gradient(0, 0, b"12345678")
    with pytest.raises(PeerError, match="0 bytes where 2 x"):
        made.reduce(0, 0, [(((0, 1), (1, 2)), b"")])
    with pytest.raises(PeerError):
        made.stage(0, made.parameters(2)[4:])
    made.store_gradient(0, 1, torch.ones(made._sizes[0]).numpy())
    with pytest.raises(InternalError, match="shard 0 is at version 0; step 1"):
        made.apply(0, 1, COMMIT)
