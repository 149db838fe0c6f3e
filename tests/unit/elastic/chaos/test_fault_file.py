from pathlib import Path

import pytest

from dataloader.errors import ConfigError
from elastic.chaos.fault_file import read_fault_file
from elastic.chaos.jobs import place, until
from elastic.config import parse_job

GOOD = """\
- {at_seconds: 9, fault: add-node}
- {at_step: 4, fault: "poison,what=nan"}
- {at_step: 6, fault: kill-worker=1, wait: true}
- {at_seconds: 2.5, fault: kill-node=0}
"""
JOB = {
    "run": {"name": "x", "dir": "/r/x"},
    "train": {"steps": 10, "global_batch": 4, "micro_batch": 1, "logical_ranks": 4},
    "data": {"path": "d", "seq_len": 8},
}


def test_times_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(GOOD)
    schedule = read_fault_file(path)
    assert [(e.at_seconds, str(e.fault)) for e in schedule.timed] == [(2.5, "kill-node=0"), (9.0, "add-node")]
    assert [e["fault"] for e in schedule.at_steps] == ["poison,what=nan", "kill-worker=1"]
    assert [e["fault"] for e in schedule.of_the_reference()] == ["poison,what=nan"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a list of faults"),
        ("a: 1", "not a list of faults"),
        ("- 3", "[0]: not a mapping"),
        ("- {at_seconds: 1, fault: kill-worker}", "names no ID"),
        ("- {at_seconds: 1}", "is no fault"),
        ("- {fault: add-node}", "set one of at_step and at_seconds"),
        ("- {at_seconds: 1, at_step: 1, fault: add-node}", "set one of at_step and at_seconds"),
        ("- {at_seconds: -1, fault: add-node}", "at_seconds: expected seconds"),
        ("- {at_seconds: true, fault: add-node}", "at_seconds: expected seconds"),
        ("- {at_seconds: 1, fault: stop}", "ends the job"),
        ('- {at_seconds: 1, fault: "poison,what=nan"}', "give it an at_step"),
        ("- {at_seconds: 1, fault: add-node, wait: true}", "wait: a fault at a time"),
        ("- {at_second: 1, fault: add-node}", "at_second: unknown key"),
        ("- {at_seconds: 1, fault: add-node", "mend the YAML"),
    ],
)
def test_one_clear_line_for_a_bad_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_fault_file(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_fault_file(tmp_path / "none.yaml")


def test_the_reference_is_the_same_job_ended_at_a_step() -> None:
    job = place(parse_job(JOB, "x"), "-reference", [{"at_step": 2, "fault": "poison,what=nan"}])
    ended = until(job, 5)
    assert str(ended.run_dir) == "/r/x-reference"
    assert [(f.at_step, f.fault, f.wait) for f in ended.faults] == [
        (2, "poison,what=nan", False),
        (5, "stop", True),
    ]
    assert until(job, 10) == job  # its own end
    assert [f.fault for f in until(job, 2).faults] == ["stop"]


def test_a_step_that_the_job_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"faults\[0\]\.at_step: 99 is not a step of this job"):
        place(parse_job(JOB, "x"), "-chaos-1", [{"at_step": 99, "fault": "add-node"}])
