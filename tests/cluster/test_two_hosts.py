"""A job on two hosts of its own, as far as the kernel and Ray know; the cable between them is cut, and mended."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from live_job import Site, assert_same_as_alone, eventually

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
from two_hosts import TwoHosts, two_hosts

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
SLOW_STEPS = ("data.seq_len=256", "train.global_batch=16", "train.steps=100000")
OBJECT_STORE_BYTES = str(80 * 1024 * 1024)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as opened:
        yield opened


@pytest.fixture
def rays(site: Site, hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A head on host a, a raylet on host b, and whatever the site starts on host a. The head's address."""
    address = f"{hosts.addresses['a']}:6379"
    started = []
    popen = site.popen
    token = site.path / "token"
    token.write_text(secrets.token_hex(32))
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="everstep-t-", dir="/tmp") as directory:
        for end, more in (
            ("a", ["--head", "--port=6379", f"--temp-dir={directory}", "--include-dashboard=false"]),
            ("b", [f"--address={address}"]),
        ):
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *more]
            words += [f"--node-ip-address={hosts.addresses[end]}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
            log = (site.path / f"ray-{end}.log").open("wb")
            started.append(popen(hosts.command(end, words), auth, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            told = site.path / f"ray-{end}.log"
            eventually(lambda told=told: "Ray runtime started" in told.read_text(), 90, told.read_text)

        def on_host_a(command: list[str], env: Mapping[str, str], **options: Any) -> Any:
            return popen(hosts.command("a", command), {**env, **auth}, **options)

        monkeypatch.setattr(site, "popen", on_host_a)
        yield address
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait(60)


def test_a_cut_cable(site: Site, hosts: TwoHosts, rays: str) -> None:
    job = site.job("two", *SLOW_STEPS, address=rays)
    job.wait_until_settled(0, 1, within_seconds=120)
    job.wait_for_step(4)
    (lone,) = [m for m in job.members() if hosts.runs("b", m["pid"])]
    (other,) = [m for m in job.members() if hosts.runs("a", m["pid"])]
    hosts.cut()
    cut = time.time()
    left = job.wait_for_event("member_left")
    print(f"{left['time'] - cut:.1f} s after the cut: {left['reason']}")
    assert left["worker"] == lone["id"], job.story()
    step = job.step()
    eventually(lambda: job.step() > step + 2, 60, job.story)
    log = job.run.logs / f"agent-{lone['node']}.log"
    eventually(lambda: log.exists() and "the workers of this node wait" in log.read_text(), 30, job.story)

    hosts.heal()
    eventually(lambda: [m["node"] for m in job.members()] == [other["node"], 2], 120, job.story)
    joined = job.events("member_joined")[-1]
    print(f"whole again {joined['time'] - cut:.1f} s after the cut")
    job.wait_for_step(joined["step"] + 5)
    job.signal(signal.SIGINT)
    assert job.end(60) in (0, 130)
    assert not any(event["rollback"] for event in job.events("plan"))
    assert_same_as_alone(site, job, SLOW_STEPS, joined["step"] + 3)
