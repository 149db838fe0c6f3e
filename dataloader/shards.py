"""Reading and writing the token files of one split.

A reader maps files into memory when they are first needed and keeps at most `open_files` of them, so that hundreds of
files neither use up file descriptors nor keep every page that was ever read. What it hands out is always a copy. A
reader belongs to one thread.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataloader.dataset import (
    DTYPES,
    INDEX_NAME,
    Split,
    TokenFile,
    check_size,
    dtype_for,
    file_size,
    read_index,
)
from dataloader.errors import DataError


class TokenShards:
    """One split of a prepared dataset, open for random reads.

    tokens     number of tokens in the whole split
    counts     number of tokens in each file, in order
    checksums  xxh3_128 of each file, hexadecimal, as `dataset.json` gives it
    dtype      "u16" or "u32"

    Raises DataError, naming the file, where one is missing or has another size than `dataset.json` says.
    """

    def __init__(self, directory: Path, split: str, open_files: int = 64) -> None:
        index = read_index(directory)
        if split not in index.splits:
            known = ", ".join(sorted(index.splits)) or "none"
            raise DataError(f"{directory / INDEX_NAME}: no split {split!r}, only: {known}; prepare the dataset again")
        files = index.splits[split].files
        self.directory, self.split = directory, split
        self.dtype, self.vocab_size = index.dtype, index.vocab_size
        self.tokens = index.splits[split].tokens
        self.paths = tuple(directory / file.name for file in files)
        self.counts = tuple(file.tokens for file in files)
        self.checksums = tuple(file.xxh3_128 for file in files)
        self._numpy_dtype = DTYPES[index.dtype]
        self._open_files = max(1, open_files)
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        for number, path in enumerate(self.paths):
            check_size(path, self._bytes(number), file_size(path))

    def read(self, file: int, start: int, count: int) -> NDArray[np.int64]:
        """`count` tokens of file number `file` from place `start` on: a copy, int64 [count]."""
        if start < 0 or count < 0 or start + count > self.counts[file]:
            raise IndexError(f"{self.paths[file]}: tokens [{start}, {start + count}) of {self.counts[file]}")
        if count == 0:
            return np.empty(0, dtype=np.int64)
        mapped = self._map(file)
        offset = start * self._numpy_dtype.itemsize
        tokens = np.frombuffer(mapped, dtype=self._numpy_dtype, count=count, offset=offset).astype(np.int64)
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.paths[file]}: token id {largest} near token {start}, expected ids below {self.vocab_size} "
                f"by {INDEX_NAME}; the file is damaged: prepare the dataset again"
            )
        return tokens

    def close(self) -> None:
        """Unmaps all files. A later read maps them again."""
        while self._maps:
            self._maps.popitem()[1].close()

    def __enter__(self) -> TokenShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bytes(self, file: int) -> int:
        return self.counts[file] * self._numpy_dtype.itemsize

    def _map(self, file: int) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            while len(self._maps) >= self._open_files:
                self._maps.popitem(last=False)[1].close()
            mapped = self._maps[file] = _map_file(self.paths[file])
        self._maps.move_to_end(file)
        # Touching a page beyond the end of a file that has shrunk since would kill the process with SIGBUS, so ask for
        # its size every time: one fstat.
        check_size(self.paths[file], self._bytes(file), mapped.size())
        return mapped


def _map_file(path: Path) -> mmap.mmap:
    size = file_size(path)
    if size == 0:
        raise DataError(f"{path}: empty, though {INDEX_NAME} gives it tokens; prepare the dataset again")
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: can't be mapped into memory: {error.strerror}") from None
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # samples are scattered: reading ahead would read what nobody asked for
    return mapped


class ShardWriter:
    """Writes one split as `<split>-00000.bin`, ... into a directory that nobody reads yet.

    A file ends with the first document with which it has `tokens_per_file` tokens or more. Nothing is complete before
    `finish`, which also brings the files to the disk and returns their description for `dataset.json`.
    """

    def __init__(self, directory: Path, split: str, vocab_size: int, tokens_per_file: int) -> None:
        self._directory, self._split, self._vocab_size = directory, split, vocab_size
        self._tokens_per_file = tokens_per_file
        self._dtype = DTYPES[dtype_for(vocab_size)]
        self._parts: list[bytes] = []
        self._tokens = self._documents = 0
        self._files: list[TokenFile] = []

    def add(self, ids: Sequence[int], end_of_text: int) -> None:
        """One document, which may be empty; `end_of_text` is put behind it. Refuses ids outside the vocabulary."""
        document = np.asarray([*ids, end_of_text], dtype=np.int64)
        low, high = int(document.min()), int(document.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise DataError(
                f"{self._directory / self._name()}: token id {wrong} doesn't fit a vocabulary of {self._vocab_size} "
                f"ids in {self._dtype.itemsize * 8} bits; use the tokenizer that belongs to this vocab_size"
            )
        self._parts.append(document.astype(self._dtype).tobytes())
        self._tokens += len(document)
        self._documents += 1
        if self._tokens >= self._tokens_per_file:
            self._close_file()

    def finish(self) -> Split:
        if self._tokens:
            self._close_file()
        return Split(
            tokens=sum(f.tokens for f in self._files),
            documents=sum(f.documents for f in self._files),
            files=tuple(self._files),
        )

    def _name(self) -> str:
        return f"{self._split}-{len(self._files):05d}.bin"

    def _close_file(self) -> None:
        name, content = self._name(), b"".join(self._parts)
        write_durably(self._directory / name, content)
        self._files.append(
            TokenFile(
                name=name,
                tokens=self._tokens,
                documents=self._documents,
                xxh3_128=xxhash.xxh3_128_hexdigest(content),
            )
        )
        self._parts, self._tokens, self._documents = [], 0, 0


def write_durably(path: Path, content: bytes) -> None:
    """Writes a new file and waits until it is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
