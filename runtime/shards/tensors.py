"""The arithmetic of a step on tensors: what the step transaction decides about, in production.

    rank buffers   flat fp32 [layout.total]; the compute thread takes one, fills it, and it is kept as a node
    reduce         the parts of all logical ranks, added in the order of the canonical tree (comm/order.py)
    squared norm   fsum over blocks of 32,768 elements, from the shard's start, of each block's fp64 sum of squares
    digest         xxh3_128 over the reduced gradient's bytes

Threads: all methods belong to one control thread. Only ``take_buffer``, ``give_back`` and ``staged_pieces`` may be
called from the compute thread, which writes nothing but the buffers it took.

What can still be asked for is never written: reduce writes to a buffer of its own, apply scales into scratch.
What a link brought is kept as it came and not copied: a payload is the receiver's own for as long as it likes.
Sums run block by block while a block is in cache, into buffers that are reused: allocating would cost more than
adding. numpy adds here, as it never starts threads of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from dataloader.errors import InternalError, PeerError
from runtime.comm.order import children, is_leaf
from runtime.guard import Verdict, exact_sum
from runtime.protocol import Node
from runtime.shards.holding import GroupOptions, Holding, MakeOptimizer, optimizer_variant
from runtime.shards.layout import FlatLayout
from runtime.shards.state import HoldingState, unpack

BLOCK = 32_768  # elements

Floats = NDArray[np.float32]
Addition = tuple[int, int, int]  # registers: target, left, right


class StateSource(Protocol):
    """Where whole versions come from: the checkpoint reader."""

    def check(self, version: int, layout: FlatLayout, optimizer: str) -> None:
        """DataError unless that version is there and was written for this layout and optimizer."""

    def load_shard(self, version: int, shard: int) -> HoldingState: ...


class TensorArithmetic:
    """The ``Arithmetic`` of runtime/arithmetic.py. ``options``: the recipe's groups, without their parameters."""

    def __init__(
        self, layout: FlatLayout, make_optimizer: MakeOptimizer, options: GroupOptions, source: StateSource
    ) -> None:
        self.layout = layout
        self.optimizer = optimizer_variant(make_optimizer, options)
        self.nodes: dict[Node, torch.Tensor] = {}
        self.holdings: dict[int, Holding] = {}
        self.pending: dict[tuple[int, int], Floats] = {}  # by (shard, step)
        self._make_optimizer, self._options, self._source = make_optimizer, options, source
        self._rank_buffers = _Pool()
        self._shard_buffers = _Pool()
        self._sizes = tuple(high - low for low, high in map(layout.shard_range, range(layout.shards)))
        self._own_staged = torch.zeros(layout.total).numpy()
        self._staged = [self._own_staged[slice(*layout.shard_range(s))] for s in range(layout.shards)]
        self._ours: set[tuple[int, int]] = set()  # pending gradients whose buffers are the pool's
        self._scaled = torch.zeros(max(self._sizes))
        self._reduction = _Reduction()

    # --- gradients of logical ranks -----------------------------------------------------------------------

    def take_buffer(self) -> torch.Tensor:
        """A flat fp32 buffer [layout.total] with anything in it."""
        return torch.from_numpy(self._rank_buffers.take(self.layout.total))

    def give_back(self, buffer: torch.Tensor) -> None:
        """A taken buffer that was not kept, because its work was cancelled."""
        self._rank_buffers.put(buffer.numpy())

    def keep(self, rank: int, buffer: torch.Tensor) -> None:
        """A taken buffer now holds this logical rank's gradient."""
        node = (rank, rank + 1)
        if node in self.nodes:
            raise InternalError(f"logical rank {rank} was computed twice")
        self.nodes[node] = buffer

    def merge(self, left: Node, right: Node) -> None:
        total, other = self.nodes.pop(left), self.nodes.pop(right)
        np.add(total.numpy(), other.numpy(), out=total.numpy())
        self.give_back(other)
        self.nodes[left[0], right[1]] = total

    def forget(self, node: Node) -> None:
        self.give_back(self.nodes.pop(node))

    def contribution(self, nodes: tuple[Node, ...], shard: int) -> list[memoryview]:
        low, high = self.layout.shard_range(shard)
        return [_bytes(self.nodes[node].numpy()[low:high]) for node in nodes]

    # --- reduced gradients --------------------------------------------------------------------------------

    def reduce(self, shard: int, step: int, parts: list[tuple[tuple[Node, ...], Any]]) -> tuple[float, bytes]:
        size = self._sizes[shard]
        operands = {
            node: array
            for nodes, payload in parts
            for node, array in zip(nodes, _split(payload, len(nodes), size), strict=True)
        }
        result = self._shard_buffers.take(size)
        squared_norm, digest = self._reduction.run(operands, result)
        self._set_pending(shard, step, result, ours=True)
        return squared_norm, digest

    def gradient(self, shard: int, step: int) -> memoryview:
        return _bytes(self.pending[shard, step])

    def store_gradient(self, shard: int, step: int, payload: Any) -> bytes:
        (received,) = _split(payload, 1, self._sizes[shard])
        self._set_pending(shard, step, received, ours=False)
        return xxhash.xxh3_128_digest(_bytes(received))

    def forget_gradient(self, shard: int, step: int) -> None:
        gradient = self.pending.pop((shard, step))
        if (shard, step) in self._ours:
            self._ours.discard((shard, step))
            self._shard_buffers.put(gradient)

    def _set_pending(self, shard: int, step: int, gradient: Floats, ours: bool) -> None:
        if (shard, step) in self.pending:
            self.forget_gradient(shard, step)
        self.pending[shard, step] = gradient
        if ours:
            self._ours.add((shard, step))

    # --- holdings -----------------------------------------------------------------------------------------

    def apply(self, shard: int, step: int, verdict: Verdict) -> bytes:
        holding = self.holdings[shard]
        holding.apply(step, torch.from_numpy(self.pending[shard, step]), verdict)
        self.forget_gradient(shard, step)
        return holding.state().digest()

    def digest(self, shard: int) -> bytes:
        return self.holdings[shard].state().digest()

    def parameters(self, shard: int) -> memoryview:
        """Live: the next apply changes it. By then every member has got it, or the step could not be certified."""
        return _bytes(self.holdings[shard].parameters.numpy())

    def snapshot(self, shard: int) -> tuple[Any, memoryview]:
        return self.holdings[shard].state().pack()

    def restore(self, shard: int, meta: Any, payload: Any) -> None:
        """PeerError if the snapshot is malformed or another shard's."""
        self._create(shard, unpack(meta, payload))

    def drop(self, shard: int) -> None:
        self.holdings.pop(shard, None)
        for key in [key for key in self.pending if key[0] == shard]:
            self.forget_gradient(*key)

    def optimizer_bytes(self) -> int:
        """Bytes of all holdings: master parameters and optimizer state."""
        return sum(holding.state().nbytes() for holding in self.holdings.values())

    def _create(self, shard: int, state: HoldingState) -> None:
        holding = Holding(self.layout, shard, self._make_optimizer, self._options, self._scaled)
        holding.adopt(state)
        self.holdings[shard] = holding

    # --- whole parameters of the next version -------------------------------------------------------------

    def stage(self, shard: int, payload: Any | None) -> None:
        if payload is None:  # one's own change at the next apply, so they are copied
            own = self._own_staged[slice(*self.layout.shard_range(shard))]
            own[:] = self.holdings[shard].parameters.numpy()
            self._staged[shard] = own  # filled first: the compute thread may be looking
        else:
            (self._staged[shard],) = _split(payload, 1, self._sizes[shard])

    def staged_digest(self, shard: int) -> bytes:
        return xxhash.xxh3_128_digest(_bytes(self._staged[shard]))

    def staged_pieces(self) -> list[torch.Tensor]:
        """What is staged, by shard, not copied. Also for the compute thread."""
        return [torch.from_numpy(piece) for piece in tuple(self._staged)]

    @property
    def staged(self) -> torch.Tensor:
        """A copy of what is staged: fp32 [layout.total]."""
        return torch.cat(self.staged_pieces())

    def load(self, version: int, holdings: tuple[int, ...]) -> None:
        """DataError or HostError if the checkpoint is not whole; what was held is then gone."""
        for shard in {*self.holdings, *(shard for shard, _ in self.pending)}:
            self.drop(shard)
        self._source.check(version, self.layout, self.optimizer)
        for shard in range(self.layout.shards):
            state = self._source.load_shard(version, shard)
            self.stage(shard, _bytes(state.parameters.numpy()))
            if shard in holdings:
                self._create(shard, state)


class _Pool:
    """Buffers for reuse, by size. A deque's append and pop are atomic, so two threads may share a pool."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Floats]] = {}

    def take(self, elements: int) -> Floats:
        try:
            return self._free[elements].pop()
        except (KeyError, IndexError):
            buffer: Floats = torch.empty(elements).numpy()  # torch's memory is aligned to 64 bytes
            return buffer

    def put(self, buffer: Floats) -> None:
        self._free.setdefault(buffer.size, deque()).append(buffer)


class _Reduction:
    """Adds parts in tree order, block by block, and takes norm and digest of each block while it is in cache."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Node, ...], list[Addition]] = {}
        self._scratch: list[Floats] = []
        self._squares = np.empty(BLOCK, np.float64)

    def run(self, parts: dict[Node, Floats], result: Floats) -> tuple[float, bytes]:
        """Fill `result` with the sum of parts that tile the tree; (squared norm, digest)."""
        nodes = tuple(sorted(parts))
        program = self._program(nodes)
        operands = [parts[node] for node in nodes]
        hasher, blocks = xxhash.xxh3_128(), []
        for start in range(0, result.size, BLOCK):
            stop = min(start + BLOCK, result.size)
            block = result[start:stop]
            scratch = [s[: stop - start] for s in self._scratch]
            registers = [*(part[start:stop] for part in operands), block, *scratch]
            for target, left, right in program:
                np.add(registers[left], registers[right], out=registers[target])
            if not program:
                block[:] = registers[0]
            squares = self._squares[: stop - start]
            squares[:] = block
            np.multiply(squares, squares, out=squares)
            blocks.append(float(np.add.reduce(squares)))
            hasher.update(_bytes(block))
        return exact_sum(blocks), hasher.digest()

    def _program(self, nodes: tuple[Node, ...]) -> list[Addition]:
        """The additions, in order. Registers: one per part, then the result, then scratch by depth."""
        program = self._programs.get(nodes)
        if program is None:
            program = addition_program(nodes)
            self._programs[nodes] = program
            depth = max((target - len(nodes) for target, _, _ in program), default=0)
            while len(self._scratch) < depth:
                self._scratch.append(np.empty(BLOCK, np.float32))
        return program


def addition_program(nodes: tuple[Node, ...]) -> list[Addition]:
    """Additions that sum parts (sorted nodes, tiling a tree's root) in tree order into register len(nodes)."""
    index = {node: i for i, node in enumerate(nodes)}
    program: list[Addition] = []
    used: set[int] = set()

    def emit(node: Node, target: int) -> int:
        if node in index:
            used.add(index[node])
            return index[node]
        if is_leaf(node):
            raise InternalError(f"no gradient for logical rank {node[0]} among {nodes}")
        left, right = children(node)
        a = emit(left, target)
        b = emit(right, target + 1)
        program.append((target, a, b))
        return target

    emit((0, max(high for _, high in nodes)), len(nodes))
    if len(used) != len(nodes):
        raise InternalError(f"gradients {nodes} overlap")
    return program


def _split(payload: Any, count: int, elements: int) -> list[Floats]:
    """`count` fp32 arrays of so many elements, without copying; from one buffer or from a list of them."""
    buffers = payload if isinstance(payload, (list, tuple)) else [payload]
    if sum(memoryview(b).nbytes for b in buffers) != 4 * count * elements:
        got = sum(memoryview(b).nbytes for b in buffers)
        raise PeerError(f"a payload of {got} bytes where {count} x {elements} floats were due")
    if len(buffers) == count:
        return [np.frombuffer(b, np.float32) for b in buffers]
    (whole,) = buffers
    return list(np.frombuffer(whole, np.float32).reshape(count, elements))


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B")
