"""The writer thread: what it writes is told of once it is durable, and so is whatever went wrong, of any kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dataloader.errors import HostError
from runtime.checkpoint.format import decode_state
from runtime.checkpoint.store import LocalStore, may_pass
from runtime.saving import Delayed, Saved, Saver
from runtime.shards.layout import flat_layout
from runtime.shards.state import HoldingState, PieceState

LAYOUT = flat_layout([[("w", (3, 16))]], 2)
SECONDS = 10.0


class Desk:
    """A saver, and what wakes when it has something to tell."""

    def __init__(self, root: Path, write_first: Callable[[], None] = lambda: None) -> None:
        self.root, self.woken = root, threading.Semaphore(0)
        self.saver = Saver(
            LocalStore(root), root / "weights" / "model.safetensors", LAYOUT, write_first, self.woken.release
        )

    def next(self) -> Saved:
        assert self.woken.acquire(timeout=SECONDS), "the writer thread never told of it"
        (saved,) = self.saver.collect()
        assert isinstance(saved, Saved)
        return saved

    def all(self, count: int) -> list[Saved | Delayed]:
        """So many words of it."""
        told: list[Saved | Delayed] = []
        while len(told) < count:
            assert self.woken.acquire(timeout=SECONDS), "the writer thread never told of it"
            told += self.saver.collect()
        return told


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def state(version: int = 4) -> HoldingState:
    return HoldingState(version, torch.arange(16.0), (PieceState({"step": torch.tensor(4.0)}),))


def test_a_shard_is_told_of_with_its_entry_once_it_lies_there(desk: Desk) -> None:
    desk.saver.save(4, 1, state().pack())
    saved = desk.next()
    assert (saved.version, saved.shard, saved.weights, saved.error) == (4, 1, False, None)
    assert saved.file is not None
    shard, written = decode_state((desk.root / saved.file["file"]).read_bytes(), "here")
    assert shard == saved.file["shard"] == 1
    assert written.digest() == state().digest() == bytes.fromhex(saved.file["digest"])
    assert desk.saver.collect() == []


def test_the_final_weights_are_told_of(desk: Desk) -> None:
    desk.saver.write_weights(9, torch.arange(48.0))
    assert desk.next() == Saved(9, weights=True)
    (weights,) = safetensors.torch.load_file(desk.root / "weights" / "model.safetensors").values()
    assert torch.equal(weights, torch.arange(48.0).view(3, 16))


def test_the_first_checkpoint_is_written_on_the_saver_s_thread_and_told_of(tmp_path: Path) -> None:
    threads: list[str] = []
    desk = Desk(tmp_path, lambda: threads.append(threading.current_thread().name))
    desk.saver.initialise()
    assert desk.next() == Saved(0)
    assert threads[0].startswith("saver")


def test_pieces_are_told_of_in_the_order_in_which_they_were_asked_for(desk: Desk) -> None:
    for shard in (1, 0, 1):
        desk.saver.save(4, shard, state().pack())
    assert [saved.shard for saved in desk.all(3)] == [1, 0, 1]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [HostError("the disk is full"), MemoryError(), RuntimeError("nobody expected this")])
def test_whatever_goes_wrong_is_told_of_and_the_next_piece_is_written(tmp_path: Path, error: Exception) -> None:
    desk = Desk(tmp_path, raising(error))
    desk.saver.initialise()
    saved = desk.next()
    assert (saved.version, saved.error) == (0, error)
    desk.saver.save(4, 0, state().pack())
    assert desk.next().error is None


def test_weights_that_can_t_be_written_name_their_version(desk: Desk) -> None:
    desk.saver.write_weights(6, torch.zeros(3))
    saved = desk.next()
    assert (saved.version, type(saved.error)) == (6, ValueError)


def test_a_full_disk_is_told_of_once_and_waited_for(desk: Desk) -> None:
    desk.saver.fail_for(0.5, "no space left on device")
    desk.saver.save(4, 1, state().pack())
    (delayed,) = desk.all(1)
    assert isinstance(delayed, Delayed)
    assert (delayed.version, delayed.shard, delayed.given_up) == (4, 1, False)
    assert "no space left on device" in delayed.reason
    (saved,) = desk.all(1)
    assert isinstance(saved, Saved)
    assert (saved.version, saved.shard, saved.error) == (4, 1, None)


def test_an_older_version_is_given_up_while_the_disk_is_full(desk: Desk) -> None:
    desk.saver.fail_for(0.5, "no space left on device")
    desk.saver.save(4, 1, state(4).pack())
    desk.saver.save(5, 1, state(5).pack())
    told = desk.all(1)
    while not isinstance(told[-1], Saved):
        told += desk.all(1)
    assert any(isinstance(what, Delayed) and what.given_up and what.version == 4 for what in told)
    assert told[-1].version == 5


def test_a_real_full_disk_may_pass_and_a_missing_file_may_not(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("where a directory is needed")
    with pytest.raises(HostError) as caught:
        LocalStore(blocked).put("v00000001/x", [b"data"])
    assert may_pass(caught.value)
    assert not may_pass(HostError("a file of the checkpoint is missing"))
