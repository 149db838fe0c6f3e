"""One source of tokens as numbered samples: how its files are cut into samples, and in which order these come.

    window       a sample of seq_len predicted tokens has seq_len + 1, since each is predicted from the one before
      overlap_one  every seq_len tokens a sample begins, so neighbours share one token, and every token but a file's
                   first is predicted once (Megatron's GPT dataset, llm.c)
      disjoint     samples share nothing, so one token in seq_len + 1 is never predicted (datatrove, nanotron)
    packing
      end_to_end   wherever the window falls
      best_fit     whole documents where they can be (dataloader/packing.py); its samples are always disjoint

Samples never cross files; a rest that fills none is left out. Number k of a source is in epoch k // samples, and each
epoch has an order of its own, keyed by (seed, the source's name, epoch): so no two sources run in lockstep.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np

from dataloader.errors import DataError
from dataloader.formats.token_file import Integers, TokenFile
from dataloader.mapped import MappedFiles
from dataloader.packing import PackedRun, Piece
from dataloader.permutation import Permutation

Window: TypeAlias = Literal["overlap_one", "disjoint"]
Packing: TypeAlias = Literal["end_to_end", "best_fit"]


class TokenSource:
    """`samples` in an epoch, each of seq_len + 1 tokens; DataError if there is none. One thread's, as its `maps`."""

    def __init__(
        self,
        name: str,
        files: Sequence[TokenFile],
        seq_len: int,
        seed: int,
        maps: MappedFiles,
        window: Window = "overlap_one",
        packing: Packing = "end_to_end",
    ) -> None:
        self.name, self.files, self.seq_len, self.seed = name, tuple(files), seq_len, seed
        self._maps, self._stride = maps, seq_len + (window == "disjoint")
        self._packed: list[PackedRun] | None = None
        if packing == "best_fit":
            self._packed = [self._packed_run(file) for file in files]
            counts = [run.samples for run in self._packed]
        else:
            counts = [max(0, file.tokens - seq_len - 1 + self._stride) // self._stride for file in files]
        self._first = np.asarray([0, *accumulate(counts)], dtype=np.int64)  # [files + 1]
        self.samples = int(self._first[-1])
        if self.samples == 0:
            longest = max((file.tokens for file in files), default=0)
            raise DataError(
                f"data.sources.{name}: no sample of {seq_len + 1} tokens: {len(files)} files, the longest of {longest} "
                "tokens; give more data or a smaller data.seq_len"
            )
        self._order: tuple[int, Permutation] | None = None

    def read(self, number: int) -> Integers:
        """The tokens of sample `number`, counted over all epochs: int64 [seq_len + 1], a fresh array."""
        pieces, file = self.pieces(number)
        return np.concatenate([file.read(self._maps, start, length) for start, length in pieces])

    def pieces(self, number: int) -> tuple[list[Piece], TokenFile]:
        """Where the tokens of that sample lie, in order, and in which file."""
        epoch, place = divmod(number, self.samples)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(self.samples, f"{self.seed}/{self.name}/{epoch}".encode())
        sample = int(self._order[1].at(np.asarray([place]))[0])
        which = int(np.searchsorted(self._first, sample, side="right")) - 1
        own, file = sample - int(self._first[which]), self.files[which]
        if self._packed is not None:
            return self._packed[which].sample(self._maps, own), file
        return [Piece(own * self._stride, self.seq_len + 1)], file

    def _packed_run(self, file: TokenFile) -> PackedRun:
        if file.ends is None:
            raise DataError(
                f"{file.path}: {file.format} knows no documents, which packing: best_fit needs; convert it to megatron "
                "or datatrove with `everstep data convert --end-of-text`, or leave packing out"
            )
        return PackedRun(file.tokens, file.ends, self.seq_len + 1)
