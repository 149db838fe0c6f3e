import pytest

from elastic.detector import (
    AGENT_SILENT_SECONDS,
    ALLOWANCE_SECONDS,
    FROZEN_SECONDS,
    HUNG_SECONDS,
    LONGEST_TURN_SECONDS,
    STUCK_LEAST_SECONDS,
    AgentWatch,
    AwakeClock,
    Seen,
    Suspicion,
    WorkerWatch,
)


def watched(seconds: float, state: str, cpu_share: float, watch: WorkerWatch) -> Suspicion | None:
    """It says nothing for so long, looked at ten times a second."""
    suspicion = None
    for tick in range(1, round(seconds * 10) + 1):
        now = tick / 10
        if watch.wants_a_look(now):
            suspicion = suspicion or watch.judge(now, Seen(state, now * cpu_share))
    return suspicion


def beating(busy: float = 0.0, usual: float = 0.1) -> WorkerWatch:
    watch = WorkerWatch(0.0)
    watch.beat(0.0, busy, usual)
    return watch


def test_a_stopped_worker_is_found_at_once() -> None:
    suspicion = watched(FROZEN_SECONDS + 0.2, "T", 0.0, beating())
    assert suspicion is not None
    assert suspicion.kind == "frozen"
    assert "silent for 0." in suspicion.reason


def test_also_before_its_first_beat() -> None:
    assert watched(1.0, "T", 0.0, WorkerWatch(0.0)) is not None


def test_a_worker_that_beats_is_not_looked_at() -> None:
    watch = beating()
    for tick in range(100):
        watch.beat(tick / 10, 0.05, 0.1)
        assert not watch.wants_a_look(tick / 10 + 0.1)


@pytest.mark.parametrize(("state", "cpu_share"), [("R", 0.0), ("S", 1.0), ("D", 0.2)])
def test_silent_but_at_work_is_not_hung(state: str, cpu_share: float) -> None:
    """A long call in the control thread, or a machine that gives it no turn."""
    assert watched(10 * HUNG_SECONDS, state, cpu_share, beating()) is None
    assert watched(ALLOWANCE_SECONDS + 1, state, cpu_share, beating()) is not None


def test_silent_and_idle_is_hung() -> None:
    assert watched(HUNG_SECONDS - 1, "S", 0.0, beating()) is None
    suspicion = watched(HUNG_SECONDS + FROZEN_SECONDS + 0.3, "S", 0.0, beating())
    assert suspicion is not None
    assert suspicion.kind == "hung"


def test_a_start_may_wait_for_anything() -> None:
    assert watched(10 * HUNG_SECONDS, "S", 0.0, WorkerWatch(0.0)) is None


def test_a_slow_store_may_be_waited_for_if_that_was_said() -> None:
    watch = beating()
    watch.beat(0.0, 0.0, 0.1, may_wait=True)
    assert watched(10 * HUNG_SECONDS, "D", 0.0, watch) is None
    watch.beat(10 * HUNG_SECONDS, 0.0, 0.1)
    assert watch.judge(10 * HUNG_SECONDS + 1.0, Seen("S", 0.0)) is None


def stuck(busy: float, usual: float, cpu_share: float = 0.0) -> Suspicion | None:
    """Its control thread beats all the while."""
    watch, suspicion = WorkerWatch(0.0), None
    for tick in range(round(busy * 10)):
        now = tick / 10
        watch.beat(now, now, usual)
        if watch.wants_a_look(now):
            suspicion = suspicion or watch.judge(now, Seen("S", now * cpu_share))
    return suspicion


def test_a_micro_batch_that_never_ends_with_an_idle_processor() -> None:
    assert stuck(STUCK_LEAST_SECONDS, 0.1) is None
    found = stuck(2 * STUCK_LEAST_SECONDS + 1, 0.1)
    assert found is not None
    assert found.kind == "stuck"
    assert "0.10 s at most before" in found.reason


def test_the_deadline_is_learned() -> None:
    assert stuck(20.0, usual=2.5) is None  # ten times 2.5 s are not over
    assert stuck(35.0, usual=2.5) is not None


def test_while_nothing_is_known_an_allowance_holds() -> None:
    assert stuck(100.0, usual=0.0) is None
    assert stuck(ALLOWANCE_SECONDS + 10, usual=0.0) is not None


def test_a_processor_at_work_is_a_reason_to_wait() -> None:
    assert stuck(100.0, usual=0.1, cpu_share=0.9) is None


def test_the_clock_stands_still_while_the_watcher_does() -> None:
    clock = AwakeClock()
    assert clock.advance(100.0) == 0.0
    assert clock.advance(100.1) == pytest.approx(0.1)
    assert clock.advance(500.0) == pytest.approx(0.1 + LONGEST_TURN_SECONDS)
    assert clock.advance(499.0) == pytest.approx(0.1 + LONGEST_TURN_SECONDS)


def test_a_silent_agent_is_told_from_one_that_beats() -> None:
    watch = AgentWatch()
    assert not watch
    for tick in range(20):
        now = tick / 4
        watch.beat("a", now)
        if tick < 4:
            watch.beat("b", now)
        silent = watch.silent(now)
        assert silent == (["b"] if now - 0.75 >= AGENT_SILENT_SECONDS else [])
    watch.forget("b")
    assert watch.silent(5.0) == []


def test_a_controller_that_was_stopped_finds_nobody_silent() -> None:
    watch = AgentWatch()
    watch.beat("a", 0.0)
    assert watch.silent(100.0) == []
    watch.beat("a", 100.0)
    assert watch.silent(100.4) == []
