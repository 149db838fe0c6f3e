"""The flat parameter space and its fixed cut into shards.

    order       parameters sorted by (parameter group, order of definition)
    alignment   every parameter starts at a multiple of 16 floats; the gap after it is padding and stays zero
    shards      the space is cut in units of 16 floats: bounds[i] = 16 * (units * i // shards)
    piece       the part of a shard that lies in one parameter group: what an optimizer works on

Nothing here depends on who holds what: a layout is a function of the model and of the number of shards, fixed
for the life of a job. Why 16: kernels then see the same alignment and vector tails wherever a cut is made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash

from dataloader.errors import ConfigError, RecipeError

UNIT = 16  # floats


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: elements [start, start + numel) of the flat space, fp32."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    group: int

    @property
    def stop(self) -> int:
        """First element after the parameter and its padding: where the next slot starts."""
        return self.start + _padded(self.numel)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of the flat space: one shard's share of one parameter group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Where every parameter lies and where the shards are cut. Sizes are in fp32 elements."""

    slots: tuple[Slot, ...]
    shards: int

    @cached_property
    def total(self) -> int:
        return self.slots[-1].stop

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Shard s is [bounds[s], bounds[s + 1])."""
        units = self.total // UNIT
        return tuple(UNIT * (units * i // self.shards) for i in range(self.shards + 1))

    def shard_range(self, shard: int) -> tuple[int, int]:
        return self.bounds[shard], self.bounds[shard + 1]

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """The shard's pieces in order; together they tile its range."""
        low, high = self.shard_range(shard)
        cut = ((g, max(low, start), min(high, stop)) for g, start, stop in self._group_ranges)
        return tuple(Piece(g, start, stop) for g, start, stop in cut if start < stop)

    @cached_property
    def _group_ranges(self) -> tuple[tuple[int, int, int], ...]:
        ranges: dict[int, tuple[int, int]] = {}
        for slot in self.slots:
            start, _ = ranges.get(slot.group, (slot.start, slot.start))
            ranges[slot.group] = (start, slot.stop)
        return tuple((g, start, stop) for g, (start, stop) in ranges.items())

    def fingerprint(self) -> str:
        """Equal for equal layouts, over processes and versions: 32 hex digits."""
        facts = [self.bounds, [[s.name, s.shape, s.start, s.numel, s.group] for s in self.slots]]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, separators=(",", ":")).encode())


def flat_layout(groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]], shards: int) -> FlatLayout:
    """Lay out the parameters, given as (name, shape) by parameter group in order of definition.

    RecipeError: a name twice, or no parameters at all. ConfigError: more shards than units of 16 floats.
    """
    slots: list[Slot] = []
    seen: set[str] = set()
    start = 0
    for number, group in enumerate(groups):
        for name, shape in group:
            if name in seen:
                raise RecipeError(f"param_groups: parameter {name!r} appears twice; put it in exactly one group")
            seen.add(name)
            slot = Slot(name, tuple(shape), start, _numel(shape), number)
            slots.append(slot)
            start = slot.stop
    if start == 0:
        raise RecipeError("param_groups: no parameters to train; return at least one non-empty parameter")
    if not 1 <= shards <= start // UNIT:
        most = start // UNIT
        raise ConfigError(
            f"train.shards: {shards} shards, but this model can be cut into 1 to {most}; set it within that"
        )
    return FlatLayout(tuple(slots), shards)


def views(flat: torch.Tensor, layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Each parameter as a view of ``flat`` (fp32, [layout.total], contiguous), in the layout's order."""
    if flat.shape != (layout.total,):
        raise ValueError(f"flat tensor has shape {tuple(flat.shape)}, the layout wants ({layout.total},)")
    return {s.name: flat[s.start : s.start + s.numel].view(s.shape) for s in layout.slots}


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel


def _padded(numel: int) -> int:
    return (numel + UNIT - 1) // UNIT * UNIT
