"""The private directory of a local Ray; Ray itself is met in tests/cluster."""

import os
import signal
import stat
import subprocess
from pathlib import Path

import psutil
import pytest
import ray

from dataloader.errors import EverstepError, HostError
from elastic.cluster import engine
from elastic.config import JobConfig, parse_job


@pytest.fixture(autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(engine.tempfile, "gettempdir", lambda: str(base))
    monkeypatch.setattr(engine, "BASE_LIMIT_BYTES", 200)
    return base


def test_it_is_private_and_removed(base: Path) -> None:
    with engine._private_directory() as directory:
        assert directory.parent == base
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "token").write_text("x")
        (directory / "deep").mkdir()
    assert list(base.iterdir()) == []


def test_a_long_temporary_directory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BASE_LIMIT_BYTES", 5)
    with engine._private_directory() as directory:
        assert directory.parent == Path("/tmp")


def test_what_killed_jobs_left_is_swept_and_nothing_else(base: Path) -> None:
    left, strange, other = base / "everstep-ray-dead", base / "everstep-ray-strange", base / "something-else"
    for directory in (left, strange, other):
        (directory / "session").mkdir(parents=True)
    (left / "token").write_text("x")
    with engine._private_directory() as first:
        (first / "token").write_text("x")
        with engine._private_directory() as second:
            assert {p.name for p in base.iterdir()} == {first.name, second.name, strange.name, other.name}


def test_the_current_directory_comes_back(tmp_path: Path) -> None:
    before = Path.cwd()
    with engine._surroundings(tmp_path):
        assert Path.cwd() == tmp_path
    assert Path.cwd() == before


def job(**cluster: int) -> JobConfig:
    train = {"steps": 1, "global_batch": 8, "micro_batch": 1, "logical_ranks": 8, "threads_per_worker": 2}
    given = {"run": {"name": "x"}, "train": train, "data": {"path": "x", "seq_len": 8}, "cluster": cluster}
    return parse_job(given, "job")


@pytest.mark.parametrize(
    ("cluster", "cpus"),
    [({"nodes": 2, "workers_per_node": 2}, 4), ({"nodes": 2, "workers_per_node": 2, "standbys": 3}, 8), ({}, 2)],
)
def test_a_node_asks_for_a_cpu_per_thread(cluster: dict[str, int], cpus: int) -> None:
    assert engine.cpus_per_node(job(**cluster)) == cpus


def test_a_contact_names_the_token_s_file_and_not_the_token() -> None:
    local = engine.Engine("1.2.3.4:5", "everstep-x", True, "/tmp/t/token")
    assert local.contact() == {"address": "1.2.3.4:5", "namespace": "everstep-x", "token_path": "/tmp/t/token"}
    assert "token_path" not in engine.Engine("1.2.3.4:5", "everstep-x", False, None).contact()
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at"),
        ("no.such.host.invalid:6379", "no Ray cluster answers at"),
        ("127.0.0.1:99999999", "no Ray cluster answers at"),
        ("somewhere", "write it as HOST:PORT"),
        ("ray://127.0.0.1:10001", "write it as HOST:PORT"),
    ],
)
def test_an_address_where_nothing_is_is_refused_at_once(address: str, says: str) -> None:
    with pytest.raises(EverstepError, match=says), engine.connected_ray(address, "x"):
        pass


@pytest.mark.parametrize("error", [SystemExit(15), RuntimeError("no raylet")])
def test_a_start_that_is_cut_short_leaves_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Ray answers a SIGTERM with SystemExit, and doesn't know of what it was about to start."""
    began: list[subprocess.Popen[bytes]] = []
    before = subprocess.Popen(["sleep", "60"])

    def init(**_: object) -> None:
        began.append(subprocess.Popen(["sleep", "60"]))
        raise error

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        with pytest.raises(HostError if isinstance(error, Exception) else SystemExit), engine.local_ray("x", 1):
            pass
        assert not psutil.pid_exists(began[0].pid)
        assert before.poll() is None
        assert list(base.iterdir()) == []
    finally:
        signal.signal(signal.SIGTERM, handler)
        before.kill()
        before.wait()
