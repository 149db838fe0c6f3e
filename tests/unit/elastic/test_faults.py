import pytest

from dataloader.errors import UsageError
from elastic.faults import Fault, FaultKind, parse_fault


@pytest.mark.parametrize(
    "text", ["kill-worker=0", "kill-agent=12", "kill-node=3", "kill-controller", "add-node", "stop"]
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
    ],
)
def test_what_is_wrong_is_said_with_the_cure(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_fault(text)
    assert "\n" not in str(caught.value)
