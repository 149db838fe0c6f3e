"""What is refused before Ray is brought in, and what becomes of a fault whose controller doesn't answer."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dataloader.errors import HostError, UsageError
from elastic.cluster import attach
from elastic.cluster.attach import inject
from elastic.records import EventLog
from elastic.rundir import RunDirectory, hold


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.job.write_text("")
    return run


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no job\.yaml"):
        inject(tmp_path, ["stop"])


def test_a_run_that_is_over(run: RunDirectory) -> None:
    with hold(run):
        pass
    with pytest.raises(UsageError, match="no job is running here; start one"):
        inject(run.path, ["stop"])


def test_a_fault_that_is_none(run: RunDirectory) -> None:
    with hold(run), pytest.raises(UsageError, match="'explode' is no fault"):
        inject(run.path, ["stop", "explode"])


@pytest.mark.parametrize(
    ("contact", "says"),
    [
        (None, "not up yet, or at its end"),
        ("{", "damaged"),
        ("[]", "lacks 'address'"),
        (json.dumps({"address": "1.2.3.4:1"}), "lacks 'namespace'"),
    ],
)
def test_a_job_that_says_not_or_badly_where_it_is(run: RunDirectory, contact: str | None, says: str) -> None:
    if contact is not None:
        run.cluster.write_text(contact)
    with hold(run), pytest.raises(UsageError, match=says):
        inject(run.path, ["stop"])


class DyingController:
    """Answers that it is there, and dies of the first request; with `note`, having written it down."""

    def __init__(self, run: RunDirectory, note: bool) -> None:
        self.run, self.note, self.asked = run, note, 0
        self.__ray_ready__ = SimpleNamespace(remote=lambda: True)
        self.request = SimpleNamespace(remote=self.die)

    def die(self, fault: str) -> Exception:
        self.asked += 1
        if self.note:
            with EventLog(self.run.events) as events:
                events.append("fault_injected", time=time.time(), step=1, generation=1, fault=fault)
        return ray.exceptions.ActorDiedError()


@pytest.mark.parametrize("note", [True, False])
def test_a_fault_that_may_have_been_done_is_not_asked_for_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, note: bool
) -> None:
    def get(value: Any, timeout: float) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    controller = DyingController(run, note)
    monkeypatch.setattr(ray, "get_actor", lambda name: controller)
    monkeypatch.setattr(ray, "get", get)
    if note:
        assert attach._request(run.path, "controller", "add-node") == ["add-node: injected"]
    else:
        with pytest.raises(HostError, match=r"add-node: .* may have done it; look for it in .*events\.jsonl"):
            attach._request(run.path, "controller", "add-node")
    assert controller.asked == 1
