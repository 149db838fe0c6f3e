"""llm.c, .npy, bare ids and datatrove: bytes, cuts, and how they are told apart."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataloader.errors import DataError
from dataloader.formats.bare import BareWriter, open_bare
from dataloader.formats.datatrove import DatatroveWriter, check, open_datatrove
from dataloader.formats.llm_c import LlmCWriter, open_llm_c
from dataloader.formats.megatron import MegatronWriter
from dataloader.formats.recognise import open_tokens
from dataloader.formats.token_file import DTYPES, TokenFile
from dataloader.mapped import MappedFiles

IDS = [3, 1, 4, 1, 5]


def ids_of(file: TokenFile) -> list[int]:
    return file.read(MappedFiles(), 0, file.tokens).tolist()


@pytest.mark.parametrize(("dtype", "magic", "version"), [("u16", 20240520, 1), ("u32", 20240801, 7)])
def test_llm_c(tmp_path: Path, dtype: str, magic: int, version: int) -> None:
    path = tmp_path / "a.bin"
    writer = LlmCWriter(path, dtype)
    writer.add(IDS)
    assert ids_of(writer.finish()) == IDS
    content = path.read_bytes()
    assert content[:1024] == struct.pack("<256i", magic, version, 5, *[0] * 253)
    assert content[1024:] == np.asarray(IDS, dtype=DTYPES[dtype]).tobytes()
    for size in (*range(0, 1025, 64), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"a\.bin: .*cut short"):
            open_llm_c(path)


@pytest.mark.parametrize(
    ("head", "says"), [((7, 1, 0), "no llm.c file"), ((20240520, 7, 0), "version 7"), ((20240520, 1, -3), "-3 tokens")]
)
def test_an_llm_c_head_that_is_wrong(tmp_path: Path, head: tuple[int, int, int], says: str) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<256i", *head, *[0] * 253))
    with pytest.raises(DataError, match=says):
        open_llm_c(tmp_path / "a.bin")


def test_bare_ids_need_their_type(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"  # as OLMo names them, without a header
    writer = BareWriter(path, "u32")
    writer.add(IDS)
    assert ids_of(writer.finish()) == IDS
    with pytest.raises(DataError, match=r"a\.npy: none of the formats .* say their type"):
        open_tokens(path)
    assert ids_of(open_tokens(path, "u32")) == IDS
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="19 bytes of ids are no whole number of 4-byte ids"):
        open_bare(path, "u32")


@pytest.mark.parametrize("dtype", ["<u2", "<i4", ">i4", "<f4"])
def test_a_true_npy_is_recognised(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.asarray(IDS, dtype=dtype))
    if dtype in ("<f4", ">i4"):
        with pytest.raises(DataError, match="token ids have one of"):
            open_tokens(path)
        return
    assert ids_of(open_tokens(path)) == IDS
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"a\.npy: .*cut short"):
        open_tokens(path)


def test_a_negative_id_is_never_handed_out(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asarray([3, -1, 4], dtype="<i4"))
    with pytest.raises(DataError, match=r"a\.npy: token 1 is -1"):
        ids_of(open_tokens(tmp_path / "a.npy"))


@pytest.mark.parametrize("dtype", ["u16", "u32"])
def test_datatrove(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "00000_shuffled.ds"
    writer = DatatroveWriter(path, dtype)
    for document in ([1, 2, 3], [], [4]):
        writer.add(document)
    opened = writer.finish()
    assert (opened.dtype, ids_of(opened)) == (DTYPES[dtype], [1, 2, 3, 4])
    assert path.with_name(path.name + ".index").read_bytes() == struct.pack("<3Q", 3, 3, 4)
    maps = MappedFiles()
    assert opened.ends is not None
    assert opened.ends.between(maps, 0, 3).tolist() == [3, 3]
    check(path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        if size * 2 != len(whole) or dtype == "u16":  # half of u32 is as long as u16
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=r"\.ds: \d+ bytes, but 4 tokens"):
                open_datatrove(path)


def test_datatrove_without_its_index(tmp_path: Path) -> None:
    (tmp_path / "a.ds").write_bytes(bytes(8))
    with pytest.raises(DataError, match=r"a\.ds\.index: missing: it belongs to a\.ds"):
        open_tokens(tmp_path / "a.ds")


def as_megatron(path: Path) -> None:
    writer = MegatronWriter(path, "u16")
    writer.add([IDS])
    writer.finish()


def as_llm_c(path: Path) -> None:
    writer = LlmCWriter(path, "u16")
    writer.add(IDS)
    writer.finish()


@pytest.mark.parametrize(("write", "name"), [(as_megatron, "megatron"), (as_llm_c, "llm.c")])
def test_a_bin_is_what_it_is(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    path = tmp_path / "a.bin"
    write(path)
    opened = open_tokens(path)
    assert (opened.format, ids_of(opened)) == (name, IDS)
    with pytest.raises(DataError, match="ids of type u16, not u32 as was said"):
        open_tokens(path, "u32")


def test_a_file_that_shrinks_later_yields_no_token(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    as_llm_c(path)
    opened, maps = open_tokens(path), MappedFiles()
    assert opened.read(maps, 0, 2).tolist() == IDS[:2]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"a\.bin: had 1034 bytes when it was opened, and now 1032 \(cut short\)"):
        opened.read(maps, 0, 2)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 6), (5, 1), (2, -1)])
def test_nothing_is_read_outside_the_run(tmp_path: Path, start: int, count: int) -> None:
    as_llm_c(tmp_path / "a.bin")
    with pytest.raises(IndexError):
        open_tokens(tmp_path / "a.bin").read(MappedFiles(), start, count)


def test_ids_beyond_4_gib(tmp_path: Path) -> None:
    """Sparse: the file takes no room."""
    path, tokens = tmp_path / "a.bin", 2**31 + 10
    with path.open("wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * (tokens - 2))
        file.write(struct.pack("<2H", 7, 8))
    opened, maps = open_bare(path, "u16"), MappedFiles()
    assert opened.read(maps, tokens - 3, 3).tolist() == [0, 7, 8]
