"""Every scenario goes as its file says. After a change that is meant: python -m tests.scenarios --regenerate."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataloader.errors import DataError, UsageError
from elastic.faults import Point, parse_fault
from tests.scenarios.play import played, scenarios, transcript
from tests.scenarios.script import read
from tests.sim.bugs import planted

SIZES = "4 workers on 2 nodes, 8 logical ranks, 4 shards, 3 steps\n"


@pytest.mark.parametrize("path", scenarios(), ids=lambda path: path.stem)
def test_a_scenario_goes_as_its_file_says(path: Path) -> None:
    text = path.read_text()
    now = played(text)
    assert "VIOLATION" not in now
    for entry in read(text).schedule:
        assert any(line.startswith("fault ") and entry.fault in line for line in now.splitlines()), entry.fault
    assert now == text, f"see what is different: python -m tests.scenarios {path.name} --regenerate; git diff"


def test_there_is_a_kill_at_every_point() -> None:
    faults = [parse_fault(entry.fault) for path in scenarios() for entry in read(path.read_text()).schedule]
    assert {fault.during for fault in faults} >= set(Point)


def test_the_same_step_has_the_same_digest_whatever_happens() -> None:
    ways = [transcript(read(SIZES)), transcript(read(SIZES + "at step 1: kill-worker=3,during=vote"))]
    digests = [[line.split("digest ")[1][:6] for line in way if "digest " in line] for way in ways]
    assert len(digests[0]) == 3
    assert digests[0] == digests[1]


def test_a_transcript_changes_when_the_protocol_does() -> None:
    script = read(SIZES + "at step 1: kill-controller")
    before = transcript(script)
    with planted("numbers-repeated"):
        assert transcript(script) != before


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("4 workers on 2 nodes, 8 logical ranks, 4 shards", DataError, "how many workers"),
        ("3 workers on 2 nodes, 8 logical ranks, 4 shards, 3 steps", DataError, "same number on each"),
        (SIZES + "kill-worker=3", DataError, "write: at step 2"),
        (SIZES + "at step 1: kill-wrker=3", UsageError, "is no fault"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_one_line(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read(text)
