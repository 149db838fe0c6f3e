"""The one order of a job's samples, as a pure function of the sample's global index.

Windows: in each token file, window w is the tokens [w * seq_len, w * seq_len + seq_len + 1), so two neighbours share
one token and every token but a file's first is predicted exactly once. Windows never cross files; a rest that doesn't
fill a window is left out. They are numbered through the files in order.

Order: with n windows, sample k belongs to epoch e = k // n and is window `Permutation(n, (seed, e)).at(k % n)`. So
every window is used once per epoch, and each epoch has an order of its own.

Nothing is divided among workers and nothing is remembered between calls but caches: the position of a job is its step.

Digests: a micro-batch's is xxh3_128 over its token ids as little-endian int64, row by row. A logical rank's is the
fold of its micro-batches' in order, and a step's is the fold of its ranks' in order, where a fold is xxh3_128 over
the digests put end to end. Both levels are always folded, also over a single digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataloader.errors import DataError
from dataloader.permutation import Permutation
from dataloader.shards import TokenShards

# Places whose order is computed at once: as cheap as one place alone, and enough for some steps.
_BLOCK = 1024


class SampleStream:
    """The samples of one split in shuffled order, without end. Needs the same few KiB however large the split is.

    seq_len            tokens that a sample predicts; a sample has one more
    samples_per_epoch  number of windows

    Raises DataError where no file of the split has a whole window. Belongs to one thread, as its shards do.
    """

    def __init__(self, shards: TokenShards, seq_len: int, seed: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len}: a sample predicts at least one token")
        self.shards, self.seq_len, self.seed = shards, seq_len, seed
        windows = [max(0, tokens - 1) // seq_len for tokens in shards.counts]
        self._first_window = np.asarray([0, *accumulate(windows)], dtype=np.int64)  # [files + 1]
        self.samples_per_epoch = int(self._first_window[-1])
        if self.samples_per_epoch == 0:
            raise DataError(
                f"{shards.directory}: split {shards.split!r} has {shards.tokens} tokens, at most "
                f"{max(shards.counts, default=0)} in one file, and a sample of data.seq_len {seq_len} needs "
                f"{seq_len + 1} in one file; give more data or a smaller data.seq_len"
            )
        self._permutation: tuple[int, Permutation] | None = None  # of one epoch
        self._block: tuple[int, int, NDArray[np.int64]] | None = None  # (epoch, number, windows)

    def tokens(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples [first, first + count) by global index: int64 [count, seq_len + 1], a fresh array."""
        if first < 0 or count < 0:
            raise ValueError(f"samples [{first}, {first + count}): a global index is 0 or more")
        out = np.empty((count, self.seq_len + 1), dtype=np.int64)
        for row in range(count):
            window = self.window(first + row)
            file = int(np.searchsorted(self._first_window, window, side="right")) - 1
            start = (window - int(self._first_window[file])) * self.seq_len
            out[row] = self.shards.read(file, start, self.seq_len + 1)
        return out

    def window(self, index: int) -> int:
        """The window, in [0, samples_per_epoch), that is the sample of this global index."""
        epoch, place = divmod(index, self.samples_per_epoch)
        number, within = divmod(place, _BLOCK)
        if self._block is None or self._block[:2] != (epoch, number):
            if self._permutation is None or self._permutation[0] != epoch:
                key = f"{self.seed}/{epoch}".encode()
                self._permutation = epoch, Permutation(self.samples_per_epoch, key)
            places = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, self.samples_per_epoch), dtype=np.int64)
            self._block = epoch, number, self._permutation[1].at(places)
        return int(self._block[2][within])


def data_digest(tokens: NDArray[np.int64]) -> bytes:
    """A micro-batch's digest (16 bytes): xxh3_128 of its ids as little-endian int64, in C order."""
    plain = np.ascontiguousarray(tokens, dtype="<i8")
    return xxhash.xxh3_128_digest(plain.tobytes())


def fold_digests(digests: Iterable[bytes]) -> bytes:
    """One digest (16 bytes) for a sequence of them: xxh3_128 of them put end to end."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def step_digest(
    stream: SampleStream, first: int, micro_batch: int, micro_batches_per_rank: int, logical_ranks: int
) -> bytes:
    """The data digest (16 bytes) of the step whose global batch starts at sample `first`, from the data files alone.

    `micro_batch` in samples; micro-batch m = rank * micro_batches_per_rank + j of the step is the samples
    [first + m * micro_batch, + micro_batch). Folded as the module says: what the workers' own digests must give.
    """
    ranks = []
    for rank in range(logical_ranks):
        start = first + rank * micro_batches_per_rank * micro_batch
        parts = (
            data_digest(stream.tokens(start + j * micro_batch, micro_batch)) for j in range(micro_batches_per_rank)
        )
        ranks.append(fold_digests(parts))
    return fold_digests(ranks)
