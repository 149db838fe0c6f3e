"""MosaicML's shards, written here by the layout that they have."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataloader.errors import DataError
from dataloader.formats.mds import MdsColumn

SETTINGS = b'{"format": "mds", "version": 2}'
ROWS = [[1, 2, 3], [4], [5, 65_535]]


def ndarray(ids: list[int], dtype: str, code: int | None, shaped: bool) -> bytes:
    """As its encoding has it: a byte for the type unless that is fixed, and for the shape unless that is."""
    head = b"" if code is None else bytes([code])
    return head + (bytes([1 << 2, len(ids)]) if shaped else b"") + np.asarray(ids, dtype=dtype).tobytes()


def shard(directory: Path, columns: dict[str, str], samples: list[list[bytes]], sizes: list[int | None]) -> None:
    rows = []
    for values in samples:
        told = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
        rows.append(struct.pack(f"<{len(told)}I", *told) + b"".join(values))
    begin = 4 + 4 * (len(rows) + 1) + len(SETTINGS)
    offsets = np.cumsum([begin, *map(len, rows)]).astype("<u4").tobytes()
    content = struct.pack("<I", len(rows)) + offsets + SETTINGS + b"".join(rows)
    (directory / "shard.00000.mds").write_bytes(content)
    facts: dict[str, Any] = {
        "format": "mds",
        "version": 2,
        "samples": len(rows),
        "column_names": list(columns),
        "column_encodings": list(columns.values()),
        "column_sizes": sizes,
        "compression": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}},
        "zip_data": None,
    }
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": [facts]}))


@pytest.mark.parametrize(
    ("encoding", "dtype", "code"),
    [("ndarray:uint16", "<u2", None), ("ndarray", "<i4", 33), ("ndarray", "<i8", 65)],
)
def test_a_column_of_arrays(tmp_path: Path, encoding: str, dtype: str, code: int | None) -> None:
    columns = {"id": "str", "tokens": encoding}
    rows = [[b"name", ndarray(ids, dtype, code, shaped=True)] for ids in ROWS]
    shard(tmp_path, columns, rows, [None, None])
    column = MdsColumn(tmp_path)
    assert (column.column, column.samples) == ("tokens", 3)
    assert [ids.tolist() for ids in column] == ROWS


def test_a_column_of_one_fixed_shape(tmp_path: Path) -> None:
    rows = [[ndarray([n, n + 1], "<i4", None, shaped=False), b"x" * 8] for n in range(4)]
    shard(tmp_path, {"input_ids": "ndarray:int32:2", "n": "int"}, rows, [8, 8])
    assert [ids.tolist() for ids in MdsColumn(tmp_path)] == [[n, n + 1] for n in range(4)]


def test_bytes_need_their_type(tmp_path: Path) -> None:
    shard(tmp_path, {"tokens": "bytes"}, [[np.asarray(ids, dtype="<i8").tobytes()] for ids in ROWS], [None])
    with pytest.raises(DataError, match="'tokens' is bytes: say their type"):
        MdsColumn(tmp_path)
    assert [ids.tolist() for ids in MdsColumn(tmp_path, dtype="i64")] == ROWS


@pytest.mark.parametrize(("column", "says"), [("text", "no column 'text'"), ("id", "is str, which holds no tokens")])
def test_other_columns(tmp_path: Path, column: str, says: str) -> None:
    shard(tmp_path, {"id": "str", "tokens": "ndarray:uint16"}, [], [None, None])
    with pytest.raises(DataError, match=says):
        MdsColumn(tmp_path, column)


def test_a_shard_that_was_cut_or_damaged_yields_nothing_wrong(tmp_path: Path) -> None:
    shard(tmp_path, {"tokens": "ndarray:uint16"}, [[ndarray(ids, "<u2", None, shaped=True)] for ids in ROWS], [None])
    path = tmp_path / "shard.00000.mds"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"shard\.00000\.mds: \d+ bytes, but 3 samples by index\.json make"):
            MdsColumn(tmp_path)
    for at in range(16):  # the head and the offsets
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"shard\.00000\.mds: "):
            list(MdsColumn(tmp_path))


def test_only_the_packed_shard_is_there(tmp_path: Path) -> None:
    shard(tmp_path, {"tokens": "ndarray:uint16"}, [], [None])
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0] |= {"compression": "zstd:7", "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 9}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "shard.00000.mds").unlink()
    with pytest.raises(DataError, match=r"only shard\.00000\.mds\.zstd \(zstd:7\) is there: unpack it"):
        MdsColumn(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 1, "shards": []}', b"[]", b'{"version": 2, "shards": [3]}']
)
def test_no_index_of_this_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"index\.json: "):
        MdsColumn(tmp_path)
