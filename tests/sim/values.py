"""Small values in place of tensors: the simulator's ``Arithmetic``, and the plain loop that says what must come out.

Everything is a 64-bit hash, and every operation is sensitive to order and origin: a part that is added in another
place of the tree, comes from other parameters or belongs to another shard gives another value, and so does all that
follows. Values that production keeps in a buffer lie in a ``Cell`` here. Frames carry cells, not copies, and are read
only when they arrive; a buffer that is given back is scribbled over. So a protocol that lets a buffer be written while
a frame that counts still needs it gives wrong values, as it would in production.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from dataloader.stream import fold_digests
from runtime.guard import Verdict, judge
from runtime.protocol import Certificate, Header, Node, RankWork

if TYPE_CHECKING:
    from tests.sim.job import Job

GLOBAL_BATCH_PER_RANK = 2  # samples
BASE_LR = 0.125
GRAD_CLIP = 1.0
_MASK = (1 << 64) - 1
_INFINITE, _HUGE = 1, 2  # marks of a gradient, above its 64 bits: what it is added to is of that size


def digest_of(value: int) -> bytes:
    return (value & _MASK).to_bytes(8, "little")


def parameters_of(state: int) -> int:
    return hash((state, 11))


def wrong(gradient: int) -> int:
    """What a worker gets that computes wrongly: whatever it is added to has an infinite norm."""
    return _INFINITE << 64 | hash((gradient, 7)) & _MASK


def huge(gradient: int) -> int:
    """Far larger than any other, but finite."""
    return _HUGE << 64 | hash((gradient, 13)) & _MASK


def poisoned(gradient: int, what: str) -> int:
    return wrong(gradient) if what == "nan" else huge(gradient)


def _marks(gradient: int) -> int:
    return gradient >> 64 if gradient > 0 else 0


def _as(values: tuple[int, ...], result: int) -> int:
    marks = reduce(or_, map(_marks, values))
    return marks << 64 | result & _MASK if marks else result


def added(left: int, right: int) -> int:
    return _as((left, right), hash((left, right, 5)))


def of_shard(gradient: int, shard: int) -> int:
    return _as((gradient,), hash((gradient, shard, 3)))


def squared_norm_of(reduced: int) -> float:
    marks, usual = _marks(reduced), 0.25 + (reduced & 0xFFFF) / 0x4000
    return math.inf if marks & _INFINITE else 1e12 * usual if marks & _HUGE else usual


def applied(state: int, reduced: int, verdict: Verdict) -> int:
    return state if verdict.kind == "skip" else hash((state, reduced, verdict.scale, verdict.lr))


def rank_gradient(parameters: tuple[int, ...], step: int, rank: int) -> int:
    return hash((*parameters, step, rank))


@dataclass(frozen=True)
class Version:
    """What every worker must hold at one version, and what the step that led to it must have said."""

    states: tuple[int, ...]
    parameters: tuple[int, ...]
    reduced: tuple[int, ...] = ()
    digest: str = ""
    loss: float = 0.0
    verdict: str = ""


class Reference:
    """The undisturbed run as a plain loop: no workers, no messages, no code of the step transaction."""

    def __init__(self, seed: int, job: Job) -> None:
        self.logical_ranks, self.shards, self.micro_batches = job.logical_ranks, job.shards, job.micro_batches
        self.skips, self.window, self.factor = job.skips, job.guard.spike_window, job.guard.spike_factor
        states = tuple(hash((seed, shard, 1)) for shard in range(job.shards))
        self._committed: list[tuple[float, float]] = []
        self._versions = [Version(states, tuple(map(parameters_of, states)))]
        self._works: dict[tuple[int, int], RankWork] = {}
        self.poison: dict[int, str] = {}  # by step: nan | spike

    def work(self, step: int, rank: int) -> RankWork:
        known = self._works.get((step, rank))
        if known is None:
            losses = [1.0 + (hash((step, rank, j)) & 0xFF) / 256 for j in range(self.micro_batches)]
            if step in self.skips and rank == step % self.logical_ranks:
                losses[-1] = math.nan
            known = self._works[step, rank] = RankWork(tuple(losses), 16, digest_of(hash((step, rank, 2))))
        return known

    def version(self, version: int) -> Version:
        while len(self._versions) <= version:
            self._versions.append(self._after(self._versions[-1], len(self._versions) - 1))
        return self._versions[version]

    def _after(self, before: Version, step: int) -> Version:
        gradients = [self.gradient(before.parameters, step, rank) for rank in range(self.logical_ranks)]
        total = self._tree(gradients)
        reduced = tuple(of_shard(total, shard) for shard in range(self.shards))
        works = [self.work(step, rank) for rank in range(self.logical_ranks)]
        loss = math.fsum(x for w in works for x in w.losses)
        tokens = sum(w.tokens for w in works)
        norm = math.sqrt(math.fsum(map(squared_norm_of, reduced))) / tokens
        clip = min(1.0, GRAD_CLIP / (norm + 1e-6))
        finite = math.isfinite(loss) and math.isfinite(norm)
        kind = "commit" if finite and not self._is_spike((loss / tokens, norm)) else "skip"
        if kind == "commit":
            self._committed.append((loss / tokens, norm))
        verdict = Verdict(kind, clip / tokens, lr_ratio(step), lr_ratio(step) * BASE_LR, norm, loss / tokens, tokens)
        states = tuple(applied(s, g, verdict) for s, g in zip(before.states, reduced, strict=True))
        digest = fold_digests(digest_of(s) for s in states).hex()
        return Version(states, tuple(map(parameters_of, states)), reduced, digest, loss / tokens, kind)

    def gradient(self, parameters: tuple[int, ...], step: int, rank: int) -> int:
        """What the data give, whoever computes it."""
        gradient, what = rank_gradient(parameters, step, rank), self.poison.get(step)
        return poisoned(gradient, what) if rank == 0 and what else gradient

    def _is_spike(self, figures: tuple[float, float]) -> bool:
        if self.window == 0 or len(self._committed) < self.window:
            return False
        for value, before in zip(figures, zip(*self._committed[-self.window :], strict=True), strict=True):
            middle = _median(list(before))
            distance = _median([abs(b - middle) for b in before])
            if value > middle + self.factor * max(distance, middle / 20):
                return True
        return False

    def _tree(self, values: list[int]) -> int:
        if len(values) == 1:
            return values[0]
        half = 1
        while half * 2 < len(values):
            half *= 2
        return added(self._tree(values[:half]), self._tree(values[half:]))


def _median(values: list[float]) -> float:
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def lr_ratio(step: int) -> float:
    return 1.0 / (step + 1)


class Judge:
    """The production verdict, remembered: all workers ask for it several times a step."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Verdict] = {}

    def __call__(self, certificate: Certificate) -> Verdict:
        key = (certificate.step, certificate.skipped, *(h.digest for h in certificate.headers))
        verdict = self._known.get(key)
        if verdict is None:
            verdict = judge(certificate, lr_ratio(certificate.step), BASE_LR, GRAD_CLIP)
            self._known[key] = verdict
        return verdict


class Cell:
    """A buffer. ``nbytes`` as the driver asks of a payload."""

    __slots__ = ("value",)
    nbytes = 8

    def __init__(self, value: int) -> None:
        self.value = value

    def read(self) -> int:
        return self.value


class Live(Cell):
    """Parameters as published: a view of the holding, which the next application changes."""

    __slots__ = ("state",)

    def __init__(self, state: Cell) -> None:
        self.state = state

    def read(self) -> int:
        return parameters_of(self.state.value)


def arrived(payload: Any) -> Any:
    """What a receiver finds in its own memory: the payload as it is at this moment."""
    if payload is None or isinstance(payload, int):
        return payload
    if isinstance(payload, list):
        return [cell.read() for cell in payload]
    return payload.read()


class Staged(list[int]):
    def clone(self) -> Staged:
        return Staged(self)


class HashArithmetic:
    """See runtime/arithmetic.py. ``load_state``: (version, shard) from the checkpoint store.

    ``noise``: None, or gives a new number at each reduction, so that no two attempts at a step give equal gradients.
    ``dropped`` and ``restored`` are called with the shard, ``applied`` with (shard, step, gradient, new state).
    """

    def __init__(
        self,
        shards: int,
        load_state: Callable[[int, int], int],
        noise: Callable[[], int] | None,
        on_apply: Callable[[int, int, int, int], None],
        on_drop: Callable[[int], None],
    ) -> None:
        self.shards, self.load_state, self.noise = shards, load_state, noise
        self.on_apply, self.on_drop = on_apply, on_drop
        self.nodes: dict[Node, Cell] = {}
        self.pending: dict[tuple[int, int], Cell] = {}
        self.states: dict[int, Cell] = {}
        self.staged = Staged([0] * shards)

    # --- what the driver asks for ---------------------------------------------------------------------------

    def keep(self, rank: int, gradient: Cell) -> None:
        assert (rank, rank + 1) not in self.nodes, f"logical rank {rank} was computed twice"
        self.nodes[rank, rank + 1] = gradient

    def give_back(self, gradient: Cell) -> None:
        gradient.value = hash((gradient.value, 99))

    def optimizer_bytes(self) -> int:
        return 8 * len(self.states)

    # --- gradients ------------------------------------------------------------------------------------------

    def merge(self, left: Node, right: Node) -> None:
        total, other = self.nodes.pop(left), self.nodes.pop(right)
        total.value = added(total.value, other.value)
        self.give_back(other)
        self.nodes[left[0], right[1]] = total

    def forget(self, node: Node) -> None:
        self.give_back(self.nodes.pop(node))

    def contribution(self, nodes: tuple[Node, ...], shard: int) -> list[Cell]:
        return [self.nodes[node] for node in nodes]

    def reduce(self, shard: int, step: int, parts: list[tuple[tuple[Node, ...], Any]]) -> tuple[float, bytes]:
        values = {node: v for nodes, payload in parts for node, v in zip(nodes, arrived_now(payload), strict=True)}
        reduced = of_shard(self._sum(values, (0, max(high for _, high in values))), shard)
        if self.noise is not None:
            reduced = _as((reduced,), hash((reduced, self.noise())))
        self._set(shard, step, reduced)
        return squared_norm_of(reduced), digest_of(reduced)

    def _sum(self, values: dict[Node, int], node: Node) -> int:
        if node in values:
            return values[node]
        low, high = node
        middle = low + (1 << ((high - low - 1).bit_length() - 1))
        return added(self._sum(values, (low, middle)), self._sum(values, (middle, high)))

    def gradient(self, shard: int, step: int) -> Cell:
        return self.pending[shard, step]

    def store_gradient(self, shard: int, step: int, payload: int) -> bytes:
        self._set(shard, step, payload)
        return digest_of(payload)

    def forget_gradient(self, shard: int, step: int) -> None:
        self.give_back(self.pending.pop((shard, step)))

    def _set(self, shard: int, step: int, value: int) -> None:
        if (shard, step) in self.pending:
            self.forget_gradient(shard, step)
        self.pending[shard, step] = Cell(value)

    # --- holdings -------------------------------------------------------------------------------------------

    def apply(self, shard: int, step: int, verdict: Verdict) -> bytes:
        gradient, state = self.pending[shard, step].value, self.states[shard]
        state.value = applied(state.value, gradient, verdict)
        self.forget_gradient(shard, step)
        self.on_apply(shard, step, gradient, state.value)
        return digest_of(state.value)

    def digest(self, shard: int) -> bytes:
        return digest_of(self.states[shard].value)

    def parameters(self, shard: int) -> Cell:
        return Live(self.states[shard])

    def snapshot(self, shard: int) -> tuple[Any, int]:
        return None, self.states[shard].value

    def restore(self, shard: int, meta: Any, payload: int) -> None:
        self.states[shard] = Cell(payload)

    def drop(self, shard: int) -> None:
        self.states.pop(shard, None)
        for key in [k for k in self.pending if k[0] == shard]:
            self.forget_gradient(*key)
        self.on_drop(shard)

    # --- whole parameters -----------------------------------------------------------------------------------

    def stage(self, shard: int, payload: int | None) -> None:
        self.staged[shard] = parameters_of(self.states[shard].value) if payload is None else payload

    def staged_digest(self, shard: int) -> bytes:
        return digest_of(self.staged[shard])

    def load(self, version: int, holdings: tuple[int, ...]) -> None:
        for shard in range(self.shards):
            state = self.load_state(version, shard)
            self.staged[shard] = parameters_of(state)
            if shard in holdings:
                self.states[shard] = Cell(state)


def arrived_now(payload: Any) -> list[int]:
    """A contribution: received as numbers, or one's own as cells."""
    return [x if isinstance(x, int) else x.read() for x in payload]


def header_digests(headers: tuple[Header, ...]) -> tuple[bytes, ...]:
    return tuple(h.digest for h in headers)
