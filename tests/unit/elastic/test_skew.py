"""Times of hosts whose wall clocks are off."""

from __future__ import annotations

from elastic import messages as m
from elastic.skew import AGREE, Skews


def skews(*ahead_and_took: tuple[float, float]) -> Skews:
    """`ahead_and_took`: seconds that the clock of slot 1 is ahead, and that the beat took."""
    known = Skews()
    for number, (ahead, took) in enumerate(ahead_and_took):
        known.beat(1, "a", 1000.0 + number + ahead, 1000.0 + number + took)
    return known


def test_the_fastest_beat_tells_how_far_a_clock_is_off() -> None:
    known = skews((3600.0, 0.4), (3600.0, 0.01), (3600.0, 1.2))
    exited = m.WorkerExited(3, "SIGKILL", 8600.0)
    assert known.righted(m.Told(1, exited)) == m.WorkerExited(3, "SIGKILL", 8600.0 - 3600.0 + 0.01)


def test_clocks_that_agree_are_left_as_they_are() -> None:
    known = skews((0.1, 0.02), (0.1, 1.0))
    exited = m.WorkerExited(3, "SIGKILL", 1000.0)
    assert known.righted(m.Told(1, exited)) is exited


def test_a_slow_beat_alone_makes_no_skew() -> None:
    assert skews((0.0, 2.0), (0.0, 0.001)).seconds(1) == 0.0


def test_a_clock_that_is_set_back_is_noticed_when_some_beats_agree() -> None:
    before = [(0.0, 0.01)] * 30
    assert skews(*before, *[(-60.0, 0.01)] * (AGREE - 1)).seconds(1) == 0.0
    assert round(skews(*before, *[(-60.0, 0.01)] * AGREE).seconds(1), 6) == 60.01


def test_beats_that_are_late_each_in_its_own_way_make_no_skew() -> None:
    assert skews((0.0, 0.01), (0.0, 3.0), (0.0, 1.0), (0.0, 2.0)).seconds(1) == 0.0


def test_the_next_agent_of_a_slot_may_be_on_another_host() -> None:
    known = skews((3600.0, 0.0))
    known.beat(1, "b", 1001.0, 1001.01)
    assert known.seconds(1) == 0.0


def test_times_of_other_hosts_stay_as_they_are() -> None:
    """Also where one tells of another's worker: who stamps is who tells."""
    known = skews((3600.0, 0.0))
    lost = m.LinkLost(3, 4, 5.0)
    assert known.righted(m.Told(0, lost)) is lost
    assert known.righted(m.Told(1, lost)) == m.LinkLost(3, 4, 5.0 - 3600.0)
    tick = m.Tick()
    assert known.righted(m.Told(1, tick)) is tick


def test_exits_that_an_agent_tells_when_it_introduces_itself() -> None:
    up = skews((100.0, 0.0)).righted(m.Told(1, m.AgentUp(1, "a", "there", exited=(m.Exit(3, "SIGKILL", 1100.0, 7),))))
    assert isinstance(up, m.AgentUp)
    assert [exit.time for exit in up.exited] == [1000.0]
