"""A worker from its job to a driver that is told to leave: what is built, refused, and left behind."""

from __future__ import annotations

import selectors
from pathlib import Path
from typing import Any

import pytest

from dataloader.dataset import INDEX_NAME, DatasetIndex
from dataloader.errors import ConfigError
from dataloader.shards import ShardWriter
from runtime import worker
from runtime.config import TrainConfig

pytestmark = pytest.mark.usefixtures("pinned")


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    writer = ShardWriter(tokens, "train", vocab_size=50, tokens_per_file=10**6)
    writer.add([i % 49 for i in range(200)], end_of_text=49)
    index = DatasetIndex(
        format="everstep-tokens",
        version=1,
        dtype="u16",
        vocab_size=50,
        end_of_text=49,
        tokenizer=None,
        splits={"train": writer.finish()},
    )
    (tokens / INDEX_NAME).write_text(index.model_dump_json())
    return {
        "run": {"name": "small"},
        "recipe": None,
        "train": {"steps": 2, "seed": 1, "global_batch": 4, "micro_batch": 1, "logical_ranks": 4, "shards": 2},
        "data": {"path": str(tokens), "seq_len": 8},
        "model": {"hidden_size": 16, "heads": 2, "layers": 1},
        "optimizer": {},
        "schedule": {},
        "checkpoint": {},
        "links": {},
        "faults": [],
    }


def test_a_model_that_is_too_large_for_its_shards_is_refused(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of 2,688 floats: 12 bytes for each with AdamW's state, and a contribution has no more than 8."""
    monkeypatch.setattr(worker, "PAYLOAD_LIMIT_BYTES", 10_000)
    with pytest.raises(ConfigError, match=r"train\.shards: 2 for .* parameters .* set it to \d+ or more") as caught:
        worker.build(job, TrainConfig.model_validate(job["train"]))
    fewest = int(str(caught.value).split()[-3])
    job["train"]["shards"] = fewest
    worker.build(job, TrainConfig.model_validate(job["train"]))


class Gone:
    """An agent's channel that has closed."""

    closed = "the agent is gone"

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message["kind"])


def test_a_worker_that_ends_leaves_nothing_on_the_selector(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("answer_first", "gc.freeze"):  # they would outlive the test
        monkeypatch.setattr(f"runtime.worker.{name}", lambda: None)
    setup = {"job": job, "run_dir": str(tmp_path), "worker": 1, "secret": b"s" * 32, "host": "127.0.0.1"}
    agent: Any = Gone()
    with selectors.DefaultSelector() as selector:
        worker.work(setup, agent, selector)
        assert agent.sent == ["WorkerUp"]
        assert not selector.get_map()
