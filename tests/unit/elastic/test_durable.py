import threading
from pathlib import Path
from typing import Any

import pytest

from dataloader.errors import DataError, HostError
from elastic import durable
from elastic.config import FaultConfig
from elastic.rundir import RunDirectory

FAULTS = (FaultConfig(at_step=3, fault="kill-worker=1"),)
STATE: dict[str, Any] = {
    "roster": {"next_worker": 5, "next_node": 2, "slots": [0, 1], "reserved": [], "nodes": [[0, 0, "i", True]]},
    "members": [0, 1],
    "faults": [[0, "over", 1, -1, 0]],
    "stop": [True, "", ""],
    "number": 4,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_state_comes_back(run: RunDirectory) -> None:
    assert durable.read_state(run) is None
    durable.write_state(run, STATE, FAULTS)
    assert durable.read_state(run) == STATE


def test_a_new_run_begins_without_state(run: RunDirectory) -> None:
    durable.write_state(run, STATE, FAULTS)
    durable.begin(run, FAULTS, resume=False)
    assert durable.read_state(run) is None


def test_a_resumed_run_keeps_numbers_and_forgets_members(run: RunDirectory) -> None:
    durable.write_state(run, STATE, FAULTS)
    durable.begin(run, FAULTS, resume=True)
    kept = durable.read_state(run)
    assert kept is not None
    assert kept["roster"]["next_worker"] == 5
    assert (kept["roster"]["slots"], kept["members"], kept["stop"]) == ([], [], [False, "", ""])
    assert kept["faults"] == STATE["faults"]


def test_a_resumed_run_with_other_faults_does_them(run: RunDirectory) -> None:
    durable.write_state(run, STATE, FAULTS)
    durable.begin(run, (FaultConfig(at_step=3, fault="kill-worker=2"),), resume=True)
    kept = durable.read_state(run)
    assert kept is not None
    assert kept["faults"] == []


def test_resuming_without_state_is_beginning(run: RunDirectory) -> None:
    durable.begin(run, FAULTS, resume=True)
    assert durable.read_state(run) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": 3, "faults": []}', '{"faults": []}'])
def test_a_damaged_state_is_named(run: RunDirectory, text: str) -> None:
    run.controller.write_text(text)
    with pytest.raises(DataError, match=r"controller\.json: damaged; delete it"):
        durable.read_state(run)


def test_incarnations_count_up(run: RunDirectory) -> None:
    assert [durable.new_incarnation(run, "a", step) for step in (0, 0, 5)] == [1, 2, 3]
    assert durable.new_incarnation(run, "b", 5) == 4
    assert sorted(p.name for p in run.incarnations.iterdir()) == ["000001", "000002", "000003", "000004"]


def test_no_two_get_the_same_number(run: RunDirectory) -> None:
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: numbers.append(durable.new_incarnation(run, f"job {i}", 0)))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 13))


def test_a_controller_that_keeps_dying_at_one_step_is_not_started_for_ever(run: RunDirectory) -> None:
    for _ in range(durable.RESTARTS_IN_PLACE):
        durable.new_incarnation(run, "a", 7)
    with pytest.raises(HostError, match="ended 8 times at step 7"):
        durable.new_incarnation(run, "a", 7)
    assert durable.new_incarnation(run, "a", 8) == durable.RESTARTS_IN_PLACE + 1
    assert durable.new_incarnation(run, "another job", 7) == durable.RESTARTS_IN_PLACE + 2
