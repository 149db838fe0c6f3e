"""llm.c's and modded-nanogpt's .bin: 256 i32, of which three say something, then the ids.

    i32 magic | i32 version | i32 tokens | 253 x i32, unused | ids
    20240520, version 1: u16        20240801, version 7: u32

The count is an i32, so a file holds fewer than 2^31 ids; larger data is several files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataloader.durable import sync
from dataloader.errors import DataError
from dataloader.formats.token_file import DTYPES, TokenFile, expect_size, head_of, narrow, size_of

HEAD_BYTES = 1024
KINDS = {20240520: (1, "u16"), 20240801: (7, "u32")}  # magic: version, type
MOST_TOKENS = 2**31 - 1


def is_llm_c(path: Path) -> bool:
    return int.from_bytes(head_of(path, 4).ljust(4, b"\0"), "little") in KINDS and size_of(path) >= HEAD_BYTES


def open_llm_c(path: Path) -> TokenFile:
    size, head = size_of(path), head_of(path, HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        raise DataError(f"{path}: {size} bytes, and the head alone has {HEAD_BYTES} (cut short); copy it again")
    magic, version, tokens = (int(word) for word in np.frombuffer(head, dtype="<i4", count=3))
    if magic not in KINDS:
        known = " or ".join(map(str, KINDS))
        raise DataError(f"{path}: no llm.c file: it begins with {magic}, not with {known}")
    due, dtype = KINDS[magic]
    if version != due:
        raise DataError(f"{path}: version {version}, and a file that begins with {magic} has version {due}")
    if tokens < 0:
        raise DataError(f"{path}: {tokens} tokens by its head; larger data is several files: write it again")
    expect_size(path, HEAD_BYTES + tokens * DTYPES[dtype].itemsize, f"{tokens} {dtype} tokens behind its head")
    return TokenFile(path, "llm.c", DTYPES[dtype], tokens, HEAD_BYTES, size)


class LlmCWriter:
    """This format knows no documents. The head is written last: without it nobody takes the file for whole."""

    def __init__(self, path: Path, dtype: str) -> None:
        known = {name: (magic, version) for magic, (version, name) in KINDS.items()}
        if dtype not in known:
            raise DataError(f"{path}: llm.c has no type {dtype}, only {', '.join(known)}")
        self.path, self._dtype, self._kind, self._tokens = path, DTYPES[dtype], known[dtype], 0
        self._file = path.open("xb")
        self._file.write(bytes(HEAD_BYTES))

    def add(self, ids: Sequence[int]) -> None:
        if self._tokens + len(ids) > MOST_TOKENS:
            raise DataError(f"{self.path}: more than {MOST_TOKENS} tokens don't go into one llm.c file; write several")
        self._file.write(narrow(ids, self._dtype, str(self.path)))
        self._tokens += len(ids)

    def finish(self) -> TokenFile:
        self._file.flush()
        self._file.seek(0)
        self._file.write(np.asarray([*self._kind, self._tokens], dtype="<i4").tobytes())
        self._file.close()
        sync(self.path)
        return open_llm_c(self.path)
