import dataclasses
import json
from typing import Any, get_args

import pytest

from dataloader.errors import PeerError
from elastic import messages as m
from elastic.wire import (
    KEPT_KINDS,
    PATIENT_KINDS,
    WORKER_KINDS,
    action_from_plain,
    action_to_plain,
    event_from_plain,
    event_to_plain,
    from_worker,
)
from runtime.comm.frames import pack_plain, unpack_plain
from runtime.protocol import (
    Attempt,
    Ballot,
    Certificate,
    Header,
    HoldingReport,
    Member,
    Plan,
    Report,
    ShardPlan,
    StepRecord,
    to_plain,
)

HEADER = Header(0, 1.5, b"d" * 16, 2.5, 100, b"e" * 16)
PLAN = Plan(
    ballot=Ballot(2, 7),
    members=(Member(1, 0), Member(4, 1, joining=True, behind=True)),
    version=3,
    certificate=Certificate(2, (HEADER,), "why", 3, ((4, 1), (4, 2))),
    checkpoint=None,
    shards=(ShardPlan(1, (4,), (4,)),),
    ranks_now=(1, 1),
    ranks_next=(1, 4),
    stop_at=40,
    attempts=(Attempt((HEADER,), (1, 1), (b"f" * 16, b""), "the loss is nan"),),
    history=((2.5, 1.0), (2.25, 1.5)),
)
REPORT = Report(
    ballot=Ballot(2, 8),
    worker=1,
    plan=PLAN,
    step=3,
    bare=False,
    certificate=None,
    previous=Certificate(2, (HEADER,)),
    holdings=(HoldingReport(0, True, 3, (3,)),),
    computed=((0, 1),),
    doubted=(HEADER,),
    doubt="the loss is nan",
    digests=((0, b"g" * 16),),
    history=((2.25, 1.5),),
)
RECORD = StepRecord(
    3, 7, 2, 2, (48, 64), 2048, 2.5, 1.0, 1e-3, "commit", "d", "e", 1.0, 0.5, {"compute": 0.4}, wrong=((4, 1),)
)
INFO = m.WorkerInfo(1, 77, ("127.0.0.1", 4000), {"torch": "2.13"}, "abc", True, 123)

EVENTS: list[m.Event] = [
    m.AgentUp(0, "i", "127.0.0.1", (INFO,), (2, 3)),
    m.AgentBeat(0, "i", 0.0),
    m.WorkerUp(INFO),
    m.WorkerLinked(1),
    m.WorkerExited(1, "SIGKILL", 1.5, "frozen"),
    m.WorkerFailed(1, "why", True),
    m.LinkLost(1, 2, 1.5),
    m.Reported(REPORT),
    m.PlanInstalled(1, Ballot(2, 8), True, 1, 2),
    m.Resumed(1, Ballot(2, 8), 1.5, 10, 20),
    m.Recomputed(1, Ballot(2, 8), 3.5),
    m.ShardFilled(1, Ballot(2, 8), 0, 20, 80),
    m.StepDoubted(1, Ballot(2, 8), 3),
    m.StepsDecided(1, (RECORD,)),
    m.Progress(1, 3, 1, 9),
    m.ShardSaved(1, 4, 0, {"file": "x", "bytes": 3}),
    m.SaveDelayed(1, 4, "full"),
    m.WeightsWritten(1, 4),
    m.WaitingAtGate(1, 4),
    m.Killed(-1, 1.5, 0),
    m.Preempted(0, "i", 29.5, "SIGTERM"),
    m.CheckpointWritten(4),
]
ACTIONS: list[Any] = [
    m.WelcomeAgent(0, 3),
    m.StartWorker(0, 5),
    m.KillWorker(0, 5, True),
    m.Freeze(0, -1, 2.5, True),
    m.Thaw(0, 5),
    m.PreemptAgent(0, 10.0),
    m.CutAgent(0, 2.5),
    m.JumpClock(0, -3600.0),
    m.ToWorker(0, 5, {"kind": "plan", "plan": to_plain(PLAN)}),
]


def test_every_event_is_covered() -> None:
    made_at_the_controller = {m.AgentDown, m.FaultRequested, m.CannotGoOn, m.Tick, m.Told}
    assert {type(event) for event in EVENTS} == set(get_args(m.Event)) - made_at_the_controller


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_come_back_as_they_were(event: m.Event) -> None:
    over_the_socket = unpack_plain(pack_plain(event_to_plain(event)))
    assert event_from_plain(over_the_socket) == event


@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: type(a).__name__)
def test_actions_come_back_as_they_were(action: Any) -> None:
    assert action_from_plain(unpack_plain(pack_plain(action_to_plain(action)))) == action


def test_maps_get_string_keys_at_any_depth() -> None:
    message = {"kind": "x", "deep": [{3: {4: (5, 6)}}], "record": RECORD}
    plain = action_to_plain(m.ToWorker(0, 1, message))
    assert plain["message"]["deep"] == [{"3": {"4": [5, 6]}}]
    assert plain["message"]["record"]["samples"] == [48, 64]
    json.dumps(plain)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({}, "None is no event"),
        ({"kind": "Nonsense"}, "'Nonsense' is no event"),
        ({"kind": ["LinkLost"]}, "is no event"),
        ({"kind": "Tick"}, "'Tick' is no event"),
        ({"kind": "StartWorker", "slot": 0, "worker": 1}, "is no event"),
        ({"kind": "LinkLost", "worker": 1}, "malformed event LinkLost"),
        ({"kind": "WorkerLinked", "worker": 1, "more": 1}, "malformed event WorkerLinked"),
        ({"kind": "WorkerUp", "info": {"worker": 1}}, "malformed event WorkerUp"),
        ({"kind": "WorkerUp", "info": 3}, "malformed event WorkerUp"),
        ({"kind": "Resumed", "worker": 1, "ballot": 3, "time": 0.0}, "malformed event Resumed"),
        ({"kind": "Reported", "report": {"plan": []}}, "malformed event Reported"),
    ],
)
def test_what_is_no_event_is_a_peer_error(plain: dict[str, Any], says: str) -> None:
    with pytest.raises(PeerError, match=says) as caught:
        event_from_plain(plain)
    assert "\n" not in str(caught.value)


def test_a_worker_is_named_by_its_agent() -> None:
    assert from_worker(5, {"kind": "WorkerLinked"}) == {"kind": "WorkerLinked", "worker": 5}
    told_by_another = {"kind": "LinkLost", "worker": 2, "peer": 3, "time": 0.0}
    assert from_worker(5, told_by_another) == told_by_another
    assert from_worker(5, {"kind": "CheckpointWritten", "version": 0}) == {"kind": "CheckpointWritten", "version": 0}


@pytest.mark.parametrize("kind", ["AgentUp", "AgentDown", "WorkerExited", "Killed", "FaultRequested", "Tick", 7, None])
def test_a_worker_may_not_say_what_its_agent_says(kind: Any) -> None:
    with pytest.raises(PeerError, match="no worker may"):
        from_worker(5, {"kind": kind})


def test_the_sets_of_kinds_name_events() -> None:
    names = {cls.__name__ for cls in get_args(m.Event)}
    assert names >= WORKER_KINDS | KEPT_KINDS | PATIENT_KINDS
    assert all(dataclasses.is_dataclass(cls) for cls in get_args(m.Event))
