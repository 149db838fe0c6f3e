"""The command line as a user meets it: real processes, signals and files; only the job process is a stand-in."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cli_terminal import COMMAND, Terminal

from elastic import cli
from elastic.record_lines import read_events, read_ledger


def test_a_run_from_beginning_to_end(terminal: Terminal) -> None:
    code, out, err = terminal("run", "job.yaml")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert sum(" of 30  loss " in line for line in lines) == 30
    assert lines[-1].startswith("done: weights in runs/small/weights/model.safetensors")
    assert terminal.job_pid() is None

    code, out, _ = terminal("status", "runs/small", "--json")
    assert code == 0
    assert json.loads(out) == {"state": "done", "step": 30, "steps": 30, "generation": 1, "members": []}
    assert terminal("status", "runs/small")[1] == "ended: done, step 30 of 30, generation 1\n"

    code, out, _ = terminal("audit", "runs/small")
    assert (code, out.splitlines()[-1]) == (0, "PASSED: 30 steps, 120 samples")
    assert terminal("attach", "runs/small")[0] == 0

    code, _, err = terminal("run", "job.yaml")
    assert code == 2
    assert "has a run in it; go on with --resume" in err
    code, _, err = terminal("run", "job.yaml", "--resume", "--set", "train.seed=3")
    assert code == 2
    assert "train.seed: was 0 when this run began and is 3 now" in err


def test_the_stored_job_is_whole(terminal: Terminal) -> None:
    terminal("run", "job.yaml", "--set", "train.steps=1")
    text = terminal.run.job.read_text()
    assert f"path: {terminal.folder}/tokens" in text
    assert "vocab_size: 50" in text
    assert "max_seq_len: 8" in text


def test_audit_finds_a_changed_ledger_and_changed_data(terminal: Terminal) -> None:
    assert terminal("run", "job.yaml", "--set", "train.steps=5")[0] == 0
    sound = terminal.run.ledger.read_text()
    terminal.run.ledger.write_text("".join(line + "\n" for n, line in enumerate(sound.splitlines()) if n != 2))
    code, out, _ = terminal("audit", "runs/small")
    assert code == 1
    assert "step 3: is record 2 of the ledger, where step 2 belongs" in out
    terminal.run.ledger.write_text(sound.replace('"samples": [8, 12]', '"samples": [8, 13]'))
    assert terminal("audit", "runs/small")[0] == 1
    terminal.run.ledger.write_text("nonsense\n" + sound)
    assert terminal("audit", "runs/small")[0] == 1
    terminal.run.ledger.write_text(sound)
    assert terminal("audit", "runs/small")[0] == 0
    tokens = terminal.folder / "tokens" / "train-00000.bin"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:100] + data[102:] + data[100:102])
    code, out, _ = terminal("audit", "runs/small")
    assert code == 1
    assert "the data files give" in out
    tokens.unlink()
    code, _, err = terminal("audit", "runs/small")
    assert code == 2
    assert f"{tokens}: missing" in err


def test_diff(terminal: Terminal) -> None:
    for name, steps, job in (("a", 5, ""), ("b", 5, ""), ("c", 5, "other-bits"), ("d", 3, "")):
        settings = ["--set", f"run.name={name}", "--set", f"train.steps={steps}"]
        assert terminal("run", "job.yaml", *settings, job=job)[0] == 0
    code, out, _ = terminal("diff", "runs/a", "runs/b")
    assert (code, out) == (0, "equal over 5 steps\nweights: the same bytes\n")
    code, out, _ = terminal("diff", "runs/a", "runs/c")
    assert code == 1
    assert out.startswith("step 0 differs in digest, it is the first one\n")
    assert "weights: the bytes differ" in out
    code, out, _ = terminal("diff", "runs/a", "runs/d")
    assert code == 1
    assert out.startswith("equal over 3 steps\nlengths differ: ")
    (terminal.folder / "runs/b/weights/model.safetensors").write_bytes(b"other")
    assert terminal("diff", "runs/a", "runs/b")[0] == 1


def test_ctrl_c_stops_and_resume_goes_on(terminal: Terminal) -> None:
    process = terminal.start("run", "job.yaml", job="held")
    terminal.wait_for_steps(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert "stopped: go on with `everstep run job.yaml --resume`" in out
    assert terminal.job_pid() is None
    steps = len(read_ledger(terminal.run.ledger))
    assert json.loads(terminal("status", "runs/small", "--json")[1])["state"] == "stopped"
    code, out, _ = terminal("run", "job.yaml", "--resume")
    assert code == 0
    assert sum(" of 30  loss " in line for line in out.splitlines()) == 30 - steps
    assert "run ended: stopped" not in out
    assert terminal("audit", "runs/small")[0] == 0


def test_ctrl_c_reaches_a_job_process_that_is_just_beginning(terminal: Terminal) -> None:
    process = terminal.start("run", "job.yaml", "--set", "train.seed=7", job="held")
    terminal.wait(terminal.run.job_log.exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert "stopped: go on with `everstep run job.yaml --set train.seed=7 --resume`" in out


def test_a_second_ctrl_c_ends_at_once(terminal: Terminal) -> None:
    process = terminal.start("run", "job.yaml", job="held deaf")
    terminal.wait_for_steps(3)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "stopping at the next step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=5)
    assert "ending at once" in out
    assert process.returncode == 130
    assert terminal.job_pid() is None


def test_a_closed_terminal_leaves_the_job_running(terminal: Terminal) -> None:
    process = terminal.start("run", "job.yaml", job="held")
    terminal.wait_for_steps(3)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=10) == 0
    pid = terminal.job_pid()
    assert pid is not None

    status = json.loads(terminal("status", "runs/small", "--json")[1])
    assert (status["state"], status["members"][0]["pid"]) == ("running", pid)
    assert "optimizer" in terminal("status", "runs/small")[1]
    code, _, err = terminal("run", "job.yaml", "--resume")
    assert code == 2
    assert f"a job is running here (pid {pid}); watch it with `everstep attach" in err

    viewer = terminal.start("attach", "runs/small")
    assert viewer.stdout is not None
    assert viewer.stdout.readline().startswith("attached at step ")
    viewer.send_signal(signal.SIGINT)
    out, err = viewer.communicate(timeout=10)
    assert viewer.returncode == 0
    assert out.endswith("detached: runs/small\n")
    assert terminal.job_pid() == pid
    viewer = terminal.start("attach", "runs/small")
    assert viewer.stdout is not None
    viewer.stdout.readline()
    terminal.go()
    out, _ = viewer.communicate(timeout=30)
    assert viewer.returncode == 0
    assert out.splitlines()[-2].endswith("run ended: done")


def test_attach_to_a_job_that_has_ended_its_run_and_is_clearing_up(terminal: Terminal) -> None:
    assert terminal("run", "job.yaml", "--detach", job="linger")[0] == 0
    terminal.wait(lambda: terminal.run.events.read_bytes().count(b"run_ended") == 1)
    viewer = terminal.start("attach", "runs/small")
    assert viewer.stdout is not None
    assert viewer.stdout.readline().startswith("attached at step 30")
    terminal.go()
    out, err = viewer.communicate(timeout=30)
    assert (viewer.returncode, out, err) == (0, "done: runs/small\n", "")


def test_detach(terminal: Terminal) -> None:
    code, out, _ = terminal("run", "job.yaml", "--detach", job="held")
    assert code == 0
    assert out.splitlines()[-1] == "running in runs/small; watch it with `everstep attach runs/small`"
    assert terminal.job_pid() is not None


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_job_that_refuses_or_fails_is_one_line(terminal: Terminal, detach: tuple[str, ...]) -> None:
    code, _, err = terminal("run", "job.yaml", *detach, job="refuse")
    assert code == 2
    assert err == "everstep: train.threads_per_worker: 64 is more than this machine's 2 cores; set it to 2\n"
    code, _, err = terminal("run", "job.yaml", *detach, job="fail")
    assert (code, err) == (3, "everstep: metrics.port: 9100 is taken; set it to 0\n")
    assert json.loads(terminal("status", "runs/small", "--json")[1])["state"] == "failed"


def test_a_job_that_dies_is_one_line(terminal: Terminal) -> None:
    code, _, err = terminal("run", "job.yaml", job="die")
    assert code == 3
    log = terminal.run.job_log
    how = f"the job process was killed by SIGKILL without ending the run (see {log})"
    assert err == f"everstep: {how}; its last words were: the last words\n"
    status = json.loads(terminal("status", "runs/small", "--json")[1])
    assert (status["state"], status["step"], status["members"]) == ("failed", 3, [])
    assert terminal("attach", "runs/small")[0] == 3
    assert terminal("run", "job.yaml", "--resume")[0] == 0
    assert terminal("audit", "runs/small")[0] == 0


def test_a_job_that_died_after_an_earlier_end_is_not_done(terminal: Terminal) -> None:
    process = terminal.start("run", "job.yaml", job="held")
    terminal.wait_for_steps(3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert len(read_ledger(terminal.run.ledger)) == 3
    assert terminal("run", "job.yaml", "--resume", job="die")[0] == 3
    assert read_events(terminal.run.events)[-1]["kind"] == "run_ended"
    assert json.loads(terminal("status", "runs/small", "--json")[1])["state"] == "failed"


def test_a_copy_of_a_run_has_ended_as_the_run_did(terminal: Terminal) -> None:
    assert terminal("run", "job.yaml", "--set", "train.steps=1")[0] == 0
    shutil.copytree(terminal.run.path, terminal.folder / "copy", copy_function=shutil.copy)
    assert json.loads(terminal("status", "copy", "--json")[1])["state"] == "done"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "no.yaml"], "no.yaml: no such file; name a job file"),
        (["run", "job.yaml", "--set", "train.global_batch=6"], "job.yaml: train.global_batch: 6, which is not"),
        (["run", "job.yaml", "--set", "cluster.nodes=5"], "job.yaml: train.logical_ranks: 4 is fewer than the 5"),
        (["run", "job.yaml", "--set", "model.hidden_size=15"], "job.yaml: model.hidden_size: 15, which 2 heads"),
        (["run", "job.yaml", "--set", "data.path=gone"], "data.path: "),
        (["run", "job.yaml", "--set", "model.vocab_size=40"], "model.vocab_size: 40 is less than the 50 ids of"),
        (["run", "job.yaml", "--set", "data.seq_len=9999"], "data.seq_len 9999"),
        (["run", "job.yaml", "--resume"], "no run to resume here; leave --resume away"),
        (["run", "job.yaml", "--set", "run.dir=tokens"], "holds 'dataset.json' and no run"),
        (["run", "job.yaml", "--set", "run.dir=/proc/none"], "choose another run.dir"),
        (["status", "tokens"], "tokens: has no job.yaml, so it is not a run directory"),
        (["attach", "gone"], "gone: is not there"),
        (["audit", "gone"], "gone: is not there"),
        (["diff", "gone", "gone"], "gone: is not there"),
        (["inject", "gone", "kill"], "'kill' is no fault; use one of kill-worker=ID"),
        (["inject", "gone", "stop"], "gone: is not there"),
        (["run"], "the following arguments are required: JOB.yaml; see everstep run --help"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    terminal: Terminal,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(terminal.folder)
    monkeypatch.setattr(subprocess, "Popen", None)
    before = {p.name for p in terminal.folder.iterdir()}
    try:
        code = cli.main(arguments)
    except SystemExit as ended:  # argparse
        code = ended.code if isinstance(ended.code, int) else -1
    err = capsys.readouterr().err
    assert code in (2, 3)
    assert err.startswith("everstep")
    assert says in err
    assert err.count("\n") == 1
    assert {p.name for p in terminal.folder.iterdir()} == before


def test_inject_wants_a_running_job(terminal: Terminal) -> None:
    terminal("run", "job.yaml", "--set", "train.steps=1")
    code, _, err = terminal("inject", "runs/small", "kill-worker=1")
    assert code == 2
    assert "no job is running here; start one with `everstep run`" in err


def test_the_live_picture_on_a_terminal(terminal: Terminal) -> None:
    master, slave = pty.openpty()
    faults = "faults=[{at_step: 2, fault: kill-worker=0}]"
    process = subprocess.Popen(
        [*COMMAND, "run", "job.yaml", "--set", "train.steps=8", "--set", faults],
        cwd=terminal.folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = bytearray()
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other side has closed it
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert process.wait(timeout=10) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for part in (
        "8/8 steps",
        "loss 4.3000",
        "tokens/s",
        "0-3",
        "fault injected at step 2: kill-worker=0",
        "recovery in",
    ):
        assert part in text


def test_output_that_nobody_reads_any_more(terminal: Terminal) -> None:
    process = terminal.start("run", "job.yaml", job="held")
    assert process.stdout is not None
    process.stdout.readline()
    terminal.wait_for_steps(3)
    process.stdout.close()
    terminal.go()
    assert process.wait(timeout=20) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stdout = None
    terminal.wait_for_steps(30)
    terminal.wait(lambda: terminal.job_pid() is None)
    assert terminal("audit", "runs/small")[0] == 0


@pytest.mark.parametrize(("job", "code"), [("", 0), ("other-bits", 1), ("fail", 3)])
def test_demo(terminal: Terminal, job: str, code: int) -> None:
    found, out, _ = terminal("demo", "--dir", "here", job=job)
    assert found == code
    if code == 0:
        assert "equal: all 30 steps have the same digests, and the weights files are the same bytes" in out
        assert re.search(r"pauses \(ms\) +none +30, 30, 30", out)
        assert re.search(r"digest +(\w{32}) +\1", out)
        assert terminal("demo", "--dir", "here", job=job)[0] == 0  # older ones are replaced
    if code == 1:
        assert "NOT equal: step 0 differs in digest" in out
    assert (terminal.folder / "here" / "demo-undisturbed" / "job.yaml").is_file()


def test_help_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom elastic.cli import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
        "import elastic.status, elastic.demo\n"
        "print([m for m in ('torch', 'ray') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([COMMAND[0], "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"
