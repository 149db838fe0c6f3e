"""datatrove's tokenized files (nanotron): NAME.ds holds ids, NAME.ds.index where documents end.

    NAME.ds         u16, or u32 where the tokenizer has more ids: nothing in it says which
    NAME.ds.index   u64[documents], the ends in tokens, ascending; the last is the number of tokens

So the width follows from both sizes. NAME.ds.metadata and NAME.ds.loss are not needed and not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataloader.durable import sync
from dataloader.errors import DataError
from dataloader.formats.token_file import DTYPES, Ends, Integers, TokenFile, narrow, size_of
from dataloader.mapped import MappedFiles

_U64 = np.dtype("<u8")
_AT_ONCE = 2**20


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def open_datatrove(path: Path) -> TokenFile:
    index = index_of(path)
    size, index_size = size_of(path), size_of(index, f": it belongs to {path.name}")
    if index_size % _U64.itemsize:
        raise DataError(f"{index}: {index_size} bytes are no whole number of 8-byte ends (cut short); copy it again")
    documents = index_size // _U64.itemsize
    ends = Ends(documents, lambda maps, numbers: _read(maps, index, index_size, numbers))
    maps = MappedFiles(1)
    try:
        tokens = int(ends.at(maps, np.asarray([documents - 1]))[0]) if documents else 0
    finally:
        maps.close()
    width = next((name for name in ("u16", "u32") if tokens * DTYPES[name].itemsize == size), None)
    if width is None or tokens < 0:
        raise DataError(
            f"{path}: {size} bytes, but {tokens} tokens by {index.name} make {2 * tokens} (u16) or {4 * tokens} (u32); "
            "one of the two was cut short or is another's: copy both again"
        )
    return TokenFile(path, "datatrove", DTYPES[width], tokens, 0, size, ends)


def _read(maps: MappedFiles, index: Path, size_bytes: int, numbers: Integers) -> Integers:
    if not numbers.size:
        return np.empty(0, dtype=np.int64)
    mapped = maps.map(index, size_bytes, numbers.size * _U64.itemsize)
    return np.frombuffer(mapped, dtype=_U64)[numbers].astype(np.int64)


def check(path: Path) -> None:
    """Reads the whole index: DataError unless the ends ascend."""
    ends = open_datatrove(path).ends
    assert ends is not None
    maps, before = MappedFiles(1), 0
    try:
        for start in range(0, ends.count, _AT_ONCE):
            found = ends.at(maps, np.arange(start, min(start + _AT_ONCE, ends.count)))
            steps = np.diff(found, prepend=before)
            if int(steps.min()) < 0:
                at = start + int(steps.argmin())
                raise DataError(f"{index_of(path)}: document {at} ends before it begins; write it again")
            before = int(found[-1])
    finally:
        maps.close()


class DatatroveWriter:
    def __init__(self, path: Path, dtype: str) -> None:
        if dtype not in ("u16", "u32"):
            raise DataError(f"{path}: datatrove has no type {dtype}, only u16, u32")
        self.path, self._dtype = path, DTYPES[dtype]
        self._ends: list[int] = []
        self._tokens = 0
        self._file = path.open("xb")

    def add(self, ids: Sequence[int]) -> None:
        """One document."""
        self._file.write(narrow(ids, self._dtype, str(self.path)))
        self._tokens += len(ids)
        self._ends.append(self._tokens)

    def finish(self) -> TokenFile:
        self._file.close()
        sync(self.path)
        with index_of(self.path).open("xb") as file:
            file.write(np.asarray(self._ends, dtype=_U64).tobytes())
        sync(index_of(self.path))
        return open_datatrove(self.path)
