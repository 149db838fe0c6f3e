from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_terminal import Terminal

from tests.tokens import write_tokens

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
    write_tokens(tmp_path / "tokens", documents=20, length=50)
    opened = Terminal(tmp_path, tmp_path_factory.getbasetemp() / "byte-code")
    yield opened
    opened.close()
