"""Files mapped into memory: a bounded number of them, and a bounded part of their pages.

Hundreds of shards must neither use up file descriptors (each map holds one) nor keep every page that was ever read. So
the maps that were used least recently are closed, and after so many bytes the kernel is told that the pages may go.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from pathlib import Path

from dataloader.errors import DataError

# A fault maps what lies around it as well, if the kernel has it: 64 KiB is its usual unit.
FAULT_AROUND_BYTES = 64 * 1024
RESIDENT_BYTES = 32 * 1024 * 1024


class MappedFiles:
    """Belongs to one thread."""

    def __init__(self, open_files: int = 64) -> None:
        self._open_files = max(1, open_files)
        self._maps: OrderedDict[Path, mmap.mmap] = OrderedDict()
        self._touched_bytes = 0

    def map(self, path: Path, size_bytes: int, touches_bytes: int) -> mmap.mmap:
        """The file, which must have this size still, of which the caller is about to read so much.

        Valid until the next call. DataError, naming the file, where it can't be mapped or has another size: touching a
        page beyond the end of a file that has shrunk would kill the process.
        """
        mapped = self._maps.get(path)
        if mapped is None:
            while len(self._maps) >= self._open_files:
                self._maps.popitem(last=False)[1].close()
            mapped = self._maps[path] = _map(path)
        self._maps.move_to_end(path)
        if (found := mapped.size()) != size_bytes:
            how = "cut short" if found < size_bytes else "longer"
            raise DataError(
                f"{path}: had {size_bytes} bytes when it was opened, and now {found} ({how}); copy it again"
            )
        self._touched_bytes += touches_bytes + FAULT_AROUND_BYTES
        if self._touched_bytes > RESIDENT_BYTES:
            self._let_go()
        return mapped

    def close(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()

    def _let_go(self) -> None:
        """The pages leave this process; the kernel's cache keeps them while it has room."""
        self._touched_bytes = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; it was there when it was opened") from None
    except ValueError:
        raise DataError(f"{path}: empty; it was not when it was opened") from None
    except OSError as error:
        raise DataError(f"{path}: can't be mapped into memory: {error.strerror}") from None
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # samples are scattered: reading ahead would read what nobody asked for
    return mapped
