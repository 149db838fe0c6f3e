import os
import signal
import subprocess
import sys

import psutil

CHILD = """
import sys, time
from elastic.cluster.fate import die_with_raylet
die_with_raylet({local})
print("watching", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
env = {{**os.environ, "RAY_RAYLET_PID": str(os.getpid())}}
helper = subprocess.Popen(["sleep", "60"], env=env, stdout=subprocess.DEVNULL)
child = subprocess.Popen([sys.executable, "-c", {child!r}], env=env, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(helper.pid, child.pid, flush=True)
time.sleep(60)
"""


def family(local: bool) -> tuple[subprocess.Popen[str], psutil.Process, psutil.Process]:
    """A process that stands for a raylet, a helper of it, and one that watches it."""
    script = PARENT.format(child=CHILD.format(local=local))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper, child = map(int, parent.stdout.readline().split())
    return parent, psutil.Process(helper), psutil.Process(child)


def end(parent: subprocess.Popen[str], helper: psutil.Process) -> None:
    parent.kill()
    parent.communicate()
    if helper.is_running():
        helper.kill()


def test_whoever_the_raylet_started_dies_with_it() -> None:
    parent, helper, child = family(local=True)
    try:
        bystander = subprocess.Popen(["sleep", "60"], env={**os.environ, "RAY_RAYLET_PID": "1"})
        parent.send_signal(signal.SIGKILL)
        psutil.wait_procs([child, helper], timeout=10)
        assert not child.is_running()
        assert not helper.is_running()
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()
    finally:
        end(parent, helper)


def test_on_somebody_else_s_ray_only_we_die() -> None:
    parent, helper, child = family(local=False)
    try:
        parent.send_signal(signal.SIGKILL)
        child.wait(timeout=10)
        assert helper.is_running()
    finally:
        end(parent, helper)
