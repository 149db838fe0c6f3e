"""Waiting for room on a cluster that is full; stand-ins for Ray's own."""

from typing import Any

import pytest

from dataloader.errors import HostError
from elastic.cluster import placement
from elastic.config import JobConfig, parse_job


class FullGroup:
    def __init__(self) -> None:
        self.waits = 0
        self.removed = False

    def wait(self, timeout_seconds: int) -> bool:
        assert timeout_seconds <= 1
        self.waits += 1
        return False


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FullGroup:
    group = FullGroup()

    def removed(_: Any) -> None:
        group.removed = True

    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(placement, "remove_placement_group", removed)
    return group


@pytest.fixture
def job() -> JobConfig:
    train = {"steps": 1, "global_batch": 8, "micro_batch": 1, "logical_ranks": 8}
    return parse_job({"run": {"name": "x"}, "train": train, "data": {"path": "x", "seq_len": 8}}, "job")


def test_ctrl_c_ends_the_wait_for_room(group: FullGroup, job: JobConfig) -> None:
    assert not placement.place_first("x", job, lambda: group.waits == 2)
    assert (group.waits, group.removed) == (2, True)


def test_no_room_is_one_line(group: FullGroup, job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PLACING_PATIENCE_SECONDS", -1.0)
    with pytest.raises(HostError, match=r"cluster\.nodes: the Ray cluster has no room for 1 nodes"):
        placement.place_first("x", job, lambda: False)
    assert group.removed
