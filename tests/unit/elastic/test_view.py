import io
from collections.abc import Callable

import pytest
from rich.console import Console

from elastic.record_lines import record_to_json
from elastic.view import RunView, event_line, record_line
from runtime.protocol import StepRecord

Make = Callable[..., StepRecord]


def picture(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_shows_where_the_run_stands(step_record: Make) -> None:
    view = RunView("small", 40)
    for step in range(5):
        view.record(record_to_json(step_record(step)))
    member = {"id": 3, "node": 1, "role": "worker", "pid": 9, "logical_ranks": [0, 1, 2, 6], "optimizer_bytes": 9.4e6}
    view.status({"state": "running", "generation": 2, "members": [member]})
    view.event({"kind": "fault_injected", "fault": "stop"})
    view.event({"kind": "fault_detected", "worker": 1})
    text = picture(view)
    for part in ("small", "5/40 steps", "loss 7.6000", "4,096 tokens/s", "generation 2", "1 fault", "0-2 6", "9.4 MB"):
        assert part in text


def test_an_end_that_is_followed_by_more_is_none() -> None:
    view = RunView("small", 40)
    view.event({"kind": "run_ended", "state": "stopped"})
    assert view.ended is not None
    view.event({"kind": "plan"})
    assert view.ended is None


def test_lines(step_record: Make) -> None:
    line = record_line(record_to_json(step_record(3)), 40)
    assert "step  3 of 40  loss 7.7000  grad 1.500  lr 1.00e-03  4,096 tokens/s  4 workers  generation 1" in line
    recovery = {
        "time": 5.0,
        "kind": "recovery",
        "step": 3,
        "generation": 2,
        "detect_ms": 21.3,
        "pause_ms": 33.0,
        "recomputed": 2,
        "recompute_ms": 100.0,
        "bytes_moved": 0,
        "links_opened": 0,
        "links_closed": 3,
    }
    assert (
        "recovery in step 3: noticed after 21 ms, survivors paused 33 ms, "
        "2 micro-batches recomputed, 0 B moved, links +0 -3" in event_line(recovery)
    )
    assert event_line({"kind": "run_ended", "state": "failed", "reason": "no disk"}).endswith(
        "run ended: failed: no disk"
    )
    done = {"kind": "run_ended", "state": "done", "reason": "4 steps", "faults": 0}
    assert event_line(done).endswith("run ended: done: 4 steps; 0 faults")
    assert event_line({**done, "faults": 1}).endswith("; 1 fault")
    moved = {"kind": "rebalance", "step": 9, "from": {"3": 3, "10": 3, "1": 2}, "to": {"3": 1, "10": 5, "1": 2}}
    moved |= {"slowness": {"3": 2.96, "10": 0.5}, "step_seconds": 1.881, "predicted_seconds": 0.8771}
    assert event_line(moved).endswith(
        "rebalance at step 9: logical ranks of worker 3 (3 x slower) 3 -> 1, worker 10 (2 x faster) 3 -> 5; "
        "a step 1.88 -> 0.877 s expected"
    )
    gain = {"kind": "rebalance_gain", "step": 16, "before_seconds": 1.881, "predicted_seconds": 0.8771}
    assert event_line(gain | {"after_seconds": 0.8926, "gain": 0.5255}).endswith(
        "rebalance gain at step 16: a step 1.88 -> 0.893 s (0.877 s expected), 53% less"
    )
    injected = {"time": 5.0, "kind": "fault_injected", "step": 3, "generation": 1, "fault": "stop", "worker": None}
    assert event_line(injected).endswith("fault injected at step 3: stop")


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"step": "x", "kind": None, "time": "now"},
        {"time": 1e300, "loss": None, "members": 3, "state": []},
        {"kind": "recovery"},
        {"kind": "recovery", "pause_ms": "long", "bytes_moved": None, "detect_ms": None},
        {"kind": "plan", "members": [[1], {"a": {}}], "x": 1e-9},
        {"kind": "rebalance"},
        {"kind": "rebalance", "from": {"1": 2, 3: None}, "to": [1], "slowness": {"1": "much"}, "step_seconds": "long"},
        {"kind": "rebalance_gain", "gain": None},
        {"loss": "nan", "step": 3, "seconds": "inf", "tokens": -1, "generation": None},
        {"members": [{}, 3, {"logical_ranks": "all", "optimizer_bytes": "much"}]},
    ],
)
def test_half_filled_lines_are_shown_somehow(line: dict[str, object]) -> None:
    view = RunView("small", 0)
    view.record(line)
    view.event(line)
    view.status(line)
    assert picture(view)
    assert record_line(line, 40)
    assert event_line(line)
