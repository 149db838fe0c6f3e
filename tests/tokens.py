"""A tiny data set, made by arithmetic, for jobs that only have to train on something."""

from __future__ import annotations

from pathlib import Path

from dataloader.dataset import INDEX_NAME, DatasetIndex, Split
from dataloader.shards import ShardWriter

VOCAB_SIZE = 50
END_OF_TEXT = VOCAB_SIZE - 1


def write_tokens(folder: Path, documents: int = 60, length: int = 100) -> Path:
    """Training and validation tokens in `folder`, which is made; the folder."""
    folder.mkdir()
    splits: dict[str, Split] = {}
    for name in ("train", "valid"):
        writer = ShardWriter(folder, name, vocab_size=VOCAB_SIZE, tokens_per_file=10**6)
        for document in range(documents):
            writer.add([(document * 7 + i * i) % END_OF_TEXT for i in range(length)], end_of_text=END_OF_TEXT)
        splits[name] = writer.finish()
    index = DatasetIndex(
        format="everstep-tokens",
        version=1,
        dtype="u16",
        vocab_size=VOCAB_SIZE,
        end_of_text=END_OF_TEXT,
        tokenizer=None,
        splits=splits,
    )
    (folder / INDEX_NAME).write_text(index.model_dump_json())
    return folder
