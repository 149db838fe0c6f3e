"""The watch over the controller, with processes that stand for it and a clock that is moved."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster import pulse


class Answers:
    """What stands for Ray: a call is answered or not."""

    def __init__(self, pid: int) -> None:
        self.pid, self.answered = pid, True
        self.exceptions = SimpleNamespace(RayError=OSError)

    def remote(self) -> str:
        return "a call"

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (calls, []) if self.answered else ([], calls)

    def get(self, call: Any) -> tuple[str, int]:
        return "here", self.pid

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def watched(answers: Answers, seconds: float, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> pulse.Pulse:
    monkeypatch.setattr(pulse, "ray", answers)
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    watch = pulse.Pulse()
    controller = SimpleNamespace(ping=answers)
    for tick in range(round(seconds * 10)):
        now[0] += 0.1
        answers.answered = tick < 10
        watch.look(controller)
    return watch


def test_a_controller_that_does_not_answer_is_killed(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(Answers(sleeper.pid), 1.0 + pulse.SILENT_SECONDS - 0.6, monkeypatch, [0.0])
    assert sleeper.poll() is None
    watched(Answers(sleeper.pid), 2.0 + pulse.SILENT_SECONDS, monkeypatch, [0.0])
    assert sleeper.wait(timeout=10) == -9
    assert "the controller has been silent for 3.0 s; killed" in capsys.readouterr().err


def test_of_one_that_is_being_started_again_nothing_is_said(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    answers = Answers(sleeper.pid)
    watch = watched(answers, 1.0, monkeypatch, now)
    sleeper.kill()
    sleeper.wait()
    answers.answered = False
    for _ in range(100):
        now[0] += 0.1
        watch.look(SimpleNamespace(ping=answers))
    assert capsys.readouterr().err == ""
