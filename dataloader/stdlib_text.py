"""The text of the running Python's standard library: a real corpus that every machine has already.

What counts: every `*.py` below the standard library's directory, in the order of their paths, except
    - its own tests, and what isn't part of it (installed packages, byte code);
    - files that the build or the distributor of this Python wrote, as they differ from machine to machine.
Validation or train is decided file by file from a hash of the path alone: about one file in VALID_ONE_IN, and the same
ones whatever else there is.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from dataloader.dataset import Progress
from dataloader.errors import DataError

RULES_VERSION = 1  # part of the cache key: raise it when other files are chosen or split differently
VALID_ONE_IN = 20

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_SKIPPED_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})
_CURE = "use a Python that has its library as source files, or set data.path to a prepared dataset"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file by its path below the library, with "/" between the parts, and its bytes."""

    path: str
    content: bytes

    @property
    def split(self) -> str:
        return split_of(self.path)

    @property
    def text(self) -> str:
        """UTF-8; the few bytes that aren't become U+FFFD, so that any file gives the same text everywhere."""
        return self.content.decode("utf-8", errors="replace")


def library_root() -> Path:
    """Where the running Python (not its virtual environment) has its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(path: str) -> str:
    """ "valid" for about one path in VALID_ONE_IN, else "train"."""
    number = int.from_bytes(blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
    return "valid" if number % VALID_ONE_IN == 0 else "train"


def read_library(root: Path, progress: Progress | None = None) -> list[SourceFile]:
    """All source files in order of path. Raises DataError where there are none or one can't be read."""
    if not root.is_dir():
        raise DataError(f"{root}: the standard library isn't a directory here; {_CURE}")
    paths = sorted(_source_paths(root))
    files = []
    for number, path in enumerate(paths, start=1):
        try:
            files.append(SourceFile(path, (root / path).read_bytes()))
        except OSError as error:
            raise DataError(f"{root / path}: can't be read: {error.strerror}; {_CURE}") from None
        if progress is not None:
            progress("read", number, len(paths))
    for split in ("train", "valid"):
        if not any(file.content and file.split == split for file in files):
            raise DataError(f"{root}: {len(files)} source files found, none of them for the {split} split; {_CURE}")
    return files


def _source_paths(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _is_skipped_folder(name)]
        for name in names:
            if name.endswith(".py") and name not in _SKIPPED_FILES and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                if path.is_file():
                    yield path.relative_to(root).as_posix()


def _is_skipped_folder(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith("config-")
