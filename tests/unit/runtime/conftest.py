"""What tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from runtime.config import TrainConfig
from runtime.numerics import pin


@pytest.fixture
def pinned() -> Iterator[None]:
    """The settings of a worker with one thread, and this process's own afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    pin(TrainConfig(steps=1, global_batch=1, micro_batch=1, logical_ranks=1))
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
