import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataloader.errors import HostError
from elastic.agent import DEADLINE_EXIT_CODE, Agent, AgentFacts

TOY = Path(__file__).with_name("toy_worker.py")
SOON_SECONDS = 90.0  # on a machine with many other things to do


class Listener:
    """The controller, as the agent meets it."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self.introductions: queue.SimpleQueue[tuple[dict[str, Any], dict[str, Any]]] = queue.SimpleQueue()
        self.heard: list[dict[str, Any]] = []
        self.order: list[str] = []  # kinds of all events

    def introduce(self, event: dict[str, Any], contact: dict[str, Any]) -> None:
        self.introductions.put((event, contact))

    def report(self, events: list[dict[str, Any]]) -> None:
        self.calls.put(events)

    def until(self, kind: str, worker: int | None = None) -> dict[str, Any]:
        """The first event of that kind; what comes before it is kept in `heard`."""
        deadline = time.monotonic() + SOON_SECONDS
        while True:
            for number, event in enumerate(self.heard):
                if event["kind"] == kind and worker in (None, event.get("worker")):
                    return self.heard.pop(number)
            events = self.calls.get(timeout=max(0.01, deadline - time.monotonic()))
            self.heard += events
            self.order += [event["kind"] for event in events]


class House:
    """Agents under test, and whatever they have started."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "logs").mkdir()
        self.agents: list[Agent] = []

    def open(self, toy: str, port: int = 0, strict: bool = True, start: bool = True) -> tuple[Agent, Listener]:
        listener = Listener()
        facts = AgentFacts(
            slot=1,
            run_dir=self.run_dir,
            job={"train": {"steps": 3}},
            secret=b"s" * 32,
            host="127.0.0.1",
            metrics_host="127.0.0.1",
            metrics_port=port,
            strict_port=strict,
        )
        agent = Agent(facts, listener, lambda: {"TOY": toy}, command=(sys.executable, str(TOY)))
        self.agents.append(agent)
        if start:
            agent.start()
        agent.deliver([{"kind": "WelcomeAgent", "slot": 1, "node": 4}])
        return agent, listener

    def workers(self) -> list[psutil.Process]:
        return [p for p in psutil.Process().children(recursive=True) if str(TOY) in " ".join(p.cmdline())]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    opened = House(tmp_path)
    yield opened
    for agent in opened.agents:
        agent.close(0.0)
    for process in opened.workers():
        process.kill()


def start(*workers: int) -> list[dict[str, Any]]:
    return [{"kind": "StartWorker", "slot": 1, "worker": worker} for worker in workers]


def metrics_of(listener: Listener, agent: Agent) -> Callable[[], str]:
    agent.introduce()
    _, contact = listener.introductions.get(timeout=SOON_SECONDS)
    return lambda: urllib.request.urlopen(f"http://{contact['metrics']}/metrics", timeout=5).read().decode()


def test_a_worker_is_started_and_heard(house: House) -> None:
    agent, listener = house.open("up echo")
    agent.deliver(start(7))
    info = listener.until("WorkerUp")["info"]
    assert info["worker"] == 7
    assert listener.until("WorkerLinked") == {"kind": "WorkerLinked", "worker": 7}
    for number in range(50):
        agent.deliver([{"kind": "ToWorker", "slot": 1, "worker": 7, "message": {"kind": "ask", "n": number}}])
    said = [listener.until("WeightsWritten")["version"] for _ in range(50)]
    assert said == list(range(50))
    assert (house.run_dir / "logs" / "worker-7.out").read_text() == "toy out\n"
    assert (house.run_dir / "logs" / "worker-7.err").read_text().startswith("toy err\n")


def test_an_introduction_names_the_living(house: House) -> None:
    agent, listener = house.open("up")
    agent.introduce()
    event, contact = listener.introductions.get(timeout=SOON_SECONDS)
    assert (event["slot"], event["workers"], event["starting"]) == (1, [], [])
    assert contact["pid"] == os.getpid()
    agent.deliver(start(3))
    listener.until("WorkerLinked")
    agent.deliver(start(4, 4))
    agent.introduce()
    event, _ = listener.introductions.get(timeout=SOON_SECONDS)
    assert [(w["worker"], w["linked"]) for w in event["workers"]] == [(3, True)]
    assert event["starting"] == [4]
    assert event["instance"] == agent.instance


def test_an_injected_kill_is_stamped_and_the_exit_follows(house: House) -> None:
    agent, listener = house.open("up")
    agent.deliver(start(3))
    listener.until("WorkerUp")
    before = time.time()
    agent.deliver([{"kind": "KillWorker", "slot": 1, "worker": 3, "fault": True}])
    killed, exited = listener.until("Killed"), listener.until("WorkerExited")
    assert before <= killed["time"] <= exited["time"] <= time.time()
    assert (exited["worker"], exited["reason"]) == (3, "SIGKILL")
    assert house.workers() == []


def test_a_plain_kill_is_not_told_as_a_fault_and_one_before_the_fork_is_not_lost(house: House) -> None:
    agent, listener = house.open("up", start=False)
    agent.deliver([*start(3), {"kind": "KillWorker", "slot": 1, "worker": 3}])
    agent.start()
    assert listener.until("WorkerExited")["reason"] == "SIGKILL"
    assert "Killed" not in [event["kind"] for event in listener.heard]


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        ("up exit=3", "exit code 3: it went wrong"),
        ("raise", "exit code 1: ValueError: the recipe broke"),
        ("exit=0", "exit code 0"),
    ],
)
def test_why_a_worker_ended(house: House, toy: str, reason: str) -> None:
    agent, listener = house.open(toy)
    agent.deliver(start(3))
    exited = listener.until("WorkerExited")
    assert exited["reason"] == reason
    assert abs(exited["time"] - time.time()) < SOON_SECONDS


def test_last_words_come_before_the_exit_and_in_order(house: House) -> None:
    agent, listener = house.open("gossip")
    agent.deliver(start(3))
    exited = listener.until("WorkerExited")
    assert exited["reason"] == "SIGKILL"
    assert listener.order[-2:] == ["WorkerFailed", "WorkerExited"]
    progress = [event for event in listener.heard if event["kind"] == "Progress"]
    assert [p["total"] for p in progress if p["total"] in (99, 199, 299)] == [99, 199, 299]  # the last of each step
    assert [p["total"] for p in progress] == sorted(p["total"] for p in progress)
    assert len(progress) < 300  # the rest says nothing that these don't


def test_what_was_said_before_an_exit_is_heard_although_both_come_at_once(house: House) -> None:
    agent, listener = house.open("up echo")
    agent.deliver(start(3))
    pid = listener.until("WorkerUp")["info"]["pid"]
    agent.deliver([{"kind": "ToWorker", "slot": 1, "worker": 3, "message": {"kind": "ask", "n": 5}}])
    agent._command(lambda: time.sleep(1.0))  # a busy machine
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    assert listener.until("WorkerExited")["reason"] == "SIGKILL"
    assert listener.order[-2:] == ["WeightsWritten", "WorkerExited"]


def test_a_worker_may_not_speak_for_its_agent(house: House) -> None:
    agent, listener = house.open("up lie")
    agent.deliver(start(3))
    exited = listener.until("WorkerExited")
    assert (exited["worker"], exited["reason"]) == (3, "exit code 0")  # its channel was closed, so it left


def test_strangers_and_second_channels_are_shown_the_door(house: House) -> None:
    agent, listener = house.open("up spam")
    agent.deliver(start(3))
    assert "closed" in listener.until("WorkerFailed")["message"]
    script = f"import socket; s=socket.socket(socket.AF_UNIX); s.connect({str(agent._crew._server.path)!r}); s.recv(1)"
    stranger = subprocess.run([sys.executable, "-c", script], timeout=SOON_SECONDS, check=False)
    assert stranger.returncode == 0
    assert len(house.workers()) == 1


def test_a_worker_that_cannot_be_started_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, listener = house.open("up")
    agent._forker._command = ("/no/such/program",)
    agent.deliver(start(3))
    assert "can't be started" in listener.until("WorkerExited")["reason"]


def test_closing_ends_even_those_who_don_t_want(house: House) -> None:
    agent, listener = house.open("up stubborn")
    agent.deliver(start(3, 4))
    listener.until("WorkerLinked", 3)
    listener.until("WorkerLinked", 4)
    begun = time.monotonic()
    socket = agent._crew._server.path
    assert agent.close(0.3)
    assert 0.25 < time.monotonic() - begun < 5.0
    assert house.workers() == []
    assert not socket.parent.exists()
    assert listener.calls.empty()  # nothing is told any more


def test_closing_is_quick_when_nobody_objects_and_catches_a_worker_in_the_making(house: House) -> None:
    agent, _listener = house.open("up")
    agent.deliver(start(3, 4))
    begun = time.monotonic()
    assert agent.close(15.0)
    assert time.monotonic() - begun < 10.0
    assert house.workers() == []


def test_workers_die_with_the_thread_that_forked_them(house: House) -> None:
    agent, listener = house.open("up stubborn")
    agent.deliver(start(3))
    listener.until("WorkerUp")
    (worker,) = house.workers()
    agent._forker.end()
    assert listener.until("WorkerExited")["reason"] == "SIGKILL"  # who waits for the child here takes its exit code
    assert not worker.is_running()


def test_metrics_follow_workers_and_the_controller(house: House) -> None:
    agent, listener = house.open("up")
    scrape = metrics_of(listener, agent)
    assert "everstep_step " not in scrape()
    agent.deliver(start(3))
    listener.until("WorkerUp")
    last = {
        "step": 4,
        "loss": 2.5,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens": 100,
        "seconds": 0.5,
        "phases": {"vote": 0.1},
    }
    status = {"members": [{"role": "member"}, {"role": "standby"}], "generation": 6, "shards_without_backup": 2}
    tally = {"injected": {"kill-worker": 1}, "detected": {"link": 2}, "pauses": 3, "pause_seconds": 0.25}
    agent.deliver([{"kind": "JobFacts", "status": {**status, "last": last}, "tally": tally}])
    deadline = time.monotonic() + SOON_SECONDS
    while "everstep_step 5.0" not in (text := scrape()) and time.monotonic() < deadline:
        time.sleep(0.01)
    for line in (
        "everstep_loss 2.5",
        "everstep_grad_norm 1.5",
        "everstep_learning_rate 0.001",
        "everstep_tokens_per_second 200.0",
        'everstep_step_phase_seconds{phase="vote"} 0.1',
        "everstep_workers 1.0",
        "everstep_generation 6.0",
        "everstep_shards_without_backup 2.0",
        'everstep_faults_injected_total{kind="kill-worker"} 1.0',
        'everstep_faults_detected_total{notice="link"} 2.0',
        "everstep_pauses_total 3.0",
        "everstep_pause_seconds_total 0.25",
        "everstep_node 4.0",
        "everstep_node_workers 1.0",
        'everstep_worker_micro_batches_total{worker="3"} 0.0',
    ):
        assert line in text.splitlines()
    agent.deliver([{"kind": "KillWorker", "slot": 1, "worker": 3}])
    listener.until("WorkerExited")
    assert 'worker="3"' not in scrape()  # nothing of the dead lingers


def test_a_taken_port_is_named_and_nothing_is_left(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.metrics.BIND_PATIENCE_SECONDS", 0.0)
    agent, listener = house.open("up")
    agent.introduce()
    port = int(listener.introductions.get(timeout=SOON_SECONDS)[1]["metrics"].rpartition(":")[2])
    threads, descriptors = threading.active_count(), psutil.Process().num_fds()
    with pytest.raises(HostError, match=rf"^metrics\.port: {port} is taken on this machine"):
        house.open("up", port=port)
    assert (threading.active_count(), psutil.Process().num_fds()) == (threads, descriptors)
    other, heard = house.open("up", port=port, strict=False)
    other.introduce()
    assert not heard.introductions.get(timeout=SOON_SECONDS)[1]["metrics"].endswith(f":{port}")


def test_what_nobody_can_mend_ends_the_job_with_one_line(house: House) -> None:
    agent, listener = house.open("up")
    agent.facts.job["train"]["seed"] = 1 << 64  # type: ignore[index]  # more than a message can carry
    agent.deliver(start(3))
    failed = listener.until("WorkerFailed")
    assert failed["message"].startswith("the agent of slot 1: a message must hold plain values only")
    assert (failed["worker"], failed["theirs"]) == (-1, True)
    assert agent.close(1.0)
    assert house.workers() == []


def test_nothing_is_left_of_one_that_was_closed(house: House) -> None:
    descriptors = psutil.Process().num_fds()
    agent, _listener = house.open("up")
    assert agent.close(1.0)
    agent.introduce()  # somebody hasn't heard
    assert psutil.Process().num_fds() == descriptors


def test_only_what_nobody_says_again_is_reported_again(house: House) -> None:
    agent, listener = house.open("up")
    agent.report_again(
        [
            {"kind": "Progress", "worker": 3, "step": 1, "micro_batches": 1, "total": 1},
            {"kind": "WorkerExited", "worker": 3, "reason": "SIGKILL", "time": 1.0},
        ]
    )
    assert listener.until("WorkerExited")["worker"] == 3
    assert listener.heard == []


def test_a_killed_agent_takes_its_workers_along(tmp_path: Path) -> None:
    """The agent in a process of its own."""
    script = f"""
import sys, time
sys.path.insert(0, {str(TOY.parent)!r})
from pathlib import Path
from test_agent import House, start
agent, listener = House(Path({str(tmp_path)!r})).open("up stubborn")
agent.deliver(start(3))
print(listener.until("WorkerUp")["info"]["pid"], flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        worker.wait(timeout=SOON_SECONDS)
    finally:
        process.kill()
        process.wait()


def test_a_notice_is_told_at_once_and_again_to_whoever_asks(house: House) -> None:
    agent, listener = house.open("up")
    agent.preempt(500.0, "SIGTERM")
    agent.preempt(600.0, "drain")  # says less
    first = listener.until("Preempted")
    assert (first["slot"], first["instance"], first["notice"]) == (1, agent.instance, "SIGTERM")
    agent.introduce()
    again = listener.until("Preempted")
    assert again["notice"] == "SIGTERM"
    assert again["seconds"] <= first["seconds"] <= 500.0
    agent.deliver([{"kind": "PreemptAgent", "slot": 1, "seconds": 9.0}])
    assert listener.until("Preempted")["notice"] == "injected"


def test_who_is_let_go_is_asked_first_and_told_when_it_stays(house: House) -> None:
    agent, listener = house.open("up")
    agent.deliver(start(3, 4))
    listener.until("WorkerLinked", 3)
    listener.until("WorkerLinked", 4)
    assert agent.leave(60.0)
    assert {listener.until("WorkerExited", w)["reason"] for w in (3, 4)} == {"exit code 0"}
    deaf, listener = house.open("up stubborn echo")
    deaf.deliver(start(5))
    listener.until("WorkerLinked", 5)
    (worker,) = house.workers()
    worker.suspend()  # neither hears the question nor minds a signal
    deaf.preempt(500.0, "SIGTERM")
    assert deaf.leave(0.4)
    assert "kill" in listener.until("WorkerExited", 5)["reason"].lower()


def test_at_its_deadline_a_node_is_gone_whatever_its_workers_say(tmp_path: Path) -> None:
    """The agent in a process of its own: it ends itself."""
    script = f"""
import sys, time
sys.path.insert(0, {str(TOY.parent)!r})
from pathlib import Path
from test_agent import House, start
agent, listener = House(Path({str(tmp_path)!r})).open("up stubborn")
agent.deliver(start(3))
print(listener.until("WorkerUp")["info"]["pid"], flush=True)
agent.preempt(0.3, "SIGTERM")
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        assert process.wait(SOON_SECONDS) == DEADLINE_EXIT_CODE
        worker.wait(timeout=SOON_SECONDS)
    finally:
        process.kill()
        process.wait()
