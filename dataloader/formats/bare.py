"""Ids and nothing else: nanoGPT's .bin, OLMo's .npy without a header. And numpy's own .npy, which has one.

What bare ids are can't be seen, so their type has to be said. The header of a true .npy says it; it is read without
running anything of it (no pickle).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataloader.durable import sync
from dataloader.errors import DataError
from dataloader.formats.token_file import DTYPES, TokenFile, expect_size, head_of, narrow, size_of, whole_ids

NUMPY_MAGIC = b"\x93NUMPY"


def open_bare(path: Path, dtype: str) -> TokenFile:
    if dtype not in DTYPES:
        raise DataError(f"{path}: ids of type {dtype!r}; known: {', '.join(DTYPES)}")
    size = size_of(path)
    return TokenFile(path, "raw", DTYPES[dtype], whole_ids(path, size, 0, DTYPES[dtype]), 0, size)


def is_numpy(path: Path) -> bool:
    return head_of(path, len(NUMPY_MAGIC)) == NUMPY_MAGIC


def open_numpy(path: Path) -> TokenFile:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            offset = file.tell()
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: its .npy header can't be read: {error}; copy or write it again") from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None
    known = next((name for name, one in DTYPES.items() if one == dtype), None)
    if known is None:
        raise DataError(f"{path}: an array of {dtype}: token ids have one of {', '.join(DTYPES)}")
    if len(shape) != 1 and (fortran or 0 in shape[1:]):
        raise DataError(f"{path}: an array of shape {shape} in column order: ids are one row after another")
    tokens = int(np.prod(shape, dtype=np.int64))
    expect_size(path, offset + tokens * dtype.itemsize, f"{tokens} {known} ids behind a header of {offset} bytes")
    return TokenFile(path, "numpy", DTYPES[known], tokens, offset, size_of(path))


class BareWriter:
    def __init__(self, path: Path, dtype: str) -> None:
        if dtype not in DTYPES:
            raise DataError(f"{path}: ids of type {dtype!r}; known: {', '.join(DTYPES)}")
        self.path, self._name = path, dtype
        self._file = path.open("xb")

    def add(self, ids: Sequence[int]) -> None:
        self._file.write(narrow(ids, DTYPES[self._name], str(self.path)))

    def finish(self) -> TokenFile:
        self._file.close()
        sync(self.path)
        return open_bare(self.path, self._name)
