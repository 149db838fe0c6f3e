"""How files are cut into samples, and in which order these come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloader.errors import DataError
from dataloader.formats.bare import BareWriter
from dataloader.formats.datatrove import DatatroveWriter
from dataloader.formats.token_file import TokenFile
from dataloader.mapped import MappedFiles
from dataloader.source import Packing, TokenSource, Window


def files_of(directory: Path, counts: list[int]) -> list[TokenFile]:
    """Ids that tell where they are: file number * 1000 + place."""
    files = []
    for number, count in enumerate(counts):
        writer = BareWriter(directory / f"{number}.bin", "u16")
        writer.add(list(range(1000 * number, 1000 * number + count)))
        files.append(writer.finish())
    return files


def one_epoch(source: TokenSource, epoch: int = 0) -> list[list[int]]:
    return [source.read(epoch * source.samples + n).tolist() for n in range(source.samples)]


@pytest.mark.parametrize(
    ("window", "samples"), [("overlap_one", [[0, 1, 2, 3], [3, 4, 5, 6]]), ("disjoint", [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_windows(tmp_path: Path, window: Window, samples: list[list[int]]) -> None:
    source = TokenSource("a", files_of(tmp_path, [9]), 3, 1, MappedFiles(), window)
    assert sorted(one_epoch(source)) == samples


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["overlap_one", "disjoint"]),
)
def test_every_epoch_has_every_sample_once(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], seq_len: int, window: Window
) -> None:
    stride = seq_len + (window == "disjoint")
    due = [
        list(range(1000 * n + start, 1000 * n + start + seq_len + 1))
        for n, count in enumerate(counts)
        for start in range(0, count - seq_len, stride)
    ]
    files = files_of(tmp_path_factory.mktemp("s"), counts)
    if not due:
        with pytest.raises(DataError, match=rf"data\.sources\.a: no sample of {seq_len + 1} tokens"):
            TokenSource("a", files, seq_len, 1, MappedFiles(), window)
        return
    source = TokenSource("a", files, seq_len, 1, MappedFiles(), window)
    for epoch in (0, 1, 7):
        assert sorted(one_epoch(source, epoch)) == due


def test_epochs_sources_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    files = files_of(tmp_path, [401])
    orders = {
        (name, seed, epoch): tuple(map(tuple, one_epoch(TokenSource(name, files, 4, seed, MappedFiles()), epoch)))
        for name in ("web", "books")
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == len(orders)


def test_whole_documents(tmp_path: Path) -> None:
    writer = DatatroveWriter(tmp_path / "a.ds", "u16")
    rng = np.random.default_rng(1)
    for length in rng.integers(1, 12, size=400).tolist():
        writer.add([*range(1, length), 0])
    packing: Packing = "best_fit"
    source = TokenSource("a", [writer.finish()], 15, 1, MappedFiles(), packing=packing)
    whole = sum(int(np.count_nonzero(np.diff(source.read(n), prepend=0) > 1)) == 0 for n in range(source.samples))
    assert whole > 0.9 * source.samples  # ids that jump are a document that was cut


def test_packing_needs_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.bin: raw knows no documents, which packing: best_fit needs"):
        TokenSource("a", files_of(tmp_path, [100]), 3, 1, MappedFiles(), packing="best_fit")
