from collections.abc import Iterator
from pathlib import Path

import pytest
from live_job import Site

from tests.tokens import write_tokens

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
    write_tokens(tmp_path / "tokens")
    opened = Site(tmp_path)
    yield opened
    opened.close()
