import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloader.errors import DataError
from dataloader.shards import TokenShards
from dataloader.stream import SampleStream, data_digest, fold_digests, step_digest

DOCUMENTS = [[(7 * d + i) % 998 + 1 for i in range(d % 70)] for d in range(120)]


def windows_by_hand(directory: Path, seq_len: int) -> list[list[int]]:
    """All windows in order of files, by the plain reading of the rule."""
    out = []
    for path in sorted(directory.glob("train-*.bin")):
        tokens = np.fromfile(path, dtype="<u2").tolist()
        start = 0
        while start + seq_len + 1 <= len(tokens):
            out.append(tokens[start : start + seq_len + 1])
            start += seq_len
    return out


@pytest.fixture
def directory(make_dataset) -> Path:
    return make_dataset(DOCUMENTS)


@pytest.fixture
def stream(directory) -> SampleStream:
    return SampleStream(TokenShards(directory, "train"), seq_len=8, seed=3)


@pytest.mark.parametrize("seq_len", [1, 2, 7, 8, 99])
def test_an_epoch_is_every_window_once(directory, seq_len):
    stream = SampleStream(TokenShards(directory, "train"), seq_len, seed=3)
    windows = windows_by_hand(directory, seq_len)
    assert stream.samples_per_epoch == len(windows)
    for epoch in (0, 1, 5):
        samples = stream.tokens(epoch * len(windows), len(windows))
        assert (samples.dtype, samples.shape) == (np.int64, (len(windows), seq_len + 1))
        assert sorted(samples.tolist()) == sorted(windows)
        order = [stream.window(epoch * len(windows) + place) for place in range(len(windows))]
        assert sorted(order) == list(range(len(windows)))
        assert samples.tolist() == [windows[number] for number in order]


def test_every_token_but_a_files_first_is_predicted_once(make_dataset):
    directory = make_dataset([list(range(1, 40)), list(range(40, 80))], tokens_per_file=40)  # two files, 40 and 41
    stream = SampleStream(TokenShards(directory, "train"), seq_len=3, seed=0)
    predicted = sorted(stream.tokens(0, stream.samples_per_epoch)[:, 1:].reshape(-1).tolist())
    assert predicted == sorted([*range(2, 40), 0, *range(41, 80)])  # file two: 40 is its first, its end is a rest


def test_windows_never_cross_files(make_dataset):
    directory = make_dataset([[1] * 9, [2] * 9, [3] * 9], tokens_per_file=10)
    stream = SampleStream(TokenShards(directory, "train"), seq_len=4, seed=0)
    for sample in stream.tokens(0, stream.samples_per_epoch).tolist():
        assert len(set(sample) - {0}) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.integers(0, 4000), st.lists(st.integers(0, 40), max_size=6))
def test_samples_are_a_pure_function_of_their_index(stream, first, counts):
    whole = stream.tokens(first, sum(counts))
    other = SampleStream(TokenShards(stream.shards.directory, "train", open_files=1), seq_len=8, seed=3)
    at, parts = first, []
    for count in counts:
        parts.append(other.tokens(at, count))
        at += count
    assert np.array_equal(whole, np.concatenate([np.empty((0, 9), dtype=np.int64), *parts]))


def test_asking_backwards_and_beyond_one_block_of_order_gives_the_same(make_dataset):
    directory = make_dataset([[i % 999 + 1 for i in range(6000)]], tokens_per_file=10_000)
    stream = SampleStream(TokenShards(directory, "train"), seq_len=2, seed=3)
    assert stream.samples_per_epoch == 3000
    forward = [stream.window(k) for k in range(7000)]
    assert [stream.window(k) for k in reversed(range(7000))] == forward[::-1]
    for epoch in range(2):
        assert sorted(forward[3000 * epoch : 3000 * (epoch + 1)]) == list(range(3000))


def test_epochs_and_seeds_have_orders_of_their_own(directory):
    def order(seed: int, epoch: int) -> list[int]:
        stream = SampleStream(TokenShards(directory, "train"), seq_len=2, seed=seed)
        n = stream.samples_per_epoch
        return [stream.window(epoch * n + place) for place in range(n)]

    orders = [order(seed, epoch) for seed in (0, 1, 11, 2**63 - 1) for epoch in (0, 1, 11)]
    n = len(orders[0])
    assert n > 1000
    for a in range(len(orders)):
        for b in range(a):
            assert sum(x == y for x, y in zip(orders[a], orders[b], strict=True)) < 10


def test_the_order_of_samples_is_a_format(stream):
    """A job that was begun must go on with the same samples."""
    n = stream.samples_per_epoch
    assert n == 456
    assert [stream.window(k) for k in (0, 1, 2, n, n + 1)] == [397, 204, 162, 216, 421]


def test_what_comes_out_can_be_written_to(stream):
    samples = stream.tokens(0, 2)
    samples[:] = 0
    assert stream.tokens(0, 2).any()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, -1)])
def test_negative_places_are_refused(stream, first, count):
    with pytest.raises(ValueError, match="0 or more"):
        stream.tokens(first, count)


def test_a_split_without_a_whole_window_is_refused(make_dataset):
    directory = make_dataset([[1] * 9] * 3, tokens_per_file=10)
    SampleStream(TokenShards(directory, "train"), seq_len=9, seed=0)
    with pytest.raises(DataError, match=r"'train' has 30 tokens, at most 10 in one file, .* data\.seq_len 10 needs 11"):
        SampleStream(TokenShards(directory, "train"), seq_len=10, seed=0)


def test_a_split_without_files_is_refused(make_dataset):
    with pytest.raises(DataError, match="has 0 tokens"):
        SampleStream(TokenShards(make_dataset([]), "train"), seq_len=1, seed=0)


def test_files_without_a_window_are_passed_over(make_dataset):
    directory = make_dataset([[], [1, 2, 3, 4], [], [5, 6, 7, 8], []], tokens_per_file=1)
    shards = TokenShards(directory, "train")
    assert shards.counts == (1, 5, 1, 5, 1)
    stream = SampleStream(shards, seq_len=4, seed=0)
    assert sorted(stream.tokens(0, 2).tolist()) == [[1, 2, 3, 4, 0], [5, 6, 7, 8, 0]]


# Digests


def test_a_digest_is_that_of_little_endian_int64_rows():
    tokens = np.arange(12, dtype=np.int64).reshape(3, 4)
    expected = xxhash.xxh3_128_digest(b"".join(int(i).to_bytes(8, "little") for i in range(12)))
    assert data_digest(tokens) == expected
    assert data_digest(np.asfortranarray(tokens)) == expected
    assert data_digest(np.repeat(tokens, 2, axis=1)[:, ::2]) == expected
    assert data_digest(tokens.astype(">i8")) == expected
    assert data_digest(tokens[::-1]) != expected  # rows that changed places


def test_a_fold_is_the_digest_of_digests_in_order():
    a, b = data_digest(np.array([[1]])), data_digest(np.array([[2]]))
    assert fold_digests([a, b]) == xxhash.xxh3_128_digest(a + b)
    assert len({fold_digests([a, b]), fold_digests([b, a]), fold_digests([a]), a}) == 4


def test_a_steps_digest_is_the_fold_of_ranks_of_the_fold_of_micro_batches(directory, stream):
    windows = windows_by_hand(directory, 8)
    micro_batch, per_rank, ranks = 3, 2, 4
    first = 5 * micro_batch * per_rank * ranks
    by_rank = []
    for rank in range(ranks):
        joined = b""
        for j in range(per_rank):
            start = first + (rank * per_rank + j) * micro_batch
            ids = [i for k in range(start, start + micro_batch) for i in windows[stream.window(k)]]
            joined += xxhash.xxh3_128_digest(b"".join(i.to_bytes(8, "little") for i in ids))
        by_rank.append(xxhash.xxh3_128_digest(joined))
    expected = xxhash.xxh3_128_digest(b"".join(by_rank))
    assert step_digest(stream, first, micro_batch, per_rank, ranks) == expected
    assert step_digest(stream, first + 1, micro_batch, per_rank, ranks) != expected
    assert step_digest(stream, first, micro_batch, per_rank, ranks - 1) != expected
    assert step_digest(stream, first, micro_batch, ranks, per_rank) != expected


# Size


def test_offsets_beyond_32_bits_and_constant_memory(make_dataset, edit_index):
    directory = make_dataset([[1]])
    tokens, seq_len = 2**31 + 2**20 + 1, 16
    path = directory / "train-00000.bin"
    os.truncate(path, 2 * tokens)  # a sparse file: over 4 GiB to look at, nothing on the disk
    with path.open("r+b") as file:
        file.seek(2 * (tokens - seq_len - 1))
        file.write(np.arange(101, 101 + seq_len + 1, dtype="<u2").tobytes())

    def grow(plain: dict) -> None:
        plain["splits"]["train"]["tokens"] = plain["splits"]["train"]["files"][0]["tokens"] = tokens

    edit_index(directory, grow)
    assert path.stat().st_blocks * 512 < 2**20
    shards = TokenShards(directory, "train")
    tracemalloc.start()
    try:
        stream = SampleStream(shards, seq_len, seed=0)
        last_window = (tokens - 1) // seq_len - 1
        assert stream.samples_per_epoch == last_window + 1 > 2**27
        stream.tokens(10**12, 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert shards.read(0, last_window * seq_len, seq_len + 1).tolist() == list(range(101, 101 + seq_len + 1))
    shards.close()


def test_the_index_is_all_that_is_trusted(directory):
    """Files beside the dataset that dataset.json doesn't list are never read."""
    (directory / "train-00099.bin").write_bytes(b"\0" * 1000)
    listed = json.loads((directory / "dataset.json").read_text())["splits"]["train"]["files"]
    assert len(TokenShards(directory, "train").counts) == len(listed)
