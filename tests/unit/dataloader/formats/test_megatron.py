"""Megatron's pairs of files: the bytes of other writers, what doesn't fit, and what is in them."""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloader.errors import DataError
from dataloader.formats.megatron import MegatronWriter, check, open_megatron, read_index
from dataloader.mapped import MappedFiles

DOCUMENTS = [[[1, 2, 3]], [[]], [[4]]]


def written(prefix: Path, documents: list[list[list[int]]], dtype: str = "u16") -> None:
    writer = MegatronWriter(prefix, dtype)
    for document in documents:
        writer.add(document)
    writer.finish()


def sums(prefix: Path) -> tuple[int, str, int, str]:
    index, binary = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    return len(index), sha256(index).hexdigest(), len(binary), sha256(binary).hexdigest()


def test_the_bytes_are_those_of_megatron_itself(tmp_path: Path) -> None:
    written(tmp_path / "a", DOCUMENTS)
    assert sums(tmp_path / "a") == (
        102,
        "8c6e0892831b15a24fea943103b15b5db7b3a9ad23d08d793d1d839f8e77b666",
        8,
        "ea99f710d9d0b8ba192295c969a63ed7ce8fc5743da20d2057fa2b6d2c404bfb",
    )
    written(tmp_path / "b", DOCUMENTS, "i32")
    assert sums(tmp_path / "b")[1] == "cb747a76e3754897baf1c7f5212e5a44d7029499a9e9d0c6c7958819a2880a00"


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx"])
def test_any_of_its_names_opens_it(tmp_path: Path, name: str) -> None:
    written(tmp_path / "a", DOCUMENTS)
    opened, maps = open_megatron(tmp_path / name), MappedFiles()
    assert (opened.format, opened.tokens) == ("megatron", 4)
    assert opened.read(maps, 0, 4).tolist() == [1, 2, 3, 4]
    assert opened.ends is not None
    assert opened.ends.between(maps, 0, 4).tolist() == [3, 3, 4]
    assert opened.ends.between(maps, 3, 4).tolist() == [4]


def test_a_prefix_with_a_dot_in_it(tmp_path: Path) -> None:
    written(tmp_path / "v1.2", DOCUMENTS)
    assert open_megatron(tmp_path / "v1.2").tokens == 4


def fairseq_of(prefix: Path, sequences: list[list[int]]) -> None:
    """As fairseq wrote it before Megatron added documents."""
    lengths = np.asarray([len(s) for s in sequences], dtype="<i4")
    offsets = (np.concatenate(([0], np.cumsum(lengths)))[: len(lengths)] * 2).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 8, len(sequences))
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.tobytes())
    prefix.with_suffix(".bin").write_bytes(b"".join(np.asarray(s, dtype="<u2").tobytes() for s in sequences))


def test_fairseqs_index_is_told_apart_by_its_size(tmp_path: Path) -> None:
    fairseq_of(tmp_path / "a", [[1, 2, 3], [], [4]])
    opened, maps = open_megatron(tmp_path / "a"), MappedFiles()
    assert (opened.format, opened.tokens) == ("fairseq", 4)
    assert opened.ends is not None
    assert opened.ends.between(maps, 0, 4).tolist() == [3, 3, 4]
    check(tmp_path / "a")


def test_modes_of_a_multimodal_dataset(tmp_path: Path) -> None:
    writer = MegatronWriter(tmp_path / "a", "i32")
    writer.add([[1], [2, 3]], modes=[0, 1])
    writer.add([[4]], modes=[0])
    assert writer.finish().tokens == 4
    assert read_index(tmp_path / "a").modes is not None
    assert (tmp_path / "a.idx").read_bytes()[-3:] == bytes([0, 1, 0])
    maps = MappedFiles()
    ends = open_megatron(tmp_path / "a").ends
    assert ends is not None
    assert ends.between(maps, 0, 4).tolist() == [3, 4]


@pytest.mark.parametrize("document", [[[65_536]], [[-1]]])
def test_an_id_that_doesnt_fit_is_refused_and_never_wraps(tmp_path: Path, document: list[list[int]]) -> None:
    writer = MegatronWriter(tmp_path / "a", "u16")
    with pytest.raises(DataError, match=r"a\.bin: token id (65536|-1) doesn't fit u16"):
        writer.add(document)


def test_every_cut_of_either_file_is_seen(tmp_path: Path) -> None:
    written(tmp_path / "a", DOCUMENTS)
    for name in ("a.idx", "a.bin"):
        whole = (tmp_path / name).read_bytes()
        for size in range(len(whole)):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(DataError, match=r"a\.(idx|bin): "):
                open_megatron(tmp_path / "a")
        (tmp_path / name).write_bytes(whole + b"\0")
        with pytest.raises(DataError, match=r"a\.(idx|bin): "):
            open_megatron(tmp_path / "a")
        (tmp_path / name).write_bytes(whole)
    assert open_megatron(tmp_path / "a").tokens == 4


@pytest.mark.parametrize(
    ("at", "byte", "says"),
    [
        (0, 0x4E, "no Megatron index"),
        (9, 2, "version 2"),
        (17, 7, "f32: these are no token ids"),
        (17, 9, "type 9 is not known"),
        (70, 1, "documents begin at sequence 1"),
        (94, 2, "end at 2"),
    ],
)
def test_what_doesnt_fit_is_said(tmp_path: Path, at: int, byte: int, says: str) -> None:
    written(tmp_path / "a", DOCUMENTS)
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[at] = byte
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(DataError, match=says):
        open_megatron(tmp_path / "a")


def test_the_index_of_other_data_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a", DOCUMENTS)
    written(tmp_path / "b", [[[1, 2, 3, 4, 5]]])
    (tmp_path / "b.idx").replace(tmp_path / "a.idx")
    with pytest.raises(DataError, match=r"a\.bin: 8 bytes, but 5 tokens by a\.idx make 10 \(cut short\)"):
        open_megatron(tmp_path / "a")


def test_a_gap_between_sequences_is_found_by_reading_it_all(tmp_path: Path) -> None:
    written(tmp_path / "a", [[[1, 2, 3]], [[5]], [[4]]])
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[34 + 4] = 0  # the second sequence's length
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(DataError, match="sequence 2 has 1 ids from byte 8 on, expected from 6 on"):
        check(tmp_path / "a")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=5), min_size=1, max_size=3), max_size=8),
    st.sampled_from(["u16", "i32", "i64"]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], dtype: str) -> None:
    prefix = tmp_path_factory.mktemp("m") / "a"
    written(prefix, documents, dtype)
    opened, maps = open_megatron(prefix), MappedFiles()
    flat = [i for document in documents for sequence in document for i in sequence]
    assert opened.read(maps, 0, opened.tokens).tolist() == flat
    ends = np.cumsum([sum(len(s) for s in document) for document in documents]).tolist()
    assert opened.ends is not None
    assert opened.ends.count == len(documents)
    assert opened.ends.between(maps, -1, opened.tokens).tolist() == ends
    check(prefix)
