"""Slices as the kernel sees them. Where it doesn't grant short ones, asking must at least do no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from runtime import priority

PROGRAM = """
import ctypes, json, os, threading
from runtime import priority

def slice_of(thread):  # in nanoseconds; None if the kernel doesn't say
    buffer = ctypes.create_string_buffer(priority._ATTRIBUTES.size)
    if priority._SET is None or priority._libc.syscall(priority._SET + 1, thread, buffer, len(buffer), 0):
        return None
    return priority._ATTRIBUTES.unpack(buffer.raw)[5]

started, done = threading.Event(), threading.Event()
def wait():
    started.set()
    done.wait()
before = threading.Thread(target=wait)
before.start()
started.wait()
usual = slice_of(threading.get_native_id())
priority.answer_first()
seen = {"usual": usual, "own": slice_of(threading.get_native_id())}
seen["other"] = slice_of(before.native_id)
def compute():
    seen["inherited"] = slice_of(threading.get_native_id())
    priority.compute_after()
    seen["compute"] = slice_of(threading.get_native_id())
    seen["niceness"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
thread = threading.Thread(target=compute)
thread.start()
thread.join()
seen["own niceness"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
priority.take_turns()
seen["turns"] = slice_of(threading.get_native_id())
priority.answer_first(whole_process=True)
seen["whole"] = slice_of(before.native_id)
done.set()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, int | None]:
    """In a process of its own: a thread can't take a lower priority back."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


def test_who_computes_comes_after_who_answers(seen: dict[str, int]) -> None:
    assert seen["niceness"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    assert seen["own niceness"] == os.getpriority(os.PRIO_PROCESS, 0)


def test_who_answers_gets_short_slices(seen: dict[str, int]) -> None:
    if seen["own"] in (None, seen["usual"], 0):
        pytest.skip("this kernel grants no slices")
    assert seen["own"] == seen["inherited"] == 100_000
    assert seen["other"] == seen["compute"] == seen["turns"] == seen["usual"] != 100_000
    assert seen["whole"] == 100_000


def test_a_thread_that_is_gone_does_not_matter() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    priority._ask(child.pid, priority.USUAL_SLICE)
