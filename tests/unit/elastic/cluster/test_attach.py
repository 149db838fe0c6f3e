"""What is refused before Ray is brought in."""

import json
from pathlib import Path

import pytest

from dataloader.errors import UsageError
from elastic.cluster.attach import inject
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
