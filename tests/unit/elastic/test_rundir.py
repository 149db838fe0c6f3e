import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dataloader.errors import ConfigError, HostError, UsageError
from elastic.config import JobConfig, load_job, stored_job
from elastic.rundir import RunDirectory, claim, hold, holder, last_held, open_run, refuse, remove_run, write_atomic

HOLDER = """
import pathlib, sys, time
from elastic.rundir import RunDirectory, hold
with hold(RunDirectory(pathlib.Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "small")


def prepare(run: RunDirectory, job: JobConfig, resume: bool) -> None:
    with claim(run, job, resume):
        pass


def test_prepare_makes_the_layout(run: RunDirectory, job_file: Path) -> None:
    job = load_job(job_file)
    prepare(run, job, resume=False)
    assert stored_job(run.job) == job
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert holder(run) is None


def test_a_run_is_not_overwritten(run: RunDirectory, job_file: Path) -> None:
    job = load_job(job_file)
    prepare(run, job, resume=False)
    run.ledger.write_text("{}\n")
    with pytest.raises(UsageError, match="has a run in it; go on with --resume"):
        prepare(run, job, resume=False)
    run.status.write_text("{}")
    run.cluster.write_text("{}")
    prepare(run, load_job(job_file, ["cluster.nodes=2"]), resume=True)
    assert stored_job(run.job).cluster.nodes == 2
    assert run.ledger.exists()
    assert not run.status.exists()
    assert not run.cluster.exists()
    with pytest.raises(ConfigError, match=r"train\.seed: was 7 when this run began and is 8 now"):
        prepare(run, load_job(job_file, ["train.seed=8"]), resume=True)
    assert stored_job(run.job).train.seed == 7


@pytest.mark.parametrize("there", ["checkpoints/manifest", "weights/model.safetensors"])
def test_results_count_as_a_run(run: RunDirectory, job_file: Path, there: str) -> None:
    prepare(run, load_job(job_file), resume=False)
    (run.path / there).write_text("x")
    with pytest.raises(UsageError, match="has a run in it"):
        refuse(run, resume=False)


def test_a_run_that_never_began_is_replaced(run: RunDirectory, job_file: Path) -> None:
    job = load_job(job_file)
    prepare(run, job, resume=False)
    run.events.write_text('{"kind": "run_ended"}\n')
    run.job_log.write_text("it failed\n")
    lock = run.lock.stat().st_ino
    prepare(run, job, resume=False)
    assert run.lock.stat().st_ino == lock
    assert not run.events.exists()
    assert not run.job_log.exists()


def test_what_is_not_a_runs_stays(run: RunDirectory, job_file: Path) -> None:
    run.path.mkdir(parents=True)
    (run.path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex' and no run"):
        prepare(run, load_job(job_file), resume=False)
    with pytest.raises(UsageError, match="not a run directory"):
        remove_run(run)
    assert [p.name for p in run.path.iterdir()] == ["thesis.tex"]


def test_remove_run_leaves_other_files(run: RunDirectory, job_file: Path) -> None:
    prepare(run, load_job(job_file), resume=False)
    (run.path / "notes.txt").write_text("mine")
    remove_run(run)
    assert [p.name for p in run.path.iterdir()] == ["notes.txt"]
    (run.path / "notes.txt").unlink()
    prepare(run, load_job(job_file), resume=False)
    remove_run(run)
    assert not run.path.exists()
    remove_run(run)


def test_nothing_to_resume(run: RunDirectory, job_file: Path) -> None:
    with pytest.raises(UsageError, match="no run to resume here; leave --resume away"):
        prepare(run, load_job(job_file), resume=True)
    assert not run.path.exists()


def test_places_that_cannot_be_run_directories(tmp_path: Path, job_file: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        prepare(RunDirectory(job_file), load_job(job_file), resume=False)
    (tmp_path / "taken").write_text("")
    with pytest.raises(HostError, match=r"choose another run\.dir"):
        prepare(RunDirectory(tmp_path / "taken" / "below"), load_job(job_file), resume=False)


def test_open_run_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there"):
        open_run(tmp_path / "no")
    with pytest.raises(UsageError, match="not a run directory"):
        open_run(tmp_path)


def test_the_lock_lives_and_dies_with_its_process(run: RunDirectory, job_file: Path) -> None:
    prepare(run, load_job(job_file), resume=False)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        there = holder(run)
        assert there is not None
        assert there.pid == process.pid
        busy = rf"a job is running here \(pid {process.pid}\)"
        with pytest.raises(UsageError, match=busy), hold(run):
            pass
        with pytest.raises(UsageError, match=busy):
            prepare(run, load_job(job_file), resume=True)
        with pytest.raises(UsageError, match=busy):
            remove_run(run)
    finally:
        process.kill()
        process.communicate()
    assert holder(run) is None
    with hold(run):
        pid, since = run.lock.read_text().split()
        assert int(pid) == os.getpid()
        assert abs(float(since) - time.time()) < 5
        assert last_held(run) == float(since)


def test_a_viewers_look_does_not_turn_a_job_away(run: RunDirectory) -> None:
    run.path.mkdir(parents=True)
    fd = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    looker = threading.Thread(target=lambda: (time.sleep(0.15), os.close(fd)))
    looker.start()
    with hold(run):
        pass
    looker.join()


def test_the_lock_is_not_inherited(run: RunDirectory) -> None:
    run.path.mkdir(parents=True)
    with hold(run):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        deadline = time.monotonic() + 5
        while holder(run) is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the child's exec may still be closing it
        assert holder(run) is None
    finally:
        child.kill()
        child.wait()


HEIR = """
import pathlib, sys
from elastic.rundir import RunDirectory, hold
sys.stdin.readline()
with hold(RunDirectory(pathlib.Path(sys.argv[1])), int(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_claim_is_handed_over_without_a_gap(run: RunDirectory, job_file: Path) -> None:
    job = load_job(job_file)
    with claim(run, job, resume=False) as lock:
        command = [sys.executable, "-c", HEIR, str(run.path), str(lock)]
        heir = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(lock,))
    assert heir.stdin is not None
    assert heir.stdout is not None
    try:
        with pytest.raises(UsageError, match="a job is running here"):  # the heir hasn't even looked at it yet
            prepare(run, job, resume=False)
        heir.stdin.write("\n")
        heir.stdin.flush()
        assert heir.stdout.readline() == "held\n"
        there = holder(run)
        assert there is not None
        assert there.pid == heir.pid
    finally:
        heir.communicate("\n")
    assert holder(run) is None


def test_write_atomic_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two", durable=False)
    assert path.read_bytes() == b"two"
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, b"three")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
