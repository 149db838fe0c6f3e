"""The samples of a job with several sources, as a pure function of the sample's global index.

    sample k ──stages──▶ (source, number in that source) ──epoch, order, window──▶ tokens

Nothing is divided among workers and nothing is remembered between calls but caches: the position of a job is its step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataloader.formats.token_file import Integers
from dataloader.source import TokenSource
from dataloader.stages import Stages

_BLOCK = 1024  # samples whose sources are worked out at once: as cheap as one alone


class MixedStream:
    """`tokens` has the face of dataloader/stream.py's. Belongs to one thread, as its sources do."""

    def __init__(self, sources: Sequence[TokenSource], stages: Stages) -> None:
        if [source.name for source in sources] != [source.name for source in stages.sources]:
            raise ValueError("the stages are of other sources")
        self.sources, self.stages = tuple(sources), stages
        self.seq_len = sources[0].seq_len
        self._block: tuple[int, Integers, Integers] | None = None  # (number, sources, numbers in them)

    def tokens(self, first: int, count: int) -> Integers:
        """Samples [first, first + count) by global index: int64 [count, seq_len + 1], a fresh array.

        DataError where no source has anything left.
        """
        if first < 0 or count < 0:
            raise ValueError(f"samples [{first}, {first + count}): a global index is 0 or more")
        out = np.empty((count, self.seq_len + 1), dtype=np.int64)
        for row in range(count):
            source, number = self.place(first + row)
            out[row] = self.sources[source].read(number)
        return out

    def place(self, index: int) -> tuple[int, int]:
        """(source, number in that source) of the sample of this global index."""
        self.stages.refuse_beyond_the_end(index)
        number, within = divmod(index, _BLOCK)
        if self._block is None or self._block[0] != number:
            start, end = number * _BLOCK, (number + 1) * _BLOCK
            if self.stages.end is not None:
                end = min(end, self.stages.end)
            self._block = number, *self.stages.at(np.arange(start, end, dtype=np.int64))
        return int(self._block[1][within]), int(self._block[2][within])
