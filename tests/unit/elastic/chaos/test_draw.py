from collections import Counter
from dataclasses import replace

import pytest

from elastic.chaos.conduct import QUIET_SECONDS, ScheduledFaults, Size
from elastic.chaos.draw import CHANGES_THE_LEDGER, ENDS_THE_JOB, KINDS, TAKES_A_NODE, Among, Entry, aim, draw
from elastic.chaos.standing import Seat, Standing, read_standing
from elastic.faults import Fault, FaultKind, parse_fault

K = FaultKind
FOUR = tuple(Seat(worker, worker // 2, "member") for worker in range(4))
WHOLE = Standing(time=1000.0, state="training", step=5, seats=(*FOUR, Seat(4, 0, "standby")))
SIZE = Size(nodes=2, workers_per_node=2, min_workers=1, logical_ranks=8)


def entry(kind: FaultKind, at: float = 1.0, among: Among = Among.MEMBER, lot: float = 0.0) -> Entry:
    return Entry(at, Fault(kind), among, lot, drawn=True)


# --- drawing -------------------------------------------------------------------------------------------------


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert draw(7, 600.0, 5.0) == draw(7, 600.0, 5.0)
    assert draw(7, 600.0, 5.0) != draw(8, 600.0, 5.0)
    longer = draw(7, 1200.0, 5.0)
    assert [e for e in longer if e.at_seconds < 500] == [e for e in draw(7, 600.0, 5.0) if e.at_seconds < 500]


def test_gaps_have_the_mean_that_was_asked_for_and_kinds_their_weights() -> None:
    seconds, mtbf = 200_000.0, 10.0
    drawn = [e for e in draw(1, seconds, mtbf) if e.fault.kind is not K.ADD_NODE]
    assert len(drawn) == pytest.approx(seconds / mtbf, rel=0.05)
    assert [e.at_seconds for e in drawn] == sorted(e.at_seconds for e in drawn)
    assert drawn[-1].at_seconds < seconds
    weights: Counter[FaultKind] = Counter()
    for weighted in KINDS:
        weights[weighted.kind] += weighted.weight  # type: ignore[assignment]
    for kind, weight in weights.items():
        share = sum(e.fault.kind is kind for e in drawn) / len(drawn)
        assert share == pytest.approx(weight / sum(weights.values()), rel=0.2), kind


def test_what_is_drawn_can_be_written_and_spoils_no_comparison() -> None:
    for drawn in draw(3, 5000.0, 1.0):
        target = None if drawn.among is Among.NAMED or drawn.fault.kind is K.ADD_NODE else 0
        fault = replace(drawn.fault, target=target)
        assert str(parse_fault(str(fault))) == str(fault)
        assert fault.kind not in CHANGES_THE_LEDGER | ENDS_THE_JOB


def test_each_node_that_is_taken_comes_back() -> None:
    drawn = draw(2, 5000.0, 5.0)
    taken = [e.at_seconds for e in drawn if e.fault.kind in TAKES_A_NODE]
    back = [e.at_seconds for e in drawn if e.fault.kind is K.ADD_NODE]
    assert len(taken) == len(back) > 20
    assert all(any(t < b <= t + 14.0 for b in back) for t in taken)


# --- whom it hits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lot", "worker"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.999, 3)])
def test_a_lot_picks_among_the_members(lot: float, worker: int) -> None:
    aimed = aim(entry(K.KILL_WORKER, lot=lot), WHOLE, 0, True)
    assert (str(aimed.fault), aimed.victims) == (f"kill-worker={worker}", (worker,))


def test_a_standby_or_where_there_is_none_a_member() -> None:
    assert str(aim(entry(K.KILL_WORKER, among=Among.STANDBY), WHOLE, 0, True).fault) == "kill-worker=4"
    alone = WHOLE.without([4])
    assert str(aim(entry(K.KILL_WORKER, among=Among.STANDBY, lot=0.9), alone, 0, True).fault) == "kill-worker=3"


def test_a_node_takes_its_members_along_and_the_last_one_is_spared() -> None:
    aimed = aim(entry(K.KILL_NODE, among=Among.NODE, lot=0.7), WHOLE, 0, True)
    assert (str(aimed.fault), aimed.victims) == ("kill-node=1", (2, 3))
    spared = aim(entry(K.KILL_NODE, among=Among.NODE, lot=0.7), WHOLE, 1, False)
    assert (str(spared.fault), spared.victims) == ("kill-worker=2", (2,))


def test_a_node_comes_back_only_for_one_that_was_taken() -> None:
    assert aim(entry(K.ADD_NODE, among=Among.NODE), WHOLE, 0, True).fault is None
    assert aim(entry(K.ADD_NODE, among=Among.NODE), WHOLE, 1, True).fault == Fault(K.ADD_NODE)


def test_nobody_there() -> None:
    assert aim(entry(K.KILL_AGENT, among=Among.NODE), Standing(), 0, True).why_not == "nobody is there"


# --- conducting ----------------------------------------------------------------------------------------------


def test_faults_come_one_after_another_and_the_job_stops_when_it_is_whole_again() -> None:
    plays = ScheduledFaults([entry(K.KILL_WORKER, 1.0, lot=0.3), entry(K.KILL_CONTROLLER, 2.0, Among.NAMED)], 5.0, SIZE)
    assert plays.turn(0.5, WHOLE) is None
    assert str(plays.turn(1.0, WHOLE)) == "kill-worker=1"
    plays.answered("kill-worker=1: injected", 1000.1)
    assert plays.turn(1.5, WHOLE) is None
    assert str(plays.turn(2.0, WHOLE)) == "kill-controller"
    plays.answered("kill-controller: injected", 1001.0)
    assert [i.whole for i in plays.injections] == [True, False]  # the second came before all was quiet
    assert not plays.over(4.0, WHOLE)
    assert not plays.over(6.0, WHOLE)  # the status is older than the last fault
    later = replace(WHOLE, time=1003.0)
    assert not plays.over(7.0, later)  # no step was decided since
    assert not plays.over(7.0, replace(later, step=6, seats=FOUR[:3]))
    assert not plays.over(7.0, replace(later, step=6, without_backup=1))
    assert plays.over(7.0, replace(later, step=6))
    assert plays.stuck == ""


def test_a_job_that_does_not_become_whole_is_given_up_with_the_reason() -> None:
    plays = ScheduledFaults([], 1.0, SIZE)
    waiting = replace(WHOLE, state="waiting", seats=())
    assert not plays.over(1.0, waiting)
    assert plays.over(200.0, waiting)
    assert "still waiting at step 5 with 0 of 4 members" in plays.stuck


def test_a_node_that_was_taken_and_not_given_back_comes_at_the_end() -> None:
    plays = ScheduledFaults([entry(K.KILL_NODE, 1.0, Among.NODE)], 3.0, SIZE)
    assert str(plays.turn(1.0, WHOLE)) == "kill-node=0"
    plays.answered("kill-node=0: injected", 1000.0)
    half = replace(WHOLE, time=1000.0 + 2 * QUIET_SECONDS, seats=FOUR[2:])
    assert plays.turn(2.0, half) is None
    assert not plays.over(3.0, replace(WHOLE, time=1010.0, step=9))
    assert str(plays.turn(3.0, half)) == "add-node"
    plays.answered("add-node: injected", 1003.0)
    assert plays.turn(4.0, half) is None


def test_the_last_member_is_never_drawn_and_what_waits_keeps_its_gaps() -> None:
    two = [entry(K.KILL_WORKER, 1.0), entry(K.KILL_WORKER, 3.0)]
    plays = ScheduledFaults(two, 60.0, SIZE)
    one_left = replace(WHOLE, seats=FOUR[:1])
    assert plays.turn(1.0, one_left) is None
    assert plays.turn(9.0, one_left) is None
    assert str(plays.turn(10.0, WHOLE)) == "kill-worker=0"
    plays.answered("kill-worker=0: injected", 1000.0)
    recovered = replace(WHOLE, time=1002.0)
    assert plays.turn(11.0, recovered) is None  # two seconds after the first, not at once
    assert plays.turn(12.0, recovered) is not None


def test_whoever_was_just_hit_is_not_hit_again() -> None:
    plays = ScheduledFaults([entry(K.KILL_WORKER, 1.0), entry(K.KILL_WORKER, 1.0)], 9.0, SIZE)
    assert str(plays.turn(1.0, WHOLE)) == "kill-worker=0"
    plays.answered("kill-worker=0: injected", 1000.0)
    assert str(plays.turn(1.1, WHOLE)) == "kill-worker=1"


def test_what_time_did_not_allow_is_said() -> None:
    plays = ScheduledFaults([entry(K.KILL_WORKER, 1.0), entry(K.KILL_WORKER, 1.5)], 2.0, SIZE)
    assert plays.turn(2.5, replace(WHOLE, seats=())) is None
    assert [why for _, why in plays.passed_over] == ["too few members were left when the time was over"] * 2


def test_a_file_s_faults_are_played_as_they_stand() -> None:
    plays = ScheduledFaults([Entry(1.0, parse_fault("kill-node=0")), Entry(1.0, parse_fault("kill-node=1"))], 9.0, SIZE)
    assert str(plays.turn(1.0, WHOLE)) == "kill-node=0"
    plays.answered("kill-node=0: injected", 1000.0)
    assert str(plays.turn(1.0, WHOLE)) == "kill-node=1"
    assert plays.injections[0].victims == (0, 1)


def test_an_answer_that_is_none_is_no_injection() -> None:
    plays = ScheduledFaults([entry(K.KILL_WORKER, 1.0)], 9.0, SIZE)
    plays.turn(1.0, WHOLE)
    for answer in ("kill-worker=0: skipped, worker 0 is not there", "the job could not be reached", ""):
        plays.answered(answer, 1000.0)
        assert not plays.injections[-1].done
    plays.answered("kill-worker=0: under way", 1000.0)
    assert plays.injections[-1].done


def test_a_status_of_another_version_fails_nobody() -> None:
    assert read_standing(None) == read_standing({}) == Standing()
    odd = read_standing({"members": [{"id": "x"}, 3, {"id": 1, "node": 0}], "step": "no", "time": None})
    assert odd.seats == (Seat(1, 0, "None"),)
