from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_terminal import Terminal

from dataloader.dataset import INDEX_NAME, DatasetIndex, Split
from dataloader.shards import ShardWriter

JOB = """\
run: {name: small}
train: {steps: 30, global_batch: 4, micro_batch: 1, logical_ranks: 4}
data: {path: tokens, seq_len: 8}
model: {hidden_size: 16, heads: 2}
"""


@pytest.fixture
def terminal(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A folder with a job file and its data."""
    (tmp_path / "job.yaml").write_text(JOB)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    splits: dict[str, Split] = {}
    for name in ("train", "valid"):
        writer = ShardWriter(tokens, name, vocab_size=50, tokens_per_file=10**6)
        for document in range(20):
            writer.add([(document * 7 + i) % 49 for i in range(50)], end_of_text=49)
        splits[name] = writer.finish()
    index = DatasetIndex(
        format="everstep-tokens", version=1, dtype="u16", vocab_size=50, end_of_text=49, tokenizer=None, splits=splits
    )
    (tokens / INDEX_NAME).write_text(index.model_dump_json())
    opened = Terminal(tmp_path, tmp_path_factory.getbasetemp() / "byte-code")
    yield opened
    opened.close()
