"""The format of a prepared dataset: a directory of bare token files, and one `dataset.json` that describes them.

    dataset.json      written last; a directory without it is no dataset
    tokenizer.json    the tokenizer that made the ids (Hugging Face `tokenizers` format)
    train-00000.bin   token ids, little-endian, nothing else; then train-00001.bin, ...
    valid-00000.bin

`dataset.json` gives for every file its exact number of tokens and its xxh3_128, so a file that was cut short, swapped
or damaged is found and named. Ids below 65,536 are written in 16 bits (`u16`), all others in 32 (`u32`). Sizes are
compared whenever a dataset is opened; contents are compared by `verify`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from dataloader.errors import DataError

INDEX_NAME = "dataset.json"
FORMAT: Literal["everstep-tokens"] = "everstep-tokens"
FORMAT_VERSION: Literal[1] = 1
LARGEST_INDEX_BYTES = 64 * 2**20

Progress: TypeAlias = Callable[[str, int, int], None]  # (phase, done, total)

# Little-endian whatever the host is: a dataset may be copied to another machine.
DTYPES: Mapping[str, np.dtype[Any]] = {"u16": np.dtype("<u2"), "u32": np.dtype("<u4")}

# A plain file name: an index must not be able to point outside its own directory.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlainFile(_Strict):
    """A file that isn't tokens. `size` in bytes."""

    name: FileName
    size: int = Field(ge=0)
    xxh3_128: Checksum


class TokenFile(_Strict):
    """One shard of tokens; `documents` end in it (each with the end-of-text token)."""

    name: FileName
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    xxh3_128: Checksum


class Split(_Strict):
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    files: tuple[TokenFile, ...] = Field(strict=False)


class DatasetIndex(_Strict):
    """The contents of `dataset.json`. `origin` says, for people, where the text came from."""

    format: Literal["everstep-tokens"]
    version: Literal[1]
    dtype: Literal["u16", "u32"]
    vocab_size: int = Field(ge=1, le=2**32)
    end_of_text: int | None = Field(ge=0)
    tokenizer: PlainFile | None
    splits: dict[str, Split]
    origin: dict[str, Any] = {}


def dtype_for(vocab_size: int) -> Literal["u16", "u32"]:
    """The narrowest type that holds every id in [0, vocab_size)."""
    if not 1 <= vocab_size <= 2**32:
        raise DataError(f"a vocabulary of {vocab_size} ids can't be written: 1 to {2**32} ids fit in 32 bits")
    return "u16" if vocab_size <= 2**16 else "u32"


def read_index(directory: Path) -> DatasetIndex:
    """Reads `dataset.json`. Raises DataError, naming the file, where it is missing, torn or of another kind."""
    path = directory / INDEX_NAME
    try:
        if path.stat().st_size > LARGEST_INDEX_BYTES:
            raise DataError(f"{path}: larger than {LARGEST_INDEX_BYTES} bytes, so it is no index of a dataset")
        plain = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: missing; a dataset is a directory that Everstep prepared, with this file") from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not valid JSON, perhaps cut short; prepare the dataset again") from None
    return parse_index(plain, path)


def parse_index(plain: Any, path: Path) -> DatasetIndex:
    """Checks what was read from `path`, its sums included."""
    kind = (plain.get("format"), plain.get("version")) if isinstance(plain, dict) else (None, None)
    if kind != (FORMAT, FORMAT_VERSION):
        raise DataError(f"{path}: expected format {FORMAT} version {FORMAT_VERSION}, found {kind[0]} version {kind[1]}")
    try:
        index = DatasetIndex.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: {where}: {first['msg']}; prepare the dataset again") from None
    if index.vocab_size > 2**16 and index.dtype == "u16":
        raise DataError(f"{path}: {index.vocab_size} ids don't fit in u16 (65,536 at most); prepare the dataset again")
    for name, split in index.splits.items():
        for word in ("tokens", "documents"):
            said, summed = getattr(split, word), sum(getattr(file, word) for file in split.files)
            if said != summed:
                raise DataError(f"{path}: splits.{name}: {said} {word}, but its files have {summed}; prepare it again")
    return index


def check_size(path: Path, expected_bytes: int, found_bytes: int) -> None:
    """Raises DataError unless the file has the size that `dataset.json` gives it."""
    if found_bytes != expected_bytes:
        how = "cut short" if found_bytes < expected_bytes else "longer"
        raise DataError(
            f"{path}: expected {expected_bytes} bytes by {INDEX_NAME}, found {found_bytes} ({how}); "
            "copy the file again or prepare the dataset again"
        )


def file_size(path: Path) -> int:
    """Bytes of a regular file; DataError, naming it, where there is none."""
    try:
        if path.is_file():
            return path.stat().st_size
        raise FileNotFoundError
    except FileNotFoundError:
        raise DataError(
            f"{path}: missing, though {INDEX_NAME} lists it; copy the file again or prepare the dataset again"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None


def listed_files(index: DatasetIndex) -> list[tuple[str, int, str]]:
    """(name, bytes, checksum) of every file that the index lists."""
    itemsize = DTYPES[index.dtype].itemsize
    out = [(f.name, f.tokens * itemsize, f.xxh3_128) for s in index.splits.values() for f in s.files]
    if index.tokenizer is not None:
        out.append((index.tokenizer.name, index.tokenizer.size, index.tokenizer.xxh3_128))
    return out


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(8 * 2**20):
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None


def verify(directory: Path, progress: Progress | None = None) -> DatasetIndex:
    """Reads every file of the dataset once and compares size and checksum; DataError names the first that differs."""
    index = read_index(directory)
    files = listed_files(index)
    for name, size, _ in files:
        check_size(directory / name, size, file_size(directory / name))
    total, done = sum(size for _, size, _ in files), 0
    for name, size, expected in files:
        digest = xxhash.xxh3_128()
        for chunk in _chunks(directory / name):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress("verify", done, total)
        if digest.hexdigest() != expected:
            raise DataError(
                f"{directory / name}: expected xxh3_128 {expected} by {INDEX_NAME}, found {digest.hexdigest()} "
                f"in {size} bytes; the file is damaged or another's: copy it again or prepare the dataset again"
            )
    return index
