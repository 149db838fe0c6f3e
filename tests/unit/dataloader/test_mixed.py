"""Samples of several sources: each once an epoch, in their shares, whoever asks for what in whatever order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dataloader.errors import DataError
from dataloader.formats.bare import BareWriter, open_bare
from dataloader.mapped import MappedFiles
from dataloader.mixed import MixedStream
from dataloader.source import TokenSource
from dataloader.stages import Source, Stage, Stages

SEQ_LEN = 3


def stream_of(
    directory: Path, sizes: dict[str, int], stages: list[Stage], epochs: dict[str, int] | None = None
) -> MixedStream:
    """Ids that tell their source and place: 1000 x source + place."""
    maps, sources = MappedFiles(), []
    for n, (name, size) in enumerate(sizes.items()):
        path = directory / f"{name}.bin"
        if not path.exists():
            writer = BareWriter(path, "u16")
            writer.add([1000 * n + i for i in range(size * SEQ_LEN + 1)])
            writer.finish()
        sources.append(TokenSource(name, [open_bare(path, "u16")], SEQ_LEN, 7, maps))
    limits = epochs or {}
    return MixedStream(sources, Stages([Source(s.name, s.samples, limits.get(s.name)) for s in sources], stages))


def test_shares_and_epochs(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, {"web": 60, "books": 20}, [Stage(0, (3, 1))])
    rows = stream.tokens(0, 80).tolist()
    assert sorted(rows) == sorted(
        [1000 * n + start + i for i in range(SEQ_LEN + 1)]
        for n, size in ((0, 60), (1, 20))
        for start in range(0, size * SEQ_LEN, SEQ_LEN)
    )
    again = stream.tokens(80, 80).tolist()
    assert sorted(again) == sorted(rows)
    assert again != rows


def test_any_part_by_anyone_gives_the_same(tmp_path: Path) -> None:
    """Over random splits among workers, as after kills and resumes."""
    stages = [Stage(0, (3, 1, 0)), Stage(500, (1, 1, 2))]
    sizes = {"web": 90, "books": 20, "math": 33}
    whole = stream_of(tmp_path, sizes, stages).tokens(0, 3000)
    chance = random.Random(1)
    for _ in range(20):
        mine = stream_of(tmp_path, sizes, stages)
        for _ in range(20):
            first, count = chance.randrange(2900), chance.randrange(100)
            assert (mine.tokens(first, count) == whole[first : first + count]).all()


def test_data_that_is_exhausted_is_said_and_what_was_left_came_out(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, {"a": 10, "b": 5}, [Stage(0, (2, 1))], {"a": 1, "b": 1})
    assert len(stream.tokens(0, 15)) == 15
    with pytest.raises(DataError, match="at sample 15 every source of the mixture has been read"):
        stream.tokens(14, 2)
