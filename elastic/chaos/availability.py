"""How many nodes there are at each moment, from a spot-availability trace. Pure, but for reading the file.

    {"gap_seconds": 300, "ticks": 4736, "capacity": 16, "changes": [[0, 0], [3, 10], ...]}

`changes` is run-length coded: from that tick on, so many nodes of `capacity`. Before the first one there are none.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloader.errors import DataError, UsageError


@dataclass(frozen=True, slots=True)
class Trace:
    """As in the file."""

    gap_seconds: float
    ticks: int
    capacity: int
    changes: tuple[tuple[int, int], ...]

    def part(self, first: int, end: int) -> Trace:
        """Of its ticks only those from `first` on and before `end`."""
        before = [nodes for tick, nodes in self.changes if tick <= first]
        inside = [(tick - first, nodes) for tick, nodes in self.changes if first < tick < end]
        start = [(0, before[-1])] if before else []
        return Trace(self.gap_seconds, end - first, self.capacity, (*start, *inside))


@dataclass(frozen=True, slots=True)
class Availability:
    """The nodes of a job over its time. `pieces`: (from so many seconds on, nodes), the first at 0 and not none."""

    pieces: tuple[tuple[float, int], ...]
    seconds: float

    @property
    def first(self) -> int:
        return self.pieces[0][1]

    @property
    def peak(self) -> int:
        return max(nodes for _, nodes in self.pieces)

    @property
    def times_none(self) -> int:
        return sum(nodes == 0 for _, nodes in self.pieces)

    def at(self, now: float) -> int:
        place = bisect_right(self.pieces, now, key=lambda piece: piece[0])
        return self.pieces[max(0, place - 1)][1]

    def lowest(self, now: float, until: float) -> int:
        """The fewest nodes at any moment between the two."""
        return min([self.at(now), *(nodes for start, nodes in self.pieces if now < start <= until)])

    def until(self, seconds: float) -> Availability:
        """As far as that."""
        return Availability(tuple(piece for piece in self.pieces if piece[0] < seconds) or self.pieces[:1], seconds)

    def node_seconds(self) -> float:
        """The area under it."""
        ends = [start for start, _ in self.pieces[1:]] + [self.seconds]
        return sum(nodes * (end - start) for (start, nodes), end in zip(self.pieces, ends, strict=True))


def read_trace(path: Path) -> Trace:
    """Raises DataError, one line that says what is wrong with the file."""
    try:
        given = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}; name a trace, a JSON file") from None
    except ValueError:
        raise DataError(f"{path}: not JSON; a trace has gap_seconds, ticks, capacity and changes") from None
    return parse_trace(given, str(path))


def parse_trace(given: Any, where: str) -> Trace:
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: not a JSON object; a trace has gap_seconds, ticks, capacity and changes")
    gap = given.get("gap_seconds", 1)
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 < gap < float("inf"):
        raise DataError(f"{where}: gap_seconds: expected seconds between ticks, got {gap!r}")
    ticks, capacity = (_whole(given.get(name), 1, f"{where}: {name}") for name in ("ticks", "capacity"))
    entries = given.get("changes")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where}: changes: expected a list of [tick, nodes], got {_shown(entries)}")
    changes: list[tuple[int, int]] = []
    for number, entry in enumerate(entries):
        place = f"{where}: changes[{number}]"
        if not isinstance(entry, list) or len(entry) != 2:
            raise DataError(f"{place}: expected [tick, nodes], got {_shown(entry)}")
        tick, nodes = _whole(entry[0], 0, f"{place}: tick"), _whole(entry[1], 0, f"{place}: nodes")
        if changes and tick <= changes[-1][0]:
            raise DataError(f"{place}: tick {tick} comes after tick {changes[-1][0]}; ticks go up")
        if tick >= ticks:
            raise DataError(f"{place}: tick {tick} is none of the trace's {ticks} ticks, which begin at 0")
        if nodes > capacity:
            raise DataError(f"{place}: {nodes} nodes are more than the capacity of {capacity}")
        changes.append((tick, nodes))
    return Trace(float(gap), ticks, capacity, tuple(changes))


def compress(trace: Trace, tick_seconds: float, at_most: int | None) -> Availability:
    """`at_most`: so many nodes stand for the trace's capacity, and some never become none. What comes before the
    first node is left out. Raises UsageError if there never is one."""
    nodes_at_most = trace.capacity if at_most is None else at_most
    scaled = [(tick, -(-nodes * nodes_at_most // trace.capacity)) for tick, nodes in trace.changes]
    begin = next((tick for tick, nodes in scaled if nodes > 0), None)
    if begin is None:
        raise UsageError("the trace has no node at any time, so there is nothing to replay")
    pieces: list[tuple[float, int]] = []
    for tick, nodes in scaled:
        if tick >= begin and (not pieces or pieces[-1][1] != nodes):
            pieces.append(((tick - begin) * tick_seconds, nodes))
    return Availability(tuple(pieces), (trace.ticks - begin) * tick_seconds)


def _whole(value: Any, least: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{where}: expected a whole number of at least {least}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"
