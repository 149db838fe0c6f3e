from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from runtime.comm.buffers import PayloadBuffers, aligned

LARGE = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def idle_bytes(buffers: PayloadBuffers) -> int:
    """What is kept for the next that takes; the next would collect what has come back."""
    buffers._collect()
    return sum(storage.nbytes for storage in buffers._idle)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 65_535, 65_536, 1_000_001])
def test_buffers_are_aligned_flat_and_writable(size):
    view = PayloadBuffers(0).take(size)
    assert address(view) % 64 == 0
    assert (view.nbytes, view.format, view.readonly, view.contiguous) == (size, "B", False, True)
    assert aligned(size).nbytes == size


def test_a_buffer_comes_back_when_the_last_view_is_gone():
    buffers = PayloadBuffers(10 * LARGE)
    view = buffers.take(LARGE)
    where = address(view)
    assert idle_bytes(buffers) == 0
    del view
    assert idle_bytes(buffers) == LARGE
    assert address(buffers.take(LARGE - 100)) == where  # a slightly smaller one shares it


@pytest.mark.parametrize(
    "look",
    [
        lambda view: view[10:20],
        lambda view: view.cast("f"),
        lambda view: np.frombuffer(view, np.float32)[3:],
        lambda view: np.asarray(view)[5:].reshape(-1, 1),
        lambda view: torch.frombuffer(view, dtype=torch.float32)[4:].view(torch.int32),
        lambda view: torch.from_numpy(np.frombuffer(view, np.float32)),
    ],
    ids=["slice", "cast", "frombuffer", "asarray", "torch", "from_numpy"],
)
def test_whoever_looks_into_a_buffer_keeps_it(look):
    buffers = PayloadBuffers(10 * LARGE)
    view = buffers.take(LARGE)
    where = address(view)
    seen = look(view)
    del view
    gc.collect()
    assert idle_bytes(buffers) == 0
    assert address(buffers.take(LARGE)) != where
    del seen
    assert idle_bytes(buffers) == 2 * LARGE


def test_idle_buffers_are_bounded_and_the_oldest_go_first():
    buffers = PayloadBuffers(3 * LARGE)
    views = [buffers.take(LARGE) for _ in range(3)] + [buffers.take(2 * LARGE)]
    del views
    assert idle_bytes(buffers) <= 3 * LARGE
    nothing_kept = PayloadBuffers(0)
    nothing_kept.take(LARGE)
    assert idle_bytes(nothing_kept) == 0


def test_views_may_die_on_other_threads():
    buffers = PayloadBuffers(100 * LARGE)

    def hold_and_drop(views: list[memoryview]) -> None:
        views.clear()

    for _ in range(20):
        views = [buffers.take(LARGE) for _ in range(5)]
        thread = threading.Thread(target=hold_and_drop, args=(views,))
        thread.start()
        buffers.take(LARGE)
        thread.join()
    assert idle_bytes(buffers) <= 12 * LARGE
