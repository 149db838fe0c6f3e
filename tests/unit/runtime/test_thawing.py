import signal
import subprocess
import time

import psutil

from runtime.thawing import thaw_after, thaw_later


def test_a_stopped_process_goes_on_after_its_time() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        process = psutil.Process(sleeper.pid)
        before = time.monotonic()
        thaw_later([sleeper.pid], 0.3)
        sleeper.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        while process.status() == psutil.STATUS_STOPPED:
            assert time.monotonic() < before + 30
            time.sleep(0.01)
        assert time.monotonic() >= before + 0.3
    finally:
        sleeper.kill()
        sleeper.wait()


def test_it_does_not_wait_for_the_dead() -> None:
    sleeper = subprocess.Popen(["sleep", "0.1"])
    before = time.monotonic()
    thaw_after(60.0, [sleeper.pid])
    assert time.monotonic() < before + 30
    sleeper.wait()
    thaw_after(60.0, [sleeper.pid])
