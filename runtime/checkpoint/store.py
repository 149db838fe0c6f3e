"""Where checkpoints lie: a few verbs over named objects, and a local directory that has them.

A put is whole or nothing: written under a temporary name that is its own, flushed to the disk, then renamed. So
two writers of one key can't harm each other; the last rename wins. A key is a relative path of plain names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from dataloader.errors import DataError, HostError, InternalError

KEY_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
_UNFINISHED = ".tmp"  # such names also start with a dot, so no key can be one


class Store(Protocol):
    """Named objects. HostError when the place fails, DataError when an object isn't there."""

    def put(self, key: str, chunks: Iterable[Any]) -> None:
        """Write the buffers, in order, as one object: whole or not at all."""

    def get(self, key: str) -> bytes: ...

    def size(self, key: str) -> int | None:
        """In bytes; None if there is no such object."""

    def find(self) -> list[str]:
        """All keys, sorted; unfinished puts don't show."""

    def delete(self, key: str) -> None:
        """Nothing happens if it is gone already."""

    def sweep(self, stale: Callable[[str], bool]) -> None:
        """Remove the unfinished puts of those keys: what dead writers left behind."""

    def where(self, key: str) -> str:
        """How to name the object to a person."""


class LocalStore:
    """A directory. It is made at the first put."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, key: str, chunks: Iterable[Any]) -> None:
        write_atomic(self._path(key), chunks)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"{path}: missing; use a checkpoint that is whole") from None
        except OSError as error:
            raise HostError(f"{path}: can't be read: {error.strerror}; check the disk and the permissions") from error

    def size(self, key: str) -> int | None:
        try:
            return self._path(key).stat().st_size
        except OSError:
            return None

    def find(self) -> list[str]:
        return sorted(self._key(path) for path in self._files() if not _is_unfinished(path))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._remove_empty(path.parent)

    def sweep(self, stale: Callable[[str], bool]) -> None:
        for path in [path for path in self._files() if _is_unfinished(path)]:
            if stale(self._key(path.with_name(path.name[1:].rsplit(".", 2)[0]))):
                path.unlink(missing_ok=True)
                self._remove_empty(path.parent)

    def where(self, key: str) -> str:
        return str(self._path(key))

    def _path(self, key: str) -> Path:
        if not re.fullmatch(KEY_PATTERN, key):
            raise InternalError(f"{key!r} is no name for an object in a checkpoint store")
        return self.root / key

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self.root):
            yield from (Path(folder, name) for name in names)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:  # not empty, or another has removed it
                return
            folder = folder.parent


def may_pass(error: HostError) -> bool:
    """Whether the same write may work later: the machine refused it, and not we."""
    return isinstance(error.__cause__, OSError)


def write_atomic(path: Path, chunks: Iterable[Any]) -> None:
    """Write buffers to `path`: readers see the old file or the whole new one, also after a power cut.

    HostError names the file and what the machine says, and leaves nothing behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}{_UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # the file's own error is the one to tell
                temporary.unlink()
        _flush_folder(path.parent)
    except OSError as error:
        cure = "free some space there or choose another run.dir"
        raise HostError(f"{path}: can't be written: {error.strerror or error}; {cure}") from error


def _flush_folder(folder: Path) -> None:
    """Make a rename durable, and the folder's own entry too."""
    for directory in (folder, folder.parent):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(_UNFINISHED)
