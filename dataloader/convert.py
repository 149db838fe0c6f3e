"""From any token format to another: documents in order, ids as they are, nothing guessed.

A format that knows no documents gives one, unless the id is named that ends each. A format that is written and knows
none just gets the ids. Nothing that is there is written over, and what fails half-way leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataloader.errors import DataError, HostError
from dataloader.formats import datatrove, megatron
from dataloader.formats.bare import BareWriter
from dataloader.formats.datatrove import DatatroveWriter
from dataloader.formats.llm_c import LlmCWriter
from dataloader.formats.mds import MdsColumn, is_mds
from dataloader.formats.megatron import MegatronWriter
from dataloader.formats.recognise import open_tokens
from dataloader.formats.token_file import Integers, TokenFile, name_of
from dataloader.mapped import MappedFiles

AT_ONCE = 2**22  # tokens that are read together
TARGETS = ("megatron", "llm.c", "datatrove", "raw")
Report = Callable[[int], None]  # tokens done so far


@dataclass(frozen=True, slots=True)
class Contents:
    """What reading a whole source has shown."""

    tokens: int
    documents: int
    largest_id: int


class Source:
    """A token file of any format, or a column of an MDS dataset. `tokens` and `documents` are None where they show only
    in reading."""

    def __init__(self, path: Path, dtype: str | None = None, column: str | None = None) -> None:
        self.path = path
        self.mds = MdsColumn(path, column, dtype) if path.is_dir() and is_mds(path) else None
        self.file: TokenFile | None = None
        if self.mds is None:
            if path.is_dir():
                raise DataError(f"{path}: a directory without index.json; name a token file, or an MDS dataset")
            self.file = open_tokens(path, dtype)

    @property
    def format(self) -> str:
        return "mds" if self.file is None else self.file.format

    @property
    def type(self) -> str | None:
        return None if self.file is None else name_of(self.file.dtype)

    def documents(self, end_of_text: int | None = None) -> Iterator[Integers]:
        """Each document's ids, int64. `end_of_text`: the id that ends each, where the format knows none."""
        if self.mds is not None:
            yield from self.mds
            return
        assert self.file is not None
        maps = MappedFiles(4)
        try:
            if self.file.ends is not None:
                yield from _by_ends(self.file, maps)
            else:
                yield from _by_id(self.file, maps, end_of_text)
        finally:
            maps.close()

    def verify(self, report: Report) -> Contents:
        """Read all of it; DataError, naming the file, for the first thing that doesn't fit."""
        if self.file is not None and self.file.format in ("megatron", "fairseq"):
            megatron.check(self.path)
        elif self.file is not None and self.file.format == "datatrove":
            datatrove.check(self.path)
        tokens, documents, largest = 0, 0, -1
        for ids in self.documents():
            tokens += len(ids)
            documents += 1
            largest = max(largest, int(ids.max(initial=-1)))
            report(tokens)
        return Contents(tokens, documents, largest)


def _by_ends(file: TokenFile, maps: MappedFiles) -> Iterator[Integers]:
    assert file.ends is not None
    start = 0
    for first in range(0, file.ends.count, AT_ONCE // 64):
        numbers = np.arange(first, min(first + AT_ONCE // 64, file.ends.count))
        for end in file.ends.at(maps, numbers).tolist():
            if not start <= end <= file.tokens:
                raise DataError(f"{file.path}: a document from token {start} to {end} of {file.tokens}; write it again")
            yield file.read(maps, start, end - start)
            start = end
    if start < file.tokens:
        raise DataError(f"{file.path}: {file.tokens - start} tokens behind the last document; write it again")


def _by_id(file: TokenFile, maps: MappedFiles, end_of_text: int | None) -> Iterator[Integers]:
    kept: list[Integers] = []
    for start in range(0, file.tokens, AT_ONCE):
        ids = file.read(maps, start, min(AT_ONCE, file.tokens - start))
        cuts = (np.flatnonzero(ids == end_of_text) + 1).tolist() if end_of_text is not None else []
        low = 0
        for cut in cuts:
            yield np.concatenate([*kept, ids[low:cut]])
            kept, low = [], cut
        kept.append(ids[low:])
    if any(len(part) for part in kept):
        yield np.concatenate(kept)


class _Writer(Protocol):
    def add(self, ids: Any) -> None: ...
    def finish(self) -> TokenFile: ...


class _Documents:
    """Megatron's writer takes documents of sequences: here each is one."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._writer = MegatronWriter(prefix, dtype)

    def add(self, ids: Any) -> None:
        self._writer.add([ids])

    def finish(self) -> TokenFile:
        return self._writer.finish()


def convert(documents: Iterable[Integers], target: str, out: Path, dtype: str, report: Report) -> TokenFile:
    """Write them all. DataError for an id that doesn't fit, a type that the format lacks, or if `out` is there."""
    writers: dict[str, Callable[[Path, str], _Writer]] = {
        "megatron": _Documents,
        "llm.c": LlmCWriter,
        "datatrove": DatatroveWriter,
        "raw": BareWriter,
    }
    files = files_of(target, out)
    for file in files:
        if file.exists():
            raise DataError(f"{file}: is there already; remove it, or name another")
    with contextlib.ExitStack() as undo, _host_errors(out):
        undo.callback(_remove, files)
        writer, tokens = writers[target](out, dtype), 0
        for ids in documents:
            writer.add(ids)
            tokens += len(ids)
            report(tokens)
        written = writer.finish()
        undo.pop_all()
        return written


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _host_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{out}: there is no directory {out.parent}") from None
    except OSError as error:
        raise HostError(f"{out}: can't be written: {error.strerror}; name a place that has room") from error


def files_of(target: str, out: Path) -> tuple[Path, ...]:
    if target == "megatron":
        return megatron.paths_of(out)
    return (out, datatrove.index_of(out)) if target == "datatrove" else (out,)


def usual_type(target: str, given: str | None) -> str:
    """The type that is written where none is asked for: 16 bits if the source has no more, else 32."""
    narrow = given in ("u8", "u16", "i8", "i16")
    if target == "megatron":
        return "u16" if narrow else "i32"
    return "u16" if narrow else "u32"
