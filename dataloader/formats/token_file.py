"""A file of token ids in any format: a run of numbers inside it, and where documents end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataloader.errors import DataError
from dataloader.mapped import MappedFiles

# Little-endian whatever the host is: data is copied from machine to machine.
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in (
        ("u8", "u1"),
        ("i8", "i1"),
        ("u16", "<u2"),
        ("i16", "<i2"),
        ("u32", "<u4"),
        ("i32", "<i4"),
        ("i64", "<i8"),
    )
}
Integers: TypeAlias = NDArray[np.int64]
Gather: TypeAlias = Callable[[MappedFiles, Integers], Integers]


@dataclass(frozen=True, slots=True)
class Ends:
    """Where documents end, in tokens from the start of the run, ascending; an empty document ends where it begins.

    `at(maps, numbers)`: the ends of these documents, int64 [n]. Nothing is held in memory, however many there are.
    """

    count: int
    at: Gather

    def between(self, maps: MappedFiles, start: int, stop: int) -> Integers:
        """All ends in (start, stop], int64, ascending, each as often as documents end there."""
        first, last = self._first_beyond(maps, start), self._first_beyond(maps, stop)
        return self.at(maps, np.arange(first, last, dtype=np.int64))

    def _first_beyond(self, maps: MappedFiles, place: int) -> int:
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if int(self.at(maps, np.asarray([middle], dtype=np.int64))[0]) > place:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True, slots=True)
class TokenFile:
    """`tokens` ids of type `dtype`, one after another from `offset_bytes` on, in a file of `size_bytes`."""

    path: Path
    format: str
    dtype: np.dtype[Any]
    tokens: int
    offset_bytes: int
    size_bytes: int
    ends: Ends | None = None

    def read(self, maps: MappedFiles, start: int, count: int) -> Integers:
        """Tokens [start, start + count): a copy, int64 [count]. IndexError outside the run; DataError as `maps` has it,
        or for a negative id."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"{self.path}: tokens [{start}, {start + count}) of {self.tokens}")
        if count == 0:
            return np.empty(0, dtype=np.int64)
        mapped = maps.map(self.path, self.size_bytes, count * self.dtype.itemsize)
        offset = self.offset_bytes + start * self.dtype.itemsize
        ids = np.frombuffer(mapped, dtype=self.dtype, count=count, offset=offset).astype(np.int64)
        if self.dtype.kind == "i" and int(ids.min()) < 0:
            place = start + int(ids.argmin())
            raise DataError(f"{self.path}: token {place} is {int(ids.min())}: a token id is 0 or more; write it again")
        return ids


def size_of(path: Path, why: str = "") -> int:
    """Bytes of a regular file; DataError, naming it, where there is none. `why` it should be there."""
    try:
        if path.is_dir():
            raise DataError(f"{path}: a directory, where a file was expected{why}")
        return path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path}: missing{why}") from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None


def head_of(path: Path, count: int) -> bytes:
    """The first `count` bytes, or fewer where the file has no more."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None


def expect_size(path: Path, expected: int, what: str) -> None:
    """DataError unless the file has exactly so many bytes; `what` asks for them."""
    found = size_of(path)
    if found != expected:
        how = "cut short" if found < expected else "too long"
        raise DataError(f"{path}: {found} bytes, but {what} make {expected} ({how}); copy or write it again")


def whole_ids(path: Path, size_bytes: int, offset_bytes: int, dtype: np.dtype[Any]) -> int:
    """How many ids of this type lie behind the offset; DataError where the last is cut."""
    tokens, rest = divmod(size_bytes - offset_bytes, dtype.itemsize)
    if rest or tokens < 0:
        raise DataError(
            f"{path}: {size_bytes - offset_bytes} bytes of ids are no whole number of {dtype.itemsize}-byte ids; "
            "it was cut short, or the ids have another width"
        )
    return tokens


def name_of(dtype: np.dtype[Any]) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def narrow(ids: Any, dtype: np.dtype[Any], where: str) -> bytes:
    """The ids as they are written; DataError where one doesn't fit the type (nothing ever wraps)."""
    given = np.asarray(ids, dtype=np.int64)
    limits = np.iinfo(dtype)
    if given.size and (int(given.min()) < 0 or int(given.max()) > limits.max):
        wrong = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise DataError(f"{where}: token id {wrong} doesn't fit {name_of(dtype)} (0 to {limits.max}); use a wider type")
    return given.astype(dtype).tobytes()
