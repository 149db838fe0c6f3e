"""`everstep data`: what it prints, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastic import cli


def everstep(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main(["data", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    np.asarray([5, 6, 0, 7, 0, 0], dtype="<u2").tofile(tmp_path / "corpus.bin")
    return tmp_path / "corpus.bin"


def test_from_bare_ids_to_megatron(capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path) -> None:
    to = ("--to", "megatron", "--out", tmp_path / "meg", "--end-of-text", "0")
    code, out, err = everstep(capsys, "convert", corpus, "--type", "u16", *to)
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/meg.bin: megatron, 6 ids of type u16 in 3 documents\n"
    assert everstep(capsys, "inspect", tmp_path / "meg")[1] == (
        "megatron: 6 ids of type u16 in 3 documents; 12 bytes\n"
    )
    assert everstep(capsys, "verify", tmp_path / "meg.idx")[1] == (
        "megatron: all is well: 6 ids in 3 documents, the largest 7\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "corpus.bin"), "say their type: u8"),
        (("verify", "nothere"), "nothere"),
        (("convert", "corpus.bin", "--type", "u16", "--to", "raw", "--out", "corpus.bin"), "is there already"),
        (("inspect", "."), "a directory without index.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(corpus.parent)
    code, out, err = everstep(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("everstep: ")
    assert says in err
    assert err.count("\n") == 1
