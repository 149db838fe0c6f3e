import json

import pytest

from dataloader.dataset import check_size, dtype_for, file_size, read_index, verify
from dataloader.errors import DataError


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "u16"), (65_535, "u16"), (65_536, "u16"), (65_537, "u32"), (2**32, "u32")]
)
def test_16_bits_hold_exactly_65536_ids(vocab_size, dtype):
    assert dtype_for(vocab_size) == dtype


@pytest.mark.parametrize("vocab_size", [0, 2**32 + 1])
def test_a_vocabulary_that_no_type_holds_is_refused(vocab_size):
    with pytest.raises(DataError, match=str(vocab_size)):
        dtype_for(vocab_size)


def test_a_whole_dataset_verifies_and_tells_how_far_it_is(make_dataset):
    directory = make_dataset([range(1, 90)] * 5)
    seen = []
    index = verify(directory, lambda *report: seen.append(report))
    assert index.splits["train"].tokens == 450
    assert seen[-1] == ("verify", 900, 900)


def test_one_changed_byte_is_found_and_named(make_dataset):
    directory = make_dataset([range(1, 90)] * 5)
    path = directory / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[77] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00001\.bin: expected xxh3_128 [0-9a-f]{32} .* found"):
        verify(directory)


def test_a_directory_without_an_index_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.json: missing"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", ["", '{"format": "everstep-tokens", "ver', "[" * 100_000, "\xff"])
def test_an_index_that_is_no_json_is_named(tmp_path, content):
    (tmp_path / "dataset.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"dataset\.json: not valid JSON"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"format": "everstep-tokens", "version": 2}'])
def test_an_index_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(DataError, match="expected format everstep-tokens version 1, found"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(dtype="u64"), "dtype"),
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d.pop("vocab_size"), "vocab_size"),
        (lambda d: d.update(vocab_size=70_000), r"70000 ids don't fit in u16"),
        (lambda d: d["splits"]["train"].update(tokens=7), "splits.train: 7 tokens, but its files have 450"),
        (lambda d: d["splits"]["train"].update(documents=7), "splits.train: 7 documents, but its files have 5"),
        (lambda d: d["splits"]["train"]["files"][0].update(tokens=-1), "tokens"),
        (lambda d: d["splits"]["train"]["files"][0].update(name="../../etc/passwd"), "name"),
        (lambda d: d["splits"]["train"]["files"][0].update(xxh3_128="0"), "xxh3_128"),
    ],
)
def test_an_index_that_cant_be_true_is_refused(make_dataset, edit_index, change, named):
    directory = make_dataset([range(1, 90)] * 5)
    edit_index(directory, change)
    with pytest.raises(DataError, match=named) as caught:
        read_index(directory)
    assert "dataset.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_beside_other_files_is_found_out(make_dataset, edit_index):
    directory, other = make_dataset([range(1, 90)] * 2), make_dataset([range(2, 91)] * 2)
    (directory / "train-00000.bin").write_bytes((other / "train-00000.bin").read_bytes())
    with pytest.raises(DataError, match=r"train-00000\.bin: .* damaged or another's"):
        verify(directory)


def test_sizes_are_told_apart(tmp_path):
    path = tmp_path / "a.bin"
    check_size(path, 5, 5)
    with pytest.raises(DataError, match=r"a\.bin: expected 5 bytes by dataset\.json, found 4 \(cut short\)"):
        check_size(path, 5, 4)
    with pytest.raises(DataError, match=r"found 6 \(longer\)"):
        check_size(path, 5, 6)
    with pytest.raises(DataError, match=r"a\.bin: missing"):
        file_size(path)
    path.mkdir()
    with pytest.raises(DataError, match=r"a\.bin: missing"):
        file_size(path)


def test_the_index_is_plain_json_for_people(make_dataset):
    plain = json.loads((make_dataset([[1, 2]]) / "dataset.json").read_text())
    assert plain["splits"]["train"]["files"][0]["tokens"] == 3
