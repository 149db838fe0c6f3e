"""Reading and writing the token files of one split of a prepared dataset."""

from __future__ import annotations

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
from dataloader.durable import write_durably
from dataloader.errors import DataError
from dataloader.formats.token_file import TokenFile as TokenRun
from dataloader.mapped import MappedFiles


class TokenShards:
    """One split of a prepared dataset, open for random reads; it belongs to one thread.

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
        self._maps = MappedFiles(open_files)
        dtype = DTYPES[index.dtype]
        self._files = []
        for path, tokens in zip(self.paths, self.counts, strict=True):
            size = tokens * dtype.itemsize
            check_size(path, size, file_size(path))
            self._files.append(TokenRun(path, "everstep", dtype, tokens, 0, size))

    def read(self, file: int, start: int, count: int) -> NDArray[np.int64]:
        """`count` tokens of file number `file` from place `start` on: a copy, int64 [count]."""
        tokens = self._files[file].read(self._maps, start, count)
        largest = int(tokens.max(initial=-1))
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.paths[file]}: token id {largest} near token {start}, expected ids below {self.vocab_size} "
                f"by {INDEX_NAME}; the file is damaged: prepare the dataset again"
            )
        return tokens

    def close(self) -> None:
        """Unmaps all files. A later read maps them again."""
        self._maps.close()

    def __enter__(self) -> TokenShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
