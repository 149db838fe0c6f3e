"""Megatron's indexed dataset: NAME.bin holds the ids of all sequences end to end, NAME.idx says where they lie.

    NAME.idx    "MMIDIDX\\0\\0" | u64 version 1 | u8 type | u64 sequences S | u64 document indices D
                | i32[S] lengths | i64[S] offsets in bytes | i64[D] document indices | i8[S] modes, if multimodal
    type        1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    document d  the sequences [index[d], index[d + 1]); so the first index is 0, and the last S

fairseq's older index has the same magic, no D, no document indices and no modes: 26 + 12 S bytes, where Megatron's has
34 + 12 S + 8 D (+ S). There each sequence is a document, and 6 and 7 are floats, 9 u32, 10 u64.

Opening reads the head and the ends of each table, so it takes no longer with a billion sequences. That every sequence
lies right behind the one before is `check`'s to see: readers that follow the offsets could tell, a run could not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataloader.durable import sync
from dataloader.errors import DataError
from dataloader.formats.token_file import (
    DTYPES,
    Ends,
    Integers,
    TokenFile,
    expect_size,
    head_of,
    narrow,
    size_of,
)
from dataloader.mapped import MappedFiles

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {1: "u8", 2: "i8", 3: "i16", 4: "i32", 5: "i64", 8: "u16"}
FAIRSEQ_CODES = {**CODES, 9: "u32"}
FLOATS = {6: "f64", 7: "f32"}
_HEAD = struct.Struct("<9sQBQ")  # magic, version, type, sequences
_AT_ONCE = 2**20  # sequences that `check` looks at together
_I32, _I64 = np.dtype("<i4"), np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Index:
    """Where the tables of an .idx lie, in bytes. `documents`: None in fairseq's; `modes`: None if it has none."""

    path: Path
    size_bytes: int
    dtype: np.dtype[Any]
    sequences: int
    lengths: int
    offsets: int
    documents: tuple[int, int] | None  # (how many, where)
    modes: int | None

    @property
    def format(self) -> str:
        return "fairseq" if self.documents is None else "megatron"

    def table(self, maps: MappedFiles, where: int, dtype: np.dtype[Any], numbers: Integers) -> Integers:
        """These entries of a table, int64."""
        if not numbers.size:
            return np.empty(0, dtype=np.int64)
        first, last = int(numbers.min()), int(numbers.max())
        mapped = maps.map(self.path, self.size_bytes, (last - first + 1) * dtype.itemsize)
        whole = np.frombuffer(mapped, dtype=dtype, count=last - first + 1, offset=where + first * dtype.itemsize)
        return whole[numbers - first].astype(np.int64)


def paths_of(path: Path) -> tuple[Path, Path]:
    """(.bin, .idx), of either of them or of their common prefix."""
    prefix = str(path.with_suffix("")) if path.suffix in (".bin", ".idx") else str(path)
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def is_index(path: Path) -> bool:
    return path.is_file() and head_of(path, len(MAGIC)) == MAGIC


def open_megatron(path: Path) -> TokenFile:
    """A pair of files as one run. Raises DataError, naming the file, where something doesn't fit."""
    binary, _ = paths_of(path)
    index = read_index(path)
    maps = MappedFiles(1)
    try:
        tokens = _tokens(index, maps)
        expect_size(binary, tokens * index.dtype.itemsize, f"{tokens} tokens by {index.path.name}")
        return TokenFile(binary, index.format, index.dtype, tokens, 0, size_of(binary), _ends(index, tokens))
    finally:
        maps.close()


def read_index(path: Path) -> Index:
    binary, path = paths_of(path)
    size = size_of(path, f": it belongs to {binary.name}")
    head = head_of(path, _HEAD.size + 8)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: no Megatron index: it begins with {head[:9]!r}, not with {MAGIC!r}")
    if len(head) < _HEAD.size:
        raise DataError(
            f"{path}: {size} bytes, and the head alone has {_HEAD.size} (cut short); copy or write it again"
        )
    _, version, code, sequences = _HEAD.unpack_from(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of a Megatron index; only {VERSION} is known")
    lengths = _HEAD.size
    if size == lengths + 12 * sequences:
        dtype = _dtype(path, code, FAIRSEQ_CODES)
        return Index(path, size, dtype, sequences, lengths, lengths + 4 * sequences, None, None)
    if len(head) < _HEAD.size + 8:
        raise DataError(f"{path}: {size} bytes, and the head alone has {_HEAD.size + 8} (cut short); copy it again")
    (documents,) = struct.unpack_from("<Q", head, _HEAD.size)
    lengths += 8
    offsets, indices = lengths + 4 * sequences, lengths + 12 * sequences
    end = indices + 8 * documents
    if size not in (end, end + sequences):
        raise DataError(
            f"{path}: {size} bytes, but {sequences} sequences and {documents} document indices make {end}, or "
            f"{end + sequences} with modes ({'cut short' if size < end else 'too long'}); copy or write it again"
        )
    modes = end if size == end + sequences and sequences else None
    dtype = _dtype(path, code, CODES)
    return Index(path, size, dtype, sequences, lengths, offsets, (documents, indices), modes)


def _dtype(path: Path, code: int, known: dict[int, str]) -> np.dtype[Any]:
    if code in FLOATS:
        raise DataError(f"{path}: type {code}, {FLOATS[code]}: these are no token ids")
    if code not in known:
        raise DataError(f"{path}: type {code} is not known; token ids have one of {sorted(known)}")
    return DTYPES[known[code]]


def _tokens(index: Index, maps: MappedFiles) -> int:
    """By the last sequence; the ends of all tables are looked at on the way."""
    if index.documents is not None:
        count, where = index.documents
        if count == 0:
            raise DataError(f"{index.path}: no document indices, not even the first, which is 0; write it again")
        first, last = index.table(maps, where, _I64, np.asarray([0, count - 1]))
        if (int(first), int(last)) != (0, index.sequences):
            raise DataError(
                f"{index.path}: documents begin at sequence {first} and end at {last}, not at 0 and {index.sequences}; "
                "write it again"
            )
    if index.sequences == 0:
        return 0
    ends = np.asarray([0, index.sequences - 1])
    offsets = index.table(maps, index.offsets, _I64, ends)
    lengths = index.table(maps, index.lengths, _I32, ends)
    size = index.dtype.itemsize
    if int(offsets[0]) != 0 or int(offsets[1]) % size or int(lengths.min()) < 0 or int(offsets[1]) < 0:
        raise DataError(
            f"{index.path}: sequences begin at byte {offsets[0]}, the last at {offsets[1]} with {lengths[1]} ids of "
            f"{size} bytes: not end to end from 0 on; write it again"
        )
    return int(offsets[1]) // size + int(lengths[1])


def _ends(index: Index, tokens: int) -> Ends:
    size = index.dtype.itemsize

    def starts(maps: MappedFiles, sequences: Integers) -> Integers:
        """Where these sequences begin, in tokens; the one beyond the last: where all end."""
        inside = sequences < index.sequences
        out = np.full(sequences.shape, tokens, dtype=np.int64)
        out[inside] = index.table(maps, index.offsets, _I64, sequences[inside]) // size
        return out

    if index.documents is None:
        return Ends(index.sequences, lambda maps, numbers: starts(maps, numbers + 1))
    count, where = index.documents
    return Ends(count - 1, lambda maps, numbers: starts(maps, index.table(maps, where, _I64, numbers + 1)))


def check(path: Path) -> None:
    """Reads the whole index: DataError unless every sequence lies right behind the one before, and documents ascend."""
    index = read_index(path)
    tokens = open_megatron(path).tokens
    maps, size, expected = MappedFiles(1), index.dtype.itemsize, 0
    try:
        for start in range(0, index.sequences, _AT_ONCE):
            numbers = np.arange(start, min(start + _AT_ONCE, index.sequences))
            lengths = index.table(maps, index.lengths, _I32, numbers)
            offsets = index.table(maps, index.offsets, _I64, numbers)
            due = expected + np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * size
            wrong = np.flatnonzero((offsets != due) | (lengths < 0))
            if wrong.size:
                at = int(wrong[0])
                raise DataError(
                    f"{index.path}: sequence {start + at} has {lengths[at]} ids from byte {offsets[at]} on, expected "
                    f"from {due[at]} on; write it again"
                )
            expected += int(lengths.sum()) * size
        if expected != tokens * size:
            raise DataError(
                f"{index.path}: sequences of {expected} bytes, and {tokens * size} by the last one's offset"
            )
        if index.documents is not None:
            _check_documents(index, maps, *index.documents)
    finally:
        maps.close()


def _check_documents(index: Index, maps: MappedFiles, count: int, where: int) -> None:
    for start in range(0, count - 1, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE + 1, count))
        steps = np.diff(index.table(maps, where, _I64, numbers))
        if steps.size and int(steps.min()) < 0:
            at = start + int(steps.argmin())
            raise DataError(f"{index.path}: document {at} ends before it begins; write it again")


class MegatronWriter:
    """Writes PREFIX.bin as documents come, and PREFIX.idx at the end: without it nobody takes the other for whole.

    `modes`: for each sequence, if the dataset is multimodal.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        if dtype not in CODES.values():
            raise DataError(f"{prefix}: Megatron's index has no type {dtype}, only {', '.join(CODES.values())}")
        self.binary, self.index = paths_of(prefix)
        self._dtype = DTYPES[dtype]
        self._code = next(code for code, name in CODES.items() if name == dtype)
        self._lengths: list[int] = []
        self._documents = [0]
        self._modes: list[int] = []
        self._file = self.binary.open("xb")

    def add(self, sequences: Iterable[Sequence[int]], modes: Sequence[int] = ()) -> None:
        """One document."""
        count = 0
        for ids in sequences:
            if len(ids) > np.iinfo(_I32).max:
                raise DataError(f"{self.index}: a sequence of {len(ids)} ids; its length is an i32 there: split it")
            self._file.write(narrow(ids, self._dtype, str(self.binary)))
            self._lengths.append(len(ids))
            count += 1
        if len(modes) not in (0, count):
            raise DataError(f"{self.index}: {len(modes)} modes for {count} sequences")
        self._modes += modes
        self._documents.append(len(self._lengths))

    def finish(self) -> TokenFile:
        self._file.close()
        sync(self.binary)
        if len(self._modes) not in (0, len(self._lengths)):
            raise DataError(f"{self.index}: modes of {len(self._modes)} of {len(self._lengths)} sequences: all or none")
        lengths = np.asarray(self._lengths, dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths)))[: len(lengths)] * self._dtype.itemsize
        with self.index.open("xb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, self._code, len(lengths)))
            file.write(struct.pack("<Q", len(self._documents)))
            file.write(lengths.astype(_I32).tobytes() + offsets.astype(_I64).tobytes())
            file.write(np.asarray(self._documents, dtype=_I64).tobytes())
            file.write(np.asarray(self._modes, dtype=np.int8).tobytes())
        sync(self.index)
        return open_megatron(self.binary)
