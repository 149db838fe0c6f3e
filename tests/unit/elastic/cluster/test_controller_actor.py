"""The controller actor's own threads; Ray itself is met in tests/cluster."""

import errno
from pathlib import Path

import pytest

from elastic.cluster import controller_actor
from elastic.cluster.controller_actor import ControllerActor
from elastic.rundir import RunDirectory, hold


def test_a_lock_that_can_t_be_read_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: RunDirectory) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    actor = object.__new__(ControllerActor)
    actor._run = RunDirectory(tmp_path)
    with hold(actor._run):
        assert not actor._is_orphaned()
        with monkeypatch.context() as patched:
            patched.setattr(controller_actor, "holder", unreadable)
            assert not actor._is_orphaned()
    assert actor._is_orphaned()
