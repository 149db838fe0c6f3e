"""MosaicML's MDS: a directory of shards and an index.json; one column of it, read sample by sample.

    index.json   {"version": 2, "shards": [{"format": "mds", "samples", "column_names", "column_encodings",
                 "column_sizes", "raw_data": {"basename", "bytes"}, "zip_data", ...}, ...]}
    shard        u32 samples N | u32[N + 1] offsets in bytes | the writer's settings | samples
    sample       u32 size of each column whose size isn't fixed, in order | the columns' bytes, in order

Columns of tokens are `ndarray[:type[:shape]]`, or `bytes` (whose type has to be said). An ndarray without a type begins
with one byte for it, one without a shape with `ndim << 2 | log2(width)` and its dimensions. `pkl` is never read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dataloader.errors import DataError
from dataloader.formats.token_file import DTYPES, Integers, expect_size
from dataloader.mapped import MappedFiles

INDEX = "index.json"
USUAL_NAMES = ("tokens", "input_ids")
_VALUE_CODES = {8: "u8", 9: "i8", 16: "u16", 17: "i16", 32: "u32", 33: "i32", 65: "i64"}
_VALUE_NAMES = {
    "uint8": "u8",
    "int8": "i8",
    "uint16": "u16",
    "int16": "i16",
    "uint32": "u32",
    "int32": "i32",
    "int64": "i64",
}


class MdsColumn:
    """One column of a dataset. `samples`: how many it has. `dtype`: of a column of `bytes`, and only of that.

    Raises DataError, naming the file, where the index or a shard isn't what it should be.
    """

    def __init__(self, directory: Path, column: str | None = None, dtype: str | None = None) -> None:
        self.path = directory / INDEX
        self._shards = [_Shard(directory, self.path, plain) for plain in _shards_of(self.path)]
        self.samples = sum(shard.samples for shard in self._shards)
        self.column = column or self._usual_column()
        for shard in self._shards:
            shard.choose(self.column, dtype)

    def __iter__(self) -> Iterator[Integers]:
        """The ids of each sample, int64."""
        maps = MappedFiles(1)
        try:
            for shard in self._shards:
                for number in range(shard.samples):
                    yield shard.read(maps, number)
        finally:
            maps.close()

    def _usual_column(self) -> str:
        names = self._shards[0].names if self._shards else list(USUAL_NAMES)
        for name in USUAL_NAMES:
            if name in names:
                return name
        raise DataError(f"{self.path}: no column named {' or '.join(USUAL_NAMES)}, only {', '.join(names)}; name one")


def is_mds(directory: Path) -> bool:
    return (directory / INDEX).is_file()


def _shards_of(path: Path) -> list[Any]:
    try:
        plain = json.loads(path.read_bytes())
        version, shards = plain["version"], plain["shards"]
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path}: no index of an MDS dataset (version and shards), perhaps cut short") from None
    if version != 2 or not isinstance(shards, list):
        raise DataError(f"{path}: version {version} of an MDS index; only 2 is known")
    return shards


class _Shard:
    def __init__(self, directory: Path, index: Path, plain: Any) -> None:
        try:
            kind, self.names = plain["format"], [str(name) for name in plain["column_names"]]
            self._encodings = [str(encoding) for encoding in plain["column_encodings"]]
            self._sizes = [None if size is None else int(size) for size in plain["column_sizes"]]
            self.samples, raw = int(plain["samples"]), plain["raw_data"]
            basename, self._bytes = str(raw["basename"]), int(raw["bytes"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{index}: a shard without its columns, samples or raw_data; copy it again") from None
        if kind != "mds" or not len(self.names) == len(self._encodings) == len(self._sizes):
            raise DataError(f"{index}: a shard of format {kind} with {len(self.names)} columns; only mds is read")
        self._path = directory / Path(basename).name
        if not self._path.exists() and plain.get("zip_data"):
            packed = plain["zip_data"].get("basename")
            raise DataError(f"{self._path}: missing, only {packed} ({plain.get('compression')}) is there: unpack it")
        expect_size(self._path, self._bytes, f"{self.samples} samples by {index.name}")
        self._column, self._dtype = 0, ""

    def choose(self, column: str, dtype: str | None) -> None:
        if column not in self.names:
            raise DataError(f"{self._path}: no column {column!r}, only {', '.join(self.names)}")
        self._column = self.names.index(column)
        encoding = self._encodings[self._column]
        if encoding == "bytes":
            if dtype is None or dtype not in DTYPES:
                raise DataError(f"{self._path}: column {column!r} is bytes: say their type: {', '.join(DTYPES)}")
            self._dtype = dtype
        elif encoding.partition(":")[0] != "ndarray":
            raise DataError(f"{self._path}: column {column!r} is {encoding}, which holds no tokens")

    def read(self, maps: MappedFiles, number: int) -> Integers:
        """The ids of a sample; DataError if anything about it doesn't fit the file."""
        data = self._sample(maps, number)
        unfixed = sum(size is None for size in self._sizes)
        if len(data) < 4 * unfixed:
            self._damaged(number)
        told = iter(np.frombuffer(data, dtype="<u4", count=unfixed).tolist())
        sizes = [next(told) if size is None else size for size in self._sizes]
        if 4 * unfixed + sum(sizes) != len(data):
            self._damaged(number)
        start = 4 * unfixed + sum(sizes[: self._column])
        ids = self._decoded(data[start : start + sizes[self._column]], number)
        if ids.size and int(ids.min()) < 0:
            raise DataError(f"{self._path}: sample {number} has the id {int(ids.min())}: a token id is 0 or more")
        return ids

    def _sample(self, maps: MappedFiles, number: int) -> bytes:
        head = 4 * (self.samples + 2)
        mapped = maps.map(self._path, self._bytes, 4096)
        if self._bytes < head or int.from_bytes(mapped[:4], "little") != self.samples:
            raise DataError(f"{self._path}: not the {self.samples} samples that {INDEX} gives it; copy it again")
        at = 4 * (1 + number)
        begin, end = (int(word) for word in np.frombuffer(mapped[at : at + 8], dtype="<u4"))
        if not head <= begin <= end <= self._bytes:
            self._damaged(number)
        return mapped[begin:end]

    def _decoded(self, data: bytes, number: int) -> Integers:
        _, _, settings = self._encodings[self._column].partition(":")
        name, _, shape = settings.partition(":")
        dtype = DTYPES[self._dtype] if self._dtype else None
        if dtype is None and name:
            dtype = DTYPES[_VALUE_NAMES[name]] if name in _VALUE_NAMES else None
        elif dtype is None and data:
            dtype, data = DTYPES[_VALUE_CODES[data[0]]] if data[0] in _VALUE_CODES else None, data[1:]
        if dtype is None:
            raise DataError(f"{self._path}: sample {number} has values that are no token ids")
        if not self._dtype and not shape and data:
            data = data[1 + (data[0] >> 2) * (1 << (data[0] & 3)) :]
        if len(data) % dtype.itemsize:
            self._damaged(number)
        return np.frombuffer(data, dtype=dtype).astype(np.int64)

    def _damaged(self, number: int) -> NoReturn:
        raise DataError(f"{self._path}: sample {number} doesn't fit the file: it is damaged; copy it again")
