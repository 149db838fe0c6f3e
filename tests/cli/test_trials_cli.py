"""`everstep chaos` and `everstep replay` around a job that is a stand-in: what they refuse, compare and leave."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from cli_terminal import Terminal

from elastic.rundir import RunDirectory, holder

SEED_7 = ("chaos", "job.yaml", "--seed", "7", "--minutes", "9")


def test_a_whole_trial(terminal: Terminal) -> None:
    code, out, err = terminal(*SEED_7)
    assert (code, err) == (0, ""), out
    assert (
        out.splitlines()[-1] == "kept: 0 faults in 30 steps, and every promise held; the job ended before its schedule"
    )
    assert "raise train.steps" in out
    run = terminal.folder / "runs" / "small-chaos-7"
    report = json.loads((run / "chaos.json").read_bytes())
    assert (report["verdict"], report["steps"], report["ended_early"]) == ("kept", 30, True)
    assert (terminal.folder / "runs" / "small-chaos-7-reference" / "ledger.jsonl").exists()

    code, _, err = terminal(*SEED_7)
    assert code == 2
    assert "runs/small-chaos-7: has a run in it; remove the directory, or name another with --set run.dir=" in err


@pytest.mark.parametrize("command", [SEED_7, ("replay", "trace.json", "job.yaml", "--tick", "9")])
def test_a_breach_is_exit_code_1(terminal: Terminal, command: tuple[str, ...]) -> None:
    """One step of the reference has another digest."""
    (terminal.folder / "trace.json").write_text('{"ticks": 9, "capacity": 1, "changes": [[0, 1]]}')
    assert terminal("run", "job.yaml")[0] == 0
    forged = terminal.folder / "runs" / "forged"
    shutil.copytree(terminal.run.path, forged)
    for reference, expected in (("runs/small", 0), ("runs/forged", 1)):
        if expected:
            ledger = (forged / "ledger.jsonl").read_text()
            (forged / "ledger.jsonl").write_text(ledger.replace(f"{4:032x}", f"{5:032x}", 1))
        code, out, _ = terminal(*command, "--reference", reference, "--set", f"run.dir=runs/for-{expected}")
        assert code == expected, out
    assert f"step 4 differs in digest: {4:032x} here, {5:032x} undisturbed" in " ".join(out.split())
    assert "P1 same bits; see" in out.splitlines()[-1]


def test_the_reference_is_of_the_same_job(terminal: Terminal) -> None:
    assert terminal("run", "job.yaml", "--set", "train.seed=5")[0] == 0
    code, _, err = terminal(*SEED_7, "--reference", "runs/small")
    assert (code, err) == (
        2,
        "everstep: --reference runs/small: train.seed: is 5 there and 0 here; name a run of the same job\n",
    )
    code, _, err = terminal(*SEED_7, "--reference", "runs/none")
    assert code == 2
    assert "is no run directory" in err


def test_ctrl_c_leaves_nothing_running_and_judges_nothing(terminal: Terminal) -> None:
    run = RunDirectory(terminal.folder / "runs" / "small-chaos-7")
    process = terminal.start(*SEED_7, job="held")
    terminal.wait(lambda: run.ledger.exists() and run.ledger.read_bytes().count(b"\n") >= 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert err == "everstep: interrupted, so nothing was judged; the run is in runs/small-chaos-7\n"
    assert holder(run) is None
    assert not (run.path / "chaos.json").exists()


def test_a_job_that_fails_by_itself_is_no_breach(terminal: Terminal) -> None:
    code, _, err = terminal(*SEED_7, job="fail")
    assert code == 3
    assert err.startswith("everstep: the job in runs/small-chaos-7 failed before any fault: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chaos", "job.yaml", "--minutes", "0"), "--minutes: must be a number more than 0, got 0"),
        (("chaos", "job.yaml", "--mtbf", "soon"), "--mtbf: must be a number more than 0, got soon"),
        (("chaos", "job.yaml", "--faults", "none.yaml"), "none.yaml: can't be read"),
        (("chaos", "none.yaml"), "none.yaml: no such file"),
        (("replay", "job.yaml", "job.yaml", "--tick", "1"), "job.yaml: not JSON; a trace has"),
        (("replay", "t.json", "job.yaml", "--tick", "1"), "12 nodes are more than the capacity of 4"),
        (("replay", "t.json", "job.yaml"), "arguments are required: --tick"),
        (("replay", "t.json", "job.yaml", "--tick", "1", "--ticks", "5"), "--ticks: must be two ticks as in 100:250"),
    ],
)
def test_bad_input_is_one_line(terminal: Terminal, arguments: tuple[str, ...], said: str) -> None:
    (terminal.folder / "t.json").write_text('{"ticks": 9, "capacity": 4, "changes": [[0, 12]]}')
    code, out, err = terminal(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (terminal.folder / "runs").exists()
