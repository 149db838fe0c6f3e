"""The local store: whole or nothing, whoever writes, whatever happens."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from dataloader.errors import DataError, HostError, InternalError
from runtime.checkpoint.store import LocalStore, write_atomic


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "deep" / "store")


def unfinished(store):
    return [path.name for path in store.root.rglob("*.tmp")]


def test_the_verbs(store):
    assert store.find() == []
    assert store.size("a/x.bin") is None
    store.put("a/x.bin", [b"12", memoryview(b"345")])
    store.put("b.bin", [])
    assert (store.get("a/x.bin"), store.size("a/x.bin"), store.size("b.bin")) == (b"12345", 5, 0)
    assert store.find() == ["a/x.bin", "b.bin"]
    store.put("a/x.bin", [b"6"])
    assert store.get("a/x.bin") == b"6"
    store.delete("a/x.bin")
    store.delete("a/x.bin")
    assert store.find() == ["b.bin"]
    assert not (store.root / "a").exists()
    with pytest.raises(DataError, match=r"x\.bin: missing"):
        store.get("a/x.bin")


@pytest.mark.parametrize("key", ["../x", "/etc/x", "a/../x", ".x", "a/.x", "", "a//b", "a\\b", "x\n"])
def test_a_key_cannot_leave_the_store(store, key):
    with pytest.raises(InternalError):
        store.put(key, [b""])
    with pytest.raises(InternalError):
        store.get(key)


def test_a_put_that_fails_half_way_leaves_the_old_object(store):
    store.put("x", [b"old"])

    def chunks():
        yield b"new"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(HostError, match=r"/x: can't be written: No space left on device; free some space"):
        store.put("x", chunks())
    assert store.get("x") == b"old"
    assert unfinished(store) == []


def test_a_put_whose_flush_fails_leaves_the_old_object(store, monkeypatch):
    store.put("x", [b"old"])

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(HostError, match="Input/output error"):
        store.put("x", [b"new"])
    assert store.get("x") == b"old"
    assert unfinished(store) == []


def test_two_writers_of_one_key_do_not_meet(store):
    """The second puts the whole object while the first is half way; the first then finishes."""

    def first():
        yield b"first, "
        store.put("v1/x", [b"second"])
        assert store.get("v1/x") == b"second"
        yield b"to its end"

    store.put("v1/x", first())
    assert store.get("v1/x") == b"first, to its end"
    assert unfinished(store) == []


def test_a_reader_of_the_old_object_is_not_disturbed(store):
    store.put("x", [b"old"])
    with open(store.root / "x", "rb") as file:
        store.put("x", [b"new, longer"])
        assert file.read() == b"old"
    assert store.get("x") == b"new, longer"


def test_a_place_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HostError, match="file/x/y: can't be written: Not a directory"):
        write_atomic(tmp_path / "file" / "x" / "y", [b""])


def test_a_killed_writer_leaves_nothing_that_shows(store):
    """SIGKILL between two chunks, in a real process."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from runtime.checkpoint.store import LocalStore\n"
        "def chunks():\n"
        "    yield b'x' * 100_000\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "LocalStore(Path(sys.argv[1])).put('v00000002/x', chunks())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.find() == []
    assert len(unfinished(store)) == 1
    store.sweep(lambda key: key != "v00000002/x")
    assert len(unfinished(store)) == 1
    store.sweep(lambda key: key == "v00000002/x")
    assert unfinished(store) == []
    assert os.listdir(store.root) == []


def test_files_are_readable_as_the_umask_says(store):
    before = os.umask(0o022)
    try:
        store.put("x", [b""])
    finally:
        os.umask(before)
    assert (store.root / "x").stat().st_mode & 0o777 == 0o644
