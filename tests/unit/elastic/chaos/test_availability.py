import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataloader.errors import DataError, UsageError
from elastic.chaos.availability import Availability, compress, parse_trace, read_trace
from elastic.chaos.follow_trace import COMING_PATIENCE_SECONDS, TraceFollower, lot
from elastic.chaos.standing import Seat, Standing

GOOD: dict[str, Any] = {
    "gap_seconds": 300,
    "ticks": 20,
    "capacity": 16,
    "changes": [[0, 0], [3, 10], [5, 16], [10, 1], [12, 0], [15, 2]],
}


def test_a_trace_is_scaled_and_compressed() -> None:
    there = compress(parse_trace(GOOD, "t"), 0.5, 4)
    assert there.pieces == ((0.0, 3), (1.0, 4), (3.5, 1), (4.5, 0), (6.0, 1))
    assert (there.seconds, there.first, there.peak, there.times_none) == (8.5, 3, 4, 1)
    assert [there.at(t) for t in (0.0, 0.99, 1.0, 4.4, 4.5, 6.0, 99.0)] == [3, 3, 4, 1, 0, 1, 1]
    assert there.node_seconds() == pytest.approx(3 + 4 * 2.5 + 1 + 0 + 2.5)
    assert there.until(2.0).node_seconds() == pytest.approx(3 + 4)


def test_as_many_nodes_as_the_trace_has() -> None:
    assert compress(parse_trace(GOOD, "t"), 1.0, None).peak == 16


def test_changes_that_scaling_takes_away_are_none() -> None:
    given = {**GOOD, "changes": [[0, 9], [1, 10], [2, 8], [3, 12]]}
    assert compress(parse_trace(given, "t"), 1.0, 2).pieces == ((0.0, 2), (2.0, 1), (3.0, 2))


def test_a_part_of_it() -> None:
    part = parse_trace(GOOD, "t").part(4, 11)
    assert (part.ticks, part.changes) == (7, ((0, 10), (1, 16), (6, 1)))
    assert parse_trace({**GOOD, "changes": [[5, 1]]}, "t").part(2, 7).changes == ((3, 1),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ticks": 0}, "ticks: expected a whole number of at least 1, got 0"),
        ({"ticks": None}, "ticks: expected a whole number of at least 1, got nothing"),
        ({"capacity": "16"}, "capacity: expected a whole number"),
        ({"gap_seconds": -1}, "gap_seconds: expected seconds"),
        ({"changes": []}, "changes: expected a list of [tick, nodes]"),
        ({"changes": {"0": 1}}, "changes: expected a list of [tick, nodes]"),
        ({"changes": [[0, 1], [2]]}, "changes[1]: expected [tick, nodes], got [2]"),
        ({"changes": [[0, 1], [0, 2]]}, "changes[1]: tick 0 comes after tick 0; ticks go up"),
        ({"changes": [[0, 17]]}, "17 nodes are more than the capacity of 16"),
        ({"changes": [[0, -1]]}, "changes[0]: nodes: expected a whole number"),
        ({"changes": [[0, 1.5]]}, "changes[0]: nodes: expected a whole number"),
        ({"changes": [[20, 1]]}, "tick 20 is none of the trace's 20 ticks"),
    ],
)
def test_one_clear_line_for_a_bad_trace(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(DataError) as error:
        read_trace(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[1]", "not a JSON object"), ("\x00", "not JSON")])
def test_what_is_no_trace(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_trace(path)
    with pytest.raises(DataError, match="can't be read"):
        read_trace(tmp_path / "none.json")


def test_never_a_node() -> None:
    with pytest.raises(UsageError, match="no node at any time"):
        compress(parse_trace({**GOOD, "changes": [[0, 0]]}, "t"), 1.0, None)


def test_the_shared_trace() -> None:
    shared = Path(os.environ.get("EVERSTEP_SHARED_DATA", Path(__file__).parents[5] / "shared" / "data"))
    path = shared / "spot_traces" / "aws_us-west-2c_16xV100_2023-08.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    there = compress(read_trace(path), 0.1, 8)
    assert (there.peak, there.times_none > 50) == (8, True)


# --- following it --------------------------------------------------------------------------------------------


def on(*nodes: int, step: int = 1, state: str = "training") -> Standing:
    return Standing(time=0.0, state=state, step=step, seats=tuple(Seat(10 + n, n, "member") for n in nodes))


def told(follower: TraceFollower, now: float, standing: Standing) -> list[str]:
    """All that it asks for now."""
    said: list[str] = []
    while (fault := follower.turn(now, standing)) is not None:
        follower.answered(f"{fault}: injected", now)
        said.append(str(fault))
        assert len(said) < 20
    return said


def test_nodes_come_and_go_as_the_trace_says() -> None:
    follower = TraceFollower(Availability(((0.0, 2), (5.0, 4), (9.0, 0), (12.0, 1)), 20.0), 0.0)
    assert told(follower, 1.0, on(0, 1)) == []
    assert told(follower, 5.0, on(0, 1)) == ["add-node", "add-node"]
    assert told(follower, 5.2, on(0, 1)) == []  # they are on the way
    assert told(follower, 6.0, on(0, 1, 2)) == []
    assert told(follower, 7.0, on(0, 1, 2, 3)) == []
    assert sorted(told(follower, 9.0, on(0, 1, 2, 3))) == [f"kill-node={n}" for n in range(4)]
    assert told(follower, 9.1, on(0, 1, 2, 3)) == []  # the status is late
    assert told(follower, 12.0, on()) == ["add-node"]
    assert not follower.over(19.0, on(4))
    assert not follower.over(20.0, on(4))
    assert follower.over(21.0, on(4, step=2))


def test_a_node_that_comes_too_late_goes_at_once() -> None:
    follower = TraceFollower(Availability(((0.0, 1), (5.0, 3), (6.0, 1)), 20.0), 0.0)
    told(follower, 1.0, on(0))
    assert told(follower, 5.0, on(0)) == ["add-node", "add-node"]
    assert told(follower, 6.0, on(0)) == []
    went = told(follower, 8.0, on(0, 1))
    assert went == [f"kill-node={min((0, 1), key=lot)}"]
    assert len(told(follower, 9.0, on(0, 1, 2))) == 1


def test_a_node_that_never_comes_is_asked_for_again() -> None:
    follower = TraceFollower(Availability(((0.0, 2),), 300.0), 0.0)
    assert told(follower, 1.0, on(0)) == ["add-node"]
    assert told(follower, 1.0 + COMING_PATIENCE_SECONDS, on(0)) == []
    assert told(follower, 2.0 + COMING_PATIENCE_SECONDS, on(0)) == ["add-node"]


def test_a_notice_beforehand() -> None:
    follower = TraceFollower(Availability(((0.0, 2), (5.0, 1), (6.0, 2)), 9.0), 2.5)
    assert told(follower, 2.4, on(0, 1)) == []
    goes, stays = sorted((0, 1), key=lot)
    assert told(follower, 2.5, on(0, 1)) == [f"preempt-node={goes},seconds=2.5"]
    assert told(follower, 5.5, on(stays)) == []
    assert told(follower, 6.1, on(stays)) == ["add-node"]


def test_the_end_on_no_node_and_a_job_that_stands_still() -> None:
    ends_empty = TraceFollower(Availability(((0.0, 1), (5.0, 0)), 9.0), 0.0)
    assert ends_empty.over(9.0, on())
    follower = TraceFollower(Availability(((0.0, 1),), 9.0), 0.0)
    waiting = replace(on(0), state="waiting")
    assert not follower.over(9.0, waiting)
    assert follower.over(300.0, waiting)
    assert "still waiting at step 1" in follower.stuck
