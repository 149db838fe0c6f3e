"""A directory that is built once per key: whole or not there, whoever is killed and whoever else builds it.

<cache>/<name>/            a whole entry; it appears by one rename, when all of it is on the disk
<cache>/<name>.lock        held with flock while it is built; the kernel lets go when the builder dies
<cache>/.<name>.<host>.*   being built, or left by a killed builder; the next builder on that host removes it
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dataloader.durable import sync
from dataloader.errors import DataError, HostError


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/everstep, or ~/.cache/everstep where that isn't set to an absolute path."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "everstep"
    try:
        return Path.home() / ".cache" / "everstep"
    except RuntimeError:
        raise HostError(
            "no home directory to keep the prepared data in; set data.cache_dir or XDG_CACHE_HOME"
        ) from None


def built_once(
    cache: Path, name: str, build: Callable[[Path], None], check: Callable[[Path], object], waiting: Callable[[], None]
) -> Path:
    """The entry `name` of the cache, built by `build(empty directory)` if it isn't there or `check` raises DataError.

    `waiting` is called once if another process is building the same entry; then this one waits for it. Raises HostError
    where the cache can't be written.
    """
    entry = cache / name
    with _host_error_names(cache):
        cache.mkdir(parents=True, exist_ok=True)
        if _is_good(entry, check):
            return entry
        with _lock(cache / f"{name}.lock", waiting):
            if not _is_good(entry, check):
                _build(entry, build, check)
                check(entry)
    return entry


def _is_good(entry: Path, check: Callable[[Path], object]) -> bool:
    if not entry.exists():
        return False
    try:
        check(entry)
    except DataError:
        return False
    return True


def _build(entry: Path, build: Callable[[Path], None], check: Callable[[Path], object]) -> None:
    """With the lock held; but some network file systems share no locks, so another host may be doing the same."""
    prefix = f".{entry.name}.{socket.gethostname()}."
    for left in entry.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))
    try:
        whole = place / "new"
        whole.mkdir()
        build(whole)
        sync(whole)
        if _is_good(entry, check):
            return  # the other host was faster, and its jobs may be reading it already
        if entry.exists():
            entry.rename(place / "damaged")
        try:
            whole.rename(entry)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # those say: faster by a hair
                raise
        sync(entry.parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Exclusive among all processes and threads. The empty file stays: removing it would let two in."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _host_error_names(cache: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # no file gives it: it comes from whoever shows the progress
    except OSError as error:
        raise HostError(
            f"data can't be prepared in {cache}: {error.strerror or error}; "
            "set data.cache_dir to a directory that can be written and has room"
        ) from error
