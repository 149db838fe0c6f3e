"""From every format to every other, and what is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataloader.convert import TARGETS, Contents, Source, convert, files_of, usual_type
from dataloader.errors import DataError, HostError
from dataloader.formats.token_file import Integers

DOCUMENTS = [[1, 2, 0], [0], [7, 8, 9, 9, 0]]
KNOW_DOCUMENTS = {"megatron", "datatrove"}


def quiet(tokens: int) -> None:
    pass


def written(target: str, out: Path, dtype: str = "u16") -> Path:
    return convert([np.asarray(d) for d in DOCUMENTS], target, out, dtype, quiet).path


@pytest.mark.parametrize("before", TARGETS)
@pytest.mark.parametrize("after", TARGETS)
def test_there_and_back(tmp_path: Path, before: str, after: str) -> None:
    first = written(before, tmp_path / "first.bin")
    source = Source(first, "u16" if before == "raw" else None)
    end = None if before in KNOW_DOCUMENTS else 0
    second = convert(source.documents(end), after, tmp_path / "second.bin", usual_type(after, source.type), quiet)
    again = Source(second.path, "u16" if after == "raw" else None)
    end = None if after in KNOW_DOCUMENTS else 0
    assert [ids.tolist() for ids in again.documents(end)] == DOCUMENTS
    third = tmp_path / "third.bin"
    convert(again.documents(end), before, third, "u16", quiet)
    for one, other in zip(files_of(before, first), files_of(before, third), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_verify_reads_it_all(tmp_path: Path) -> None:
    source = Source(written("megatron", tmp_path / "a"))
    assert source.verify(quiet) == Contents(tokens=9, documents=3, largest_id=9)
    assert Source(written("llm.c", tmp_path / "b.bin")).verify(quiet) == Contents(9, 1, 9)


def test_without_an_end_of_text_bare_ids_are_one_document(tmp_path: Path) -> None:
    source = Source(written("raw", tmp_path / "a.bin"), "u16")
    assert [len(ids) for ids in source.documents()] == [9]


@pytest.mark.parametrize("target", TARGETS)
def test_what_fails_half_way_leaves_nothing(tmp_path: Path, target: str) -> None:
    with pytest.raises(DataError, match="token id 70000 doesn't fit u16"):
        convert([np.asarray([1]), np.asarray([70_000])], target, tmp_path / "a.bin", "u16", quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, target: str) -> None:
    def documents() -> Iterator[Integers]:
        yield np.asarray([1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(HostError, match=r"a\.bin: can't be written: No space left on device"):
        convert(documents(), target, tmp_path / "a.bin", "u16", quiet)
    assert not list(tmp_path.iterdir())


def test_ends_that_dont_ascend_are_refused(tmp_path: Path) -> None:
    path = written("datatrove", tmp_path / "a.ds")
    index = path.with_name("a.ds.index")
    np.asarray([8, 4, 9], dtype="<u8").tofile(index)
    with pytest.raises(DataError, match=r"a\.ds: a document from token 8 to 4 of 9"):
        list(Source(path).documents())


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_written_over(tmp_path: Path, target: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"a\.bin: is there already"):
        written(target, path)
    assert path.read_bytes() == b"mine"


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no directory"):
        written("raw", tmp_path / "nowhere" / "a.bin")


@pytest.mark.parametrize(
    ("target", "dtype"), [("llm.c", "i32"), ("datatrove", "i64"), ("megatron", "u32"), ("raw", "f4")]
)
def test_a_type_that_a_format_lacks(tmp_path: Path, target: str, dtype: str) -> None:
    with pytest.raises(DataError, match=dtype):
        written(target, tmp_path / "a.bin", dtype)
    assert not list(tmp_path.iterdir())


def test_a_directory_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a directory without index\.json"):
        Source(tmp_path)
