"""Small datasets for the tests of this room, written by the production writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dataloader.dataset import FORMAT, FORMAT_VERSION, DatasetIndex, dtype_for
from dataloader.shards import ShardWriter

Documents = Sequence[Sequence[int]]
MakeDataset = Callable[..., Path]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """make(documents, ...) -> directory. Every document is followed by token 0."""
    made = 0

    def make(documents: Documents, vocab_size: int = 1000, tokens_per_file: int = 100, split: str = "train") -> Path:
        nonlocal made
        directory = tmp_path / f"dataset-{made}"
        directory.mkdir()
        made += 1
        writer = ShardWriter(directory, split, vocab_size, tokens_per_file)
        for document in documents:
            writer.add(document, end_of_text=0)
        index = DatasetIndex(
            format=FORMAT,
            version=FORMAT_VERSION,
            dtype=dtype_for(vocab_size),
            vocab_size=vocab_size,
            end_of_text=0,
            tokenizer=None,
            splits={split: writer.finish()},
        )
        (directory / "dataset.json").write_text(json.dumps(index.model_dump()))
        return directory

    return make


@pytest.fixture
def edit_index() -> Callable[[Path, Callable[[dict], None]], None]:
    """edit(directory, change): rewrites dataset.json after change(its contents)."""

    def edit(directory: Path, change: Callable[[dict], None]) -> None:
        plain = json.loads((directory / "dataset.json").read_text())
        change(plain)
        (directory / "dataset.json").write_text(json.dumps(plain))

    return edit
