"""A job's whole schedule of sources: weights that change at given samples, and sources that end after some epochs.

    piece       from one sample to the next change: one mixture, and how much of each source came before
    change      a stage of the job file begins; or a source has given all that it may, `epochs` times its samples

A source that has ended has weight 0 from then on, and the others share what it had. When all of a stage's sources have
ended there is nothing to read: `end` is that sample. All of it is worked out once, from integers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataloader.errors import DataError
from dataloader.mixture import Integers, Mixture


@dataclass(frozen=True, slots=True)
class Source:
    """`samples` in an epoch; `epochs`: how often it may be read at most, None without end."""

    name: str
    samples: int
    epochs: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """From sample `start` on, these weights (whole numbers, one for each source)."""

    start: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    start: int
    before: tuple[int, ...]  # samples of each source
    mixture: Mixture


class Stages:
    """`pieces` in order; `end`: the sample at which nothing is left to read, None if there always is something."""

    def __init__(self, sources: Sequence[Source], stages: Sequence[Stage]) -> None:
        if not stages or stages[0].start != 0 or any(a.start >= b.start for a, b in pairwise(stages)):
            raise ValueError("stages begin at sample 0 and ascend")
        self.sources = tuple(sources)
        self._most = [None if s.epochs is None else s.epochs * s.samples for s in sources]
        self.pieces: list[Piece] = []
        self.end: int | None = None
        before = (0,) * len(sources)
        for stage, after in zip(stages, [*stages[1:], None], strict=True):
            before = self._add(stage, None if after is None else after.start, before)
        self._starts = np.asarray([piece.start for piece in self.pieces], dtype=np.int64)

    def at(self, samples: Integers) -> tuple[Integers, Integers]:
        """(source, number in that source) of each sample, int64 [n]; a number of an epoch e is in [e n, (e + 1) n).

        DataError for a sample at which no source has anything left.
        """
        if len(samples):
            self.refuse_beyond_the_end(int(samples.max()))
        sources, numbers = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        which = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(which):
            piece, places = self.pieces[number], np.flatnonzero(which == number)
            found, own = piece.mixture.at(samples[places] - piece.start)
            sources[places], numbers[places] = found, own + np.asarray(piece.before, dtype=np.int64)[found]
        return sources, numbers

    def refuse_beyond_the_end(self, sample: int) -> None:
        if self.end is not None and sample >= self.end:
            raise DataError(f"at sample {self.end} every source of the mixture has been read as often as it may be")

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first so many samples come from each source."""
        piece = self.pieces[int(np.searchsorted(self._starts, samples, side="right")) - 1]
        own = piece.mixture.counts(samples - piece.start)
        return tuple(before + more for before, more in zip(piece.before, own, strict=True))

    def _add(self, stage: Stage, end: int | None, before: tuple[int, ...]) -> tuple[int, ...]:
        """The pieces of one stage; how much of each source came by its end."""
        start = stage.start
        while self.end is None and (end is None or start < end):
            weights = [0 if self._ended(n, before) else weight for n, weight in enumerate(stage.weights)]
            if not any(weights):
                self.end = start
                break
            piece = Piece(start, before, Mixture(weights))
            self.pieces.append(piece)
            ends = [start + piece.mixture.reaches(n, most - before[n]) for n, most in self._capped(weights)]
            stop = min([*ends, *([] if end is None else [end])], default=None)
            if stop is None:
                break
            own = piece.mixture.counts(stop - start)
            before = tuple(count + more for count, more in zip(before, own, strict=True))
            start = stop
        return before

    def _capped(self, weights: Sequence[int]) -> list[tuple[int, int]]:
        return [
            (n, most) for n, (w, most) in enumerate(zip(weights, self._most, strict=True)) if w and most is not None
        ]

    def _ended(self, source: int, before: tuple[int, ...]) -> bool:
        most = self._most[source]
        return most is not None and before[source] >= most
