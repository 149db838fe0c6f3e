"""Documents packed whole where they can be: every token once, no padding, the same from any place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.formats.token_file import Ends, Integers
from dataloader.mapped import MappedFiles
from dataloader.packing import PackedRun, Piece, document_numbers, pack, pieces_of, positions


def ends_of(lengths: list[int]) -> Ends:
    ends = np.cumsum(lengths, dtype=np.int64)

    def at(maps: MappedFiles, numbers: Integers) -> Integers:
        return ends[numbers]

    return Ends(len(lengths), at)


def test_what_fits_is_not_cut() -> None:
    pieces = [Piece(0, 5), Piece(5, 3), Piece(8, 5), Piece(13, 3)]
    assert pack(pieces, 8, 2) == [[(0, 5), (5, 3)], [(8, 5), (13, 3)]]
    pieces = [Piece(0, 3), Piece(3, 3), Piece(6, 5), Piece(11, 5)]  # end to end, all but the first would be cut
    assert sorted(map(len, pack(pieces, 8, 2))) == [2, 2]


def test_a_long_document_gives_whole_samples_first() -> None:
    assert pack([Piece(0, 19), Piece(19, 5)], 8, 3) == [[(0, 8)], [(8, 8)], [(19, 5), (16, 3)]]


def test_only_what_fits_nowhere_is_cut() -> None:
    packed = pack([Piece(0, 6), Piece(6, 6), Piece(12, 4)], 8, 2)
    assert packed == [[(0, 6), (12, 2)], [(6, 6), (14, 2)]]


def test_pieces_that_dont_fill_the_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="pieces of 7 tokens for 1 samples of 8"):
        pack([Piece(0, 7)], 8, 1)


def test_empty_documents_leave_no_piece() -> None:
    assert pieces_of(10, 20, [10, 12, 12, 20]) == [(10, 2), (12, 8)]


def test_who_may_attend_to_whom() -> None:
    pieces = [Piece(4, 2), Piece(9, 3)]
    assert document_numbers(pieces).tolist() == [0, 0, 1, 1, 1]
    assert positions(pieces).tolist() == [0, 1, 0, 1, 2]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 17), st.integers(1, 6))
def test_every_token_comes_once_and_no_sample_has_room(lengths: list[int], length: int, rows: int) -> None:
    tokens, maps = sum(lengths), MappedFiles()
    run = PackedRun(tokens, ends_of(lengths), length, rows)
    assert run.samples == tokens // (length * rows) * rows
    seen = []
    for number in range(run.samples):
        pieces = run.sample(maps, number)
        assert sum(piece.length for piece in pieces) == length
        seen += [token for start, size in pieces for token in range(start, start + size)]
    assert sorted(seen) == list(range(run.samples * length))
    again = PackedRun(tokens, ends_of(lengths), length, rows)
    for number in reversed(range(run.samples)):
        assert again.sample(maps, number) == run.sample(maps, number)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_it_cuts_no_more_documents_than_end_to_end_does(lengths: list[int]) -> None:
    length, rows = 32, 4
    ends = ends_of(lengths)
    run, maps = PackedRun(sum(lengths), ends, length, rows), MappedFiles()
    cuts = sum(len(run.sample(maps, n)) for n in range(run.samples))
    documents = sum(
        len(pieces_of(b, b + length * rows, ends.between(maps, b, b + length * rows).tolist()))
        for b in range(0, run.samples * length, length * rows)
    )
    windows = sum(
        len(pieces_of(w, w + length, ends.between(maps, w, w + length).tolist()))
        for w in range(0, run.samples * length, length)
    )
    assert documents <= cuts <= windows
