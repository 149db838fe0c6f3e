from collections.abc import Iterator
from pathlib import Path

import pytest
from live_job import Site

from dataloader.dataset import INDEX_NAME, DatasetIndex, Split
from dataloader.shards import ShardWriter

JOB = """\
run: {name: tiny}
train: {steps: 400, seed: 3, global_batch: 8, micro_batch: 1, logical_ranks: 4}
cluster: {nodes: 2, workers_per_node: 1}
data: {path: tokens, seq_len: 32}
model: {hidden_size: 32, intermediate_size: 48, layers: 2, heads: 2, kv_heads: 1, dropout: 0.1}
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder with a job file and its data; whatever was started from it is gone afterwards."""
    (tmp_path / "job.yaml").write_text(JOB)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    splits: dict[str, Split] = {}
    for name in ("train", "valid"):
        writer = ShardWriter(tokens, name, vocab_size=50, tokens_per_file=10**6)
        for document in range(60):
            writer.add([(document * 7 + i * i) % 49 for i in range(100)], end_of_text=49)
        splits[name] = writer.finish()
    index = DatasetIndex(
        format="everstep-tokens", version=1, dtype="u16", vocab_size=50, end_of_text=49, tokenizer=None, splits=splits
    )
    (tokens / INDEX_NAME).write_text(index.model_dump_json())
    opened = Site(tmp_path)
    yield opened
    opened.close()
