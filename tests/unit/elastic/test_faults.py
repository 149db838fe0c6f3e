import pytest

from dataloader.errors import UsageError
from elastic.faults import Fault, FaultKind, parse_fault


@pytest.mark.parametrize(
    "text",
    [
        "kill-worker=0",
        "kill-agent=12",
        "kill-node=3",
        "kill-controller",
        "add-node",
        "stop",
        "freeze-worker=2,during=vote,seconds=4",
        "partition-worker=1,peer=3,way=in,seconds=0.5",
        "clock-jump=1,seconds=-300",
        "poison,what=nan",
    ],
)
def test_text_and_back(text: str) -> None:
    assert str(parse_fault(text)) == text


def test_spaces_and_zeros_are_dropped() -> None:
    assert parse_fault("  kill-worker=007 ") == Fault(FaultKind.KILL_WORKER, 7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "use one of kill-worker=ID"),
        ("kill", "use one of"),
        ("kill-worker", "write kill-worker=ID"),
        ("kill-worker=", "write kill-worker=ID"),
        ("kill-node=-1", "write kill-node=NODE"),
        ("kill-node=\u0663", "write kill-node=NODE"),
        ("kill-agent=a", "write kill-agent=NODE"),
        ("stop=1", "write just stop"),
        ("add-node=", "write just add-node"),
        ("kill-worker=3,during=tea", "during is one of handover, join, plan"),
        ("kill-worker=3,peer=1", "kill-worker takes during only"),
        ("add-node,seconds=1", "add-node takes no options"),
        ("poison", "poison needs what; write poison,what="),
        ("poison,what=salt", "what is one of nan, spike"),
        ("slow-worker=1,factor=0.5", "factor is a number of 1 or more"),
        ("freeze-worker=1,seconds=soon", "seconds=2.5"),
        ("freeze-worker=1,seconds=1,seconds=2", "seconds is there twice"),
        ("partition-worker=1,peer=x", "peer is a worker's ID"),
    ],
)
def test_what_is_wrong_is_said_with_the_cure(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_fault(text)
    assert "\n" not in str(caught.value)
