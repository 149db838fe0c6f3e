import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from elastic.cluster.fate import start_sweeper

CHILD = """
import sys, time
from elastic.cluster.fate import die_with_raylet
die_with_raylet()
print("watching", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
helper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(helper.pid, child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """A process that stands for a raylet, a helper of it, and one that watches it."""
    script = PARENT.format(child=CHILD)
    raylet = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    helper, child = map(psutil.Process, map(int, raylet.stdout.readline().split()))
    yield raylet, helper, child
    raylet.kill()
    raylet.communicate()
    for process in (helper, child):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_an_actor_dies_with_its_raylet(family: tuple[subprocess.Popen[str], psutil.Process, psutil.Process]) -> None:
    raylet, helper, child = family
    raylet.send_signal(signal.SIGKILL)
    child.wait(timeout=10)
    assert helper.is_running()  # which is not for an actor to end


def test_all_that_a_raylet_started_is_swept(
    family: tuple[subprocess.Popen[str], psutil.Process, psutil.Process],
) -> None:
    raylet, helper, child = family
    child.suspend()  # so that it can't do it
    sweeper = start_sweeper(raylet.pid)
    bystander = subprocess.Popen(["sleep", "60"])
    assert os.getsid(sweeper.pid) == sweeper.pid  # no terminal's signal reaches it
    raylet.send_signal(signal.SIGKILL)
    psutil.wait_procs([child, helper], timeout=10)
    assert not helper.is_running()
    assert not child.is_running()
    assert bystander.poll() is None
    assert sweeper.wait(timeout=10) == 0
    bystander.kill()
    bystander.wait()


def test_a_raylet_that_is_gone_already(family: tuple[subprocess.Popen[str], psutil.Process, psutil.Process]) -> None:
    raylet, _, child = family
    raylet.kill()
    raylet.wait()
    child.wait(timeout=10)
    assert start_sweeper(raylet.pid).wait(timeout=10) == 0
