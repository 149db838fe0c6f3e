from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.protocol import StepRecord

JOB = """\
run: {name: small}
train: {steps: 40, seed: 7, global_batch: 16, micro_batch: 2, logical_ranks: 8}
data: {source: stdlib, seq_len: 128}
optimizer: {lr: 3e-4}
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file that holds, in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    """A sound record of a step of a job with 16 samples a step."""

    def make(step: int, **changes: object) -> StepRecord:
        values: dict[str, object] = {
            "step": step,
            "generation": 1 + step // 4,
            "workers": 4,
            "copies": 2,
            "samples": (16 * step, 16 * step + 16),
            "tokens": 2048,
            "loss": 8.0 - step / 10,
            "grad_norm": 1.5,
            "lr": 1e-3,
            "verdict": "commit",
            "digest": f"{step:032x}",
            "data_digest": f"{step + 1000:032x}",
            "time": 1000.0 + step,
            "seconds": 0.5,
        }
        return StepRecord(**{**values, **changes})  # type: ignore[arg-type]

    return make
