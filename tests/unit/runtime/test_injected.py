from typing import Any

import pytest

from runtime import actions as a
from runtime.injected import Armed, point_of
from runtime.protocol import Ballot, Frame, FrameKind


def fault(kind: str, during: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "during": during}


def test_a_fault_waits_for_its_point_and_happens_once() -> None:
    armed = Armed()
    assert not armed
    armed.arm(fault("kill-worker", "vote"))
    armed.arm(fault("freeze-worker", "publish"))
    armed.arm(fault("slow-worker"))
    assert armed.due(None) == [fault("slow-worker")]
    assert armed.due("reduce") == []
    assert armed.due("vote") == [fault("kill-worker", "vote")]
    assert armed.due("vote") == []
    assert armed


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        (FrameKind.CONTRIBUTION, "reduce"),
        (FrameKind.RECORD, "vote"),
        (FrameKind.PARAMETERS, "publish"),
        (FrameKind.SNAPSHOT, "handover"),
        (FrameKind.GRADIENT, None),
    ],
)
def test_what_a_worker_is_about_to_send_names_the_point(kind: FrameKind, point: str | None) -> None:
    assert point_of(a.Send(1, Frame(kind, Ballot(1, 1), 0, 0))) == point


def test_other_actions() -> None:
    assert point_of(a.Save(3, ())) == "save"
    assert point_of(a.Compute(0, (1,))) is None
