import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from dataloader import corpus
from dataloader.config import DataConfig
from dataloader.corpus import END_OF_TEXT, build_dataset, cache_key, prepare
from dataloader.dataset import read_index, verify
from dataloader.errors import DataError
from dataloader.shards import TokenShards
from dataloader.stdlib_text import SourceFile, library_root, read_library

VOCAB_SIZE = 400
TRAIN, VALID = "json/decoder.py", "module_9.py"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A small library: some files of the real one, and what a tokenizer may stumble over."""
    root = tmp_path_factory.mktemp("library")
    real = [file for file in read_library(library_root()) if file.path.startswith(("json/", "html/", "wsgiref/"))]
    odd = {
        "empty.py": b"",
        "spells_the_end.py": f"x = '{END_OF_TEXT}'\n".encode(),
        "not_utf8.py": b"x = '\xff\xfe'\r\n",
        "wide.py": "x = 'å∑🙂\0'\n".encode(),
    }
    for number in range(40):
        odd[f"module_{number}.py"] = f"number = {number}\n".encode() * number
    for path, content in [*((file.path, file.content) for file in real), *odd.items()]:
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(content)
    return root


@pytest.fixture(autouse=True)
def _small_library(library, monkeypatch):
    monkeypatch.setattr(corpus, "library_root", lambda: library)
    monkeypatch.setattr(corpus, "TOKENS_PER_FILE", 20_000)


@pytest.fixture(scope="module")
def built(library, tmp_path_factory) -> Path:
    """A dataset that tests read and never change."""
    directory = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "TOKENS_PER_FILE", 20_000)
        build_dataset(directory, read_library(library), VOCAB_SIZE)
    return directory


def all_tokens(directory: Path, split: str) -> list[int]:
    return np.concatenate([np.fromfile(p, dtype="<u2") for p in sorted(directory.glob(f"{split}-*.bin"))]).tolist()


def test_every_file_is_one_document_and_reads_back_as_its_text(built, library):
    tokenizer = Tokenizer.from_file(str(built / "tokenizer.json"))
    index = read_index(built)
    assert index.vocab_size == tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_TEXT) == index.end_of_text
    files = read_library(library)
    for split in ("train", "valid"):
        documents, document = [], []
        for token in all_tokens(built, split):
            if token == index.end_of_text:
                documents.append(tokenizer.decode(document))
                document = []
            else:
                document.append(token)
        assert document == []
        assert documents == [file.text for file in files if file.split == split]
        assert index.splits[split].documents == len(documents)
    assert len(index.splits["train"].files) > 1


def test_the_tokenizer_saw_the_train_split_only(library, tmp_path):
    files = read_library(library)
    others = [f if f.split == "train" else SourceFile(f.path, b"zqzq zqzq " * 5000) for f in files]
    for name, given in (("a", files), ("b", others)):
        (tmp_path / name).mkdir()
        build_dataset(tmp_path / name, given, VOCAB_SIZE)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_the_same_files_give_the_same_bytes_on_any_number_of_cores(built, library, tmp_path):
    script = (
        "import sys; from pathlib import Path; from dataloader import corpus, stdlib_text\n"
        "corpus.TOKENS_PER_FILE = 20_000\n"
        f"corpus.build_dataset(Path(sys.argv[2]), stdlib_text.read_library(Path(sys.argv[1])), {VOCAB_SIZE})\n"
    )
    for threads in ("1", "3"):
        other = tmp_path / threads
        other.mkdir()
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", script, library, other], env=environment, check=True, timeout=60)
        names = sorted(path.name for path in built.iterdir())
        assert sorted(path.name for path in other.iterdir()) == names
        assert [(other / n).read_bytes() for n in names] == [(built / n).read_bytes() for n in names]


def test_prepare_builds_once_and_shows_how_far_it_is(tmp_path):
    config = DataConfig(seq_len=32, vocab_size=VOCAB_SIZE, cache_dir=tmp_path / "cache")
    seen: list[tuple[str, int, int]] = []
    directory = prepare(config, lambda *report: seen.append(report))
    phases = list(dict.fromkeys(phase for phase, _, _ in seen))
    assert phases == ["read", "train tokenizer", "tokenize", "verify"]
    for phase in phases:
        done = [(d, total) for p, d, total in seen if p == phase]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1] > 0
    stamp = (directory / "dataset.json").stat()
    seen.clear()
    assert prepare(config, lambda *report: seen.append(report)) == directory
    assert {phase for phase, _, _ in seen} == {"read", "verify"}
    assert (directory / "dataset.json").stat() == stamp
    assert TokenShards(directory, "valid").tokens > 32


def test_a_cached_dataset_that_was_damaged_is_mended(tmp_path):
    config = DataConfig(seq_len=32, vocab_size=VOCAB_SIZE, cache_dir=tmp_path)
    directory = prepare(config, None)
    before = (directory / "train-00000.bin").read_bytes()
    os.truncate(directory / "train-00000.bin", 100)
    assert prepare(config, None) == directory
    assert (directory / "train-00000.bin").read_bytes() == before


def test_the_key_follows_everything_that_decides_the_bytes(monkeypatch):
    files = [SourceFile("a.py", b"12"), SourceFile("b.py", b"3")]
    keys = [
        cache_key(files, 400),
        cache_key(files, 401),
        cache_key([SourceFile("a.py", b"13"), SourceFile("b.py", b"3")], 400),
        cache_key([SourceFile("a.py", b"1"), SourceFile("b.py", b"23")], 400),
        cache_key([SourceFile("a2.py", b"12"), SourceFile("b.py", b"3")], 400),
        cache_key(files[:1], 400),
        cache_key([SourceFile("a.py", b"12b.py3")], 400),  # the same bytes end to end
    ]
    for name, value in (("RULES_VERSION", 999), ("FORMAT_VERSION", 999), ("version", lambda package: "999")):
        with monkeypatch.context() as patch:
            patch.setattr(corpus, name, value)
            keys.append(cache_key(files, 400))
    assert len(set(keys)) == len(keys) == 10
    assert cache_key(files, 400) == keys[0]


def test_a_prepared_path_is_taken_as_it_is(built, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "library_root", lambda: tmp_path / "nowhere")
    shutil.copytree(built, tmp_path / "copy")
    assert prepare(DataConfig(seq_len=32, path=tmp_path / "copy"), None) == tmp_path / "copy"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare(DataConfig(seq_len=32, path="~/copy"), None) == tmp_path / "copy"


@pytest.mark.parametrize("missing", ["directory", "index"])
def test_a_path_that_isnt_prepared_is_named_with_the_cure(tmp_path, missing):
    path = tmp_path / "data"
    if missing == "index":
        path.mkdir()
    with pytest.raises(DataError, match=r"^data\.path: .*/data .*; .*set data\.source: stdlib$") as caught:
        prepare(DataConfig(seq_len=32, path=path), None)
    assert caught.value.exit_code == 2


def test_a_prepared_path_with_a_damaged_file_is_named(built, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    content = bytearray((copy / "train-00001.bin").read_bytes())
    content[1000] ^= 1
    (copy / "train-00001.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"^data\.path: .*/copy/train-00001\.bin: expected xxh3_128"):
        prepare(DataConfig(seq_len=32, path=copy), None)
    (copy / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"^data\.path: .*/copy/train-00001\.bin: missing"):
        prepare(DataConfig(seq_len=32, path=copy), None)


def test_too_little_data_for_one_sample_is_refused_before_anything_starts(built):
    with pytest.raises(DataError, match=r"'train' has \d+ tokens, .* data\.seq_len 1000000 needs 1000001"):
        prepare(DataConfig(seq_len=1_000_000, path=built), None)


def test_a_library_with_too_few_pairs_gives_the_vocabulary_it_has(tmp_path):
    build_dataset(tmp_path, [SourceFile(TRAIN, b"abc"), SourceFile(VALID, b"")], 5000)
    index = verify(tmp_path)
    assert 257 <= index.vocab_size < 300
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
