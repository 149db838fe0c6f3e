"""Whole documents in samples of a fixed length, as a pure function of the place: nothing is read ahead or remembered.

The run of tokens is cut into blocks of `rows` samples' tokens each, wherever that falls, and a block is packed by
itself: so a sample's tokens follow from its block's document ends alone, and the number of samples from the number of
tokens. In a block

    1  a piece (a document, or what the block has of it) that is longer than a sample gives whole samples away first
    2  the others are put, the longest first, each into the row with the least room that holds it (best fit)
    3  what fits nowhere is cut, and fills the room that is left, row by row

so every token of the block is used once, no sample has padding, and only the pieces of step 3 are cut where they need
not be. Where that cuts more than laying the pieces end to end, they are laid end to end. (Best-fit
packing: Ding et al., Fewer Truncations Improve Language Modeling, 2024; there over the whole data.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dataloader.formats.token_file import Ends, Integers
from dataloader.mapped import MappedFiles

ROWS = 64


class Piece(NamedTuple):
    """Tokens [start, start + length) of the run, all of one document."""

    start: int
    length: int


def pieces_of(start: int, stop: int, ends: Sequence[int]) -> list[Piece]:
    """Tokens [start, stop) at the document ends between them (ascending, with repeats for empty documents)."""
    marks = [start, *(end for end in ends if start < end < stop), stop]
    return [Piece(low, high - low) for low, high in pairwise(marks) if high > low]


def pack(pieces: Sequence[Piece], length: int, rows: int) -> list[list[Piece]]:
    """`rows` samples of `length` tokens, from pieces that have rows x length tokens together. ValueError if not."""
    packed, plain = best_fit(pieces, length, rows), end_to_end(pieces, length, rows)
    return packed if sum(map(len, packed)) <= sum(map(len, plain)) else plain


def end_to_end(pieces: Sequence[Piece], length: int, rows: int) -> list[list[Piece]]:
    """In order, cut wherever a sample is full."""
    out: list[list[Piece]] = [[] for _ in range(rows)]
    _cut_into(out, dict.fromkeys(range(rows), length), pieces)
    return out


def best_fit(pieces: Sequence[Piece], length: int, rows: int) -> list[list[Piece]]:
    if sum(piece.length for piece in pieces) != rows * length:
        raise ValueError(f"pieces of {sum(p.length for p in pieces)} tokens for {rows} samples of {length}")
    full: list[list[Piece]] = []
    rest: list[Piece] = []
    for start, size in pieces:
        whole, left = divmod(size, length)
        full += [[Piece(start + n * length, length)] for n in range(whole)]
        if left:
            rest.append(Piece(start + whole * length, left))
    open_rows: list[list[Piece]] = [[] for _ in range(rows - len(full))]
    room = [(length, number) for number in range(len(open_rows))]  # ascending
    unplaced = []
    for piece in sorted(rest, key=lambda piece: (-piece.length, piece.start)):
        place = bisect_left(room, (piece.length, -1))
        if place == len(room):
            unplaced.append(piece)
            continue
        left, number = room.pop(place)
        open_rows[number].append(piece)
        if left > piece.length:
            insort(room, (left - piece.length, number))
    _cut_into(open_rows, {number: left for left, number in room}, unplaced)
    return full + open_rows


def _cut_into(open_rows: list[list[Piece]], room: dict[int, int], unplaced: Sequence[Piece]) -> None:
    holes = iter(sorted(room.items()))
    number, left = 0, 0
    for start, size in unplaced:
        while size:
            if not left:
                number, left = next(holes)
            taken = min(left, size)
            open_rows[number].append(Piece(start, taken))
            start, size, left = start + taken, size - taken, left - taken


class PackedRun:
    """A run of `tokens` in samples of `length` tokens, `samples` of them; a rest that fills no block is left out.

    Belongs to one thread.
    """

    def __init__(self, tokens: int, ends: Ends, length: int, rows: int = ROWS) -> None:
        self.length, self.rows, self._ends = length, rows, ends
        self.samples = tokens // (length * rows) * rows
        self._block: tuple[int, list[list[Piece]]] | None = None

    def sample(self, maps: MappedFiles, number: int) -> list[Piece]:
        """Where the tokens of this sample lie, in order. IndexError outside [0, samples)."""
        if not 0 <= number < self.samples:
            raise IndexError(f"sample {number} of {self.samples}")
        block, row = divmod(number, self.rows)
        if self._block is None or self._block[0] != block:
            size = self.length * self.rows
            start, stop = block * size, (block + 1) * size
            ends = self._ends.between(maps, start, stop).tolist()
            self._block = block, pack(pieces_of(start, stop, ends), self.length, self.rows)
        return self._block[1][row]


def document_numbers(pieces: Sequence[Piece]) -> Integers:
    """int64 [length]: 0 for the tokens of the first piece, 1 for the second, ...: who may attend to whom."""
    return np.repeat(np.arange(len(pieces)), [piece.length for piece in pieces])


def positions(pieces: Sequence[Piece]) -> Integers:
    """int64 [length]: each token's place in its piece."""
    return np.concatenate([np.arange(piece.length) for piece in pieces])
