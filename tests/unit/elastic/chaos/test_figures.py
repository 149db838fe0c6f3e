from dataclasses import replace
from typing import Any

import pytest

from elastic.audit import Check, Comparison, Difference
from elastic.chaos.conduct import Injection
from elastic.chaos.figures import by_kind, disturbances, percentile, tokens_per_second
from elastic.chaos.promises import constant_batch, exactly_once, no_single_point, no_step_lost, nothing_left, same_bits
from elastic.chaos.table import faults_table, milliseconds, show, size
from elastic.watch import Outcome
from runtime.protocol import StepRecord

RECORD = StepRecord(0, 1, 4, 2, (0, 4), 32, 5.0, 1.0, 1e-3, "commit", "0" * 32, "0" * 32, 100.0, 0.5)


def event(time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, **fields}


def injected(time: float, fault: str, *victims: int, whole: bool = True) -> Injection:
    return Injection(0.0, fault, fault.partition("=")[0], time, f"{fault}: injected", victims, whole)


def test_each_fault_and_what_it_cost() -> None:
    events = [
        event(10.0, "fault_injected", fault="kill-worker=1"),
        event(10.02, "fault_detected", worker=1),
        event(
            10.5, "recovery", workers=[1], detect_ms=8.5, pause_ms=30.0, recomputed=3, bytes_moved=10, rollback=False
        ),
        event(20.0, "fault_injected", fault="kill-controller"),
        event(22.5, "plan", reason="new controller", rollback=False),
        event(30.0, "fault_injected", fault="kill-node=1"),
        event(30.1, "fault_injected", fault="kill-worker=0"),
        event(31.0, "recovery", workers=[0, 2, 3], detect_ms=None, pause_ms=100.0, recomputed=5, bytes_moved=0),
        event(40.0, "fault_injected", fault="stop"),
    ]
    asked = [
        injected(9.99, "kill-worker=1", 1),
        injected(20.0, "kill-controller"),
        injected(30.0, "kill-node=1", 2, 3),
        injected(30.1, "kill-worker=0", 0, whole=False),
        injected(35.0, "kill-worker=3", 3),  # which the controller passed over
    ]
    worker, controller, node, second = disturbances(events, asked)
    assert (worker.detect_ms, worker.pause_ms, worker.recomputed, worker.replaced_ms) == (8.5, 30.0, 3, 500.0)
    assert (controller.detected, controller.detect_ms) == (True, 2500.0)
    assert (node.detected, node.pause_ms, node.recomputed) == (True, 100.0, 5)
    assert (second.detected, second.pause_ms, second.whole) == (False, None, False)  # it fell into the node's

    rows = {row.kind: row for row in by_kind([worker, controller, node, second])}
    assert list(rows) == ["kill-worker", "kill-node", "kill-controller"]
    assert (rows["kill-worker"].count, rows["kill-worker"].hit, rows["kill-worker"].detected) == (2, 2, 1)
    assert rows["kill-worker"].pause_ms == (30.0, 30.0)


def test_a_fault_of_the_job_file_counts_too() -> None:
    (found,) = disturbances([event(1.0, "fault_injected", fault="kill-worker=2", index=0)], [])
    assert (found.victims, found.detected) == ((2,), False)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 201)), 0.99) == 198
    assert percentile([5.0], 0.99) == 5.0


def test_speed_is_over_what_lies_between_the_first_and_the_last_step() -> None:
    records = [replace(RECORD, step=n, time=100.0 + 2 * n) for n in range(4)]
    assert tokens_per_second(records) == pytest.approx(16.0)
    assert tokens_per_second(records[:1]) is None


# --- promises ------------------------------------------------------------------------------------------------


def test_same_bits() -> None:
    assert same_bits(Comparison(5, (5, 5), None)).kept
    assert same_bits(Comparison(5, (5, 9), None)).proof == "all 5 steps equal the undisturbed run's"
    assert "5 of 9" in same_bits(Comparison(5, (9, 5), None)).proof
    broken = same_bits(Comparison(5, (5, 5), Difference(3, "digest", "a", "b")))
    assert broken.finding == "step 3 differs in digest: a here, b undisturbed"


def test_the_audit_s_checks_are_two_promises() -> None:
    checks = [
        Check("steps in order, none lost"),
        Check("samples [t*4, (t+1)*4)", "step 2: x"),
        Check("tokens per step"),
    ]
    assert exactly_once(checks).kept
    assert constant_batch(checks).finding == "samples [t*4, (t+1)*4): step 2: x"


def test_a_rollback_is_a_breach_only_where_one_worker_was_lost_alone() -> None:
    def found(*asked: Injection, lost: list[int]) -> Any:
        events = [event(i.time, "fault_injected", fault=i.fault) for i in asked]
        events.append(event(asked[-1].time + 1, "recovery", workers=lost, pause_ms=1.0, rollback=True))
        return disturbances(events, asked)

    alone = found(injected(10.0, "kill-worker=1", 1), lost=[1])
    assert "cost a rollback" in str(no_step_lost(alone, 1).finding)
    assert no_step_lost(found(injected(10.0, "kill-worker=1", 1, whole=False), lost=[1]), 1).kept
    assert no_step_lost(found(injected(10.0, "kill-node=1", 1), lost=[1]), 1).kept
    pair = found(injected(10.0, "kill-worker=1", 1), injected(11.0, "kill-worker=2", 2), lost=[1, 2])
    assert no_step_lost(pair, 1).kept


def test_the_end_and_what_is_left() -> None:
    assert no_single_point(Outcome("done", "", 0), "", []).kept
    assert no_single_point(Outcome("failed", "it broke", 3), "", []).finding == "the job failed: it broke"
    assert no_single_point(Outcome("stopped", "", 130), "still waiting", []).finding == "still waiting"
    assert nothing_left([], 9).kept
    assert nothing_left(["port 1", "process 2"], 9).finding == "port 1 and 1 more"


# --- looks ---------------------------------------------------------------------------------------------------


def test_the_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        event(10.0, "fault_injected", fault="kill-worker=1"),
        event(10.5, "recovery", workers=[1], detect_ms=8.4, pause_ms=30.0, recomputed=3, bytes_moved=2048),
    ]
    show(faults_table(by_kind(disturbances(events, [injected(9.99, "kill-worker=1", 1)]))))
    out = capsys.readouterr().out
    assert out.split("\n")[1].split() == [
        "fault",
        "count",
        "detected",
        "detect",
        "p50/p99",
        "pause",
        "p50/p99",
        "recomputed",
        "moved",
    ]
    assert " ".join(out.split("\n")[2].split()) == "kill-worker 1 1 of 1 8 / 8 ms 30 / 30 ms 3 2.0 KB"
    assert "\x1b" not in out


def test_figures_as_text() -> None:
    assert milliseconds((12.0, 340.4)) == "12 / 340 ms"
    assert milliseconds((900.0, 12_000.0)) == "0.9 / 12.0 s"
    assert (size(0), size(1500), size(2e9)) == ("0 B", "1.5 KB", "2.0 GB")
