import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataloader.errors import DataError
from dataloader.shards import ShardWriter, TokenShards


def test_documents_come_back_in_order_each_with_its_end(make_dataset):
    directory = make_dataset([[5, 6], [], [7], list(range(1, 300))], tokens_per_file=4)
    shards = TokenShards(directory, "train")
    assert shards.counts == (4, 302)  # the second file ends with the document that fills it
    assert shards.tokens == 306
    assert shards.read(0, 0, 4).tolist() == [5, 6, 0, 0]
    assert shards.read(1, 0, 3).tolist() == [7, 0, 1]
    assert shards.read(1, 299, 3).tolist() == [298, 299, 0]


@pytest.mark.parametrize(("vocab_size", "dtype", "bytes_each"), [(65_536, "u16", 2), (65_537, "u32", 4)])
def test_the_largest_id_survives(make_dataset, vocab_size, dtype, bytes_each):
    directory = make_dataset([[vocab_size - 1, 1]], vocab_size=vocab_size)
    shards = TokenShards(directory, "train")
    assert shards.dtype == dtype
    assert shards.read(0, 0, 3).tolist() == [vocab_size - 1, 1, 0]
    assert (directory / "train-00000.bin").stat().st_size == 3 * bytes_each


@pytest.mark.parametrize(
    ("vocab_size", "bad"), [(65_536, 65_536), (65_537, 65_537), (300, 300), (300, -1), (300, 2**40)]
)
def test_an_id_that_doesnt_fit_is_refused_and_never_wraps(tmp_path, vocab_size, bad):
    writer = ShardWriter(tmp_path, "train", vocab_size, 10)
    with pytest.raises(DataError, match=rf"train-00000\.bin: token id {bad} doesn't fit"):
        writer.add([1, bad, 2], end_of_text=0)


def test_files_are_little_endian_on_any_host(make_dataset):
    assert (make_dataset([[0x0102]]) / "train-00000.bin").read_bytes() == b"\x02\x01\0\0"


def test_reads_outside_a_file_are_refused(make_dataset):
    shards = TokenShards(make_dataset([[1, 2, 3]]), "train")
    assert shards.read(0, 4, 0).tolist() == []
    for start, count in ((-1, 2), (0, 5), (4, 1), (0, -1)):
        with pytest.raises(IndexError):
            shards.read(0, start, count)


def test_a_missing_file_is_named(make_dataset):
    directory = make_dataset([range(1, 90)] * 5)
    (directory / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: missing, though dataset\.json lists it; .*again"):
        TokenShards(directory, "train")


@pytest.mark.parametrize(("size", "how"), [(0, "cut short"), (359, "cut short"), (362, "longer")])
def test_a_file_of_another_size_is_named_with_both_sizes(make_dataset, size, how):
    directory = make_dataset([range(1, 90)] * 4)
    os.truncate(directory / "train-00001.bin", size)
    with pytest.raises(
        DataError, match=rf"train-00001\.bin: expected 360 bytes by dataset\.json, found {size} \({how}\)"
    ):
        TokenShards(directory, "train")


def test_a_split_that_isnt_there_is_named(make_dataset):
    with pytest.raises(DataError, match="no split 'valid', only: train"):
        TokenShards(make_dataset([[1]]), "valid")


def test_an_id_beyond_the_vocabulary_never_reaches_a_model(make_dataset):
    directory = make_dataset([range(1, 90)])
    shards = TokenShards(directory, "train")
    with (directory / "train-00000.bin").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff\xff")
    assert shards.read(0, 0, 10).tolist() == list(range(1, 11))
    with pytest.raises(DataError, match=r"train-00000\.bin: token id 65535 .* below 1000"):
        shards.read(0, 5, 10)


def test_a_file_that_shrinks_while_it_is_mapped_is_an_error_not_a_dead_process(make_dataset):
    directory = make_dataset([np.arange(1, 100_000) % 999], tokens_per_file=200_000)
    script = (
        "import os, sys; from pathlib import Path\n"
        "from dataloader.shards import TokenShards; from dataloader.errors import DataError\n"
        "d = Path(sys.argv[1]); s = TokenShards(d, 'train'); s.read(0, 90_000, 10)\n"
        "os.truncate(d / 'train-00000.bin', 4096)\n"
        "try: s.read(0, 50_000, 10)\n"
        "except DataError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert "train-00000.bin: had 200000 bytes when it was opened, and now 4096 (cut short)" in done.stdout


def mapped_files(directory: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(directory))


def test_maps_are_lazy_bounded_and_closed(make_dataset):
    directory = make_dataset([[number] * 9 for number in range(1, 201)], tokens_per_file=10)
    descriptors = len(os.listdir("/proc/self/fd"))
    with TokenShards(directory, "train", open_files=8) as shards:
        assert (len(shards.counts), mapped_files(directory)) == (200, 0)
        for number in [*range(200), *range(199, -1, -1)]:
            assert shards.read(number, 8, 2).tolist() == [number + 1, 0]
            assert 1 <= mapped_files(directory) <= 8
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
    assert (mapped_files(directory), len(os.listdir("/proc/self/fd"))) == (0, descriptors)


def test_what_is_read_is_a_copy_that_outlives_the_map(make_dataset):
    shards = TokenShards(make_dataset([[1, 2, 3]]), "train")
    tokens = shards.read(0, 0, 3)
    tokens += 1
    assert shards.read(0, 0, 3).tolist() == [1, 2, 3]
    shards.close()
    assert tokens.tolist() == [2, 3, 4]
    assert shards.read(0, 0, 3).tolist() == [1, 2, 3]
