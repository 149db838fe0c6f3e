import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dataloader.errors import HostError
from elastic import job as job_process
from elastic.cluster.session import Ended
from elastic.config import load_job
from elastic.record_lines import read_events
from elastic.records import EventLog
from elastic.rundir import RunDirectory, claim, hold

Live = Any


@pytest.fixture
def run(job_file: Path) -> RunDirectory:
    job = load_job(job_file)
    prepared = RunDirectory(job.run_dir)
    with claim(prepared, job, resume=False):
        pass
    return prepared


@pytest.fixture(autouse=True)
def handlers() -> Any:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def live(monkeypatch: pytest.MonkeyPatch, outcome: Ended | BaseException) -> None:
    def lived(*_: object) -> Ended:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(job_process, "_live", lived)


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 3), ("stopped", 130)])
def test_the_end_is_written_down_and_is_the_exit_code(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    live(monkeypatch, Ended(state, "because"))
    assert job_process.main([str(run.path)]) == code
    (event,) = read_events(run.events)
    assert (event["kind"], event["state"], event["reason"], event["step"]) == ("run_ended", state, "because", 0)
    assert capsys.readouterr().err == ("everstep: because\n" if state == "failed" else "")


def test_an_end_that_the_controller_wrote_down_is_not_written_twice(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lived(*_: object) -> Ended:
        with EventLog(run.events) as events:
            events.append("run_ended", time=time.time(), step=4, generation=1, state="done", reason="4 steps")
        return Ended("done", "4 steps")

    with EventLog(run.events) as events:  # an earlier job's doesn't count
        events.append("run_ended", time=1.0, step=2, generation=1, state="stopped", reason="before")
    monkeypatch.setattr(job_process, "_live", lived)
    assert job_process.main([str(run.path), "--resume"]) == 0
    assert [e["reason"] for e in read_events(run.events)] == ["before", "4 steps"]


def test_what_the_host_can_t_do_is_one_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live(monkeypatch, HostError("metrics.port: 9100 is taken"))
    assert job_process.main([str(run.path)]) == 3
    assert capsys.readouterr().err == "everstep: metrics.port: 9100 is taken\n"
    assert read_events(run.events)[-1]["reason"] == "metrics.port: 9100 is taken"


def test_a_sigterm_while_ray_starts_is_a_stop(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, SystemExit(signal.SIGTERM))
    assert job_process.main([str(run.path)]) == 130
    (event,) = read_events(run.events)
    assert (event["kind"], event["state"], event["reason"]) == ("run_ended", "stopped", job_process.NOT_BEGUN)


def test_a_bug_ends_the_run_as_failed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live(monkeypatch, ZeroDivisionError("oops"))
    assert job_process.main([str(run.path)]) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("everstep: the job process failed: ZeroDivisionError")
    assert read_events(run.events)[-1]["state"] == "failed"


def test_a_busy_or_strange_directory_is_refused(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold(run):
        assert job_process.main([str(run.path)]) == 2
    assert "a job is running here" in capsys.readouterr().err
    assert job_process.main([str(tmp_path / "nowhere")]) == 2
    assert read_events(run.events) == []


class FakeSession:
    """A job that runs until it is stopped, or for ever."""

    def __init__(self, signals: job_process.Signals, deaf: bool = False) -> None:
        self.signals, self.deaf, self.stops, self.polls = signals, deaf, 0, 0

    def stop(self) -> None:
        self.stops += 1

    def wait(self, seconds: float) -> Ended | None:
        self.polls += 1
        if self.polls in (2, 4):
            signal.raise_signal(signal.SIGTERM if self.polls == 2 else signal.SIGINT)
        if self.stops and not self.deaf:
            return Ended("stopped", "stopped at step 3")
        return None


def test_the_first_signal_asks_for_a_checkpoint() -> None:
    signals = job_process.Signals()
    signals.install()
    session = FakeSession(signals)
    assert job_process._wait(session, signals) == (Ended("stopped", "stopped at step 3"), job_process.GRACE_SECONDS)
    assert session.stops == 1


def test_the_second_signal_ends_at_once() -> None:
    signals = job_process.Signals()
    signals.install()
    session = FakeSession(signals, deaf=True)
    ended, grace_seconds = job_process._wait(session, signals)
    assert (ended.state, ended.reason, grace_seconds) == ("stopped", job_process.AT_ONCE, 0.0)
    assert session.stops == 1


def test_a_hang_up_does_not_end_a_job() -> None:
    signals = job_process.Signals()
    signals.install()
    signal.raise_signal(signal.SIGHUP)
    assert signals.count == 0
