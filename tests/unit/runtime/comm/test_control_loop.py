from __future__ import annotations

import os
import selectors
import socket
import threading
import time

import pytest

from runtime.comm.loop import Wake, dispatch


def test_another_thread_ends_the_wait():
    with selectors.DefaultSelector() as selector:
        wake = Wake(selector)
        timer = threading.Timer(0.05, wake.set)
        timer.start()
        began = time.monotonic()
        dispatch(selector, 5)
        assert 0.02 < time.monotonic() - began < 2
        timer.join()
        for _ in range(3):
            wake.set()
        dispatch(selector, 5)
        began = time.monotonic()
        dispatch(selector, 0.05)  # many calls counted as one
        assert time.monotonic() - began >= 0.04
        wake.close()
        assert not selector.get_map()


def test_a_wake_after_the_close_touches_nobody_s_file():
    with selectors.DefaultSelector() as selector:
        wake = Wake(selector)
        number = wake._fd
        wake.close()
        other = os.eventfd(0, os.EFD_NONBLOCK)
        assert other == number  # the lowest free one, so it is the closed one's
        wake.set()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)


def test_whoever_is_ready_is_called_with_its_mask():
    with selectors.DefaultSelector() as selector:
        a, b = socket.socketpair()
        masks: list[int] = []
        selector.register(b, selectors.EVENT_READ | selectors.EVENT_WRITE, masks.append)
        dispatch(selector, 0)
        a.send(b"x")
        dispatch(selector, 1)
        assert masks == [selectors.EVENT_WRITE, selectors.EVENT_READ | selectors.EVENT_WRITE]
        a.close()
        b.close()
