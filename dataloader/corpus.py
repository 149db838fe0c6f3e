"""From a job's `data` section to a prepared dataset on this machine: found in the cache, or built there once.

The cache key is a hash of everything that decides the bytes: the files with their contents, the vocabulary size, the
version of `tokenizers` and those of our own rules. The tokenizer is a byte-level BPE trained on the train split alone.
Each file is one document, with the end-of-text token behind it; text that spells that token is plain text.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from dataloader.cache import built_once, default_cache_dir
from dataloader.config import DataConfig
from dataloader.dataset import (
    FORMAT,
    FORMAT_VERSION,
    INDEX_NAME,
    DatasetIndex,
    PlainFile,
    Progress,
    dtype_for,
    verify,
)
from dataloader.durable import write_durably
from dataloader.errors import DataError, InternalError
from dataloader.shards import ShardWriter, TokenShards
from dataloader.stdlib_text import RULES_VERSION, SourceFile, library_root, read_library
from dataloader.stream import SampleStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|end_of_text|>"
TOKENS_PER_FILE = 2**20
_DOCUMENTS_AT_ONCE = 32  # enough to keep every core busy; an encoding takes some 100 bytes per token while it lives


def prepare(config: DataConfig, progress: Progress | None = None) -> Path:
    """The directory of the dataset that `config` asks for, whole and verified; built if need be.

    `progress` is called as (phase, done, total) on the calling thread. Raises DataError where the data isn't what it
    should be or has no whole sample, and HostError where the cache can't be written.
    """
    report = progress or _silent
    directory = _prepared_path(config.path, report) if config.path is not None else _prepared_library(config, report)
    with TokenShards(directory, "train") as shards:
        SampleStream(shards, config.seq_len, seed=0)  # refuses a split without a whole sample
    return directory


def _silent(phase: str, done: int, total: int) -> None:
    """No progress is wanted."""


def _prepared_path(given: Path, report: Progress) -> Path:
    directory = given.expanduser().absolute()
    if not os.path.isfile(directory / INDEX_NAME):  # unlike Path.is_file, False also where looking is forbidden
        what = f"has no {INDEX_NAME} that can be read" if os.path.isdir(directory) else "is not a directory"
        raise DataError(
            f"data.path: {directory} {what}; give a directory that Everstep prepared, or leave data.path out and "
            "set data.source: stdlib"
        )
    try:
        verify(directory, report)
    except DataError as error:
        raise DataError(f"data.path: {error}") from None
    return directory


def _prepared_library(config: DataConfig, report: Progress) -> Path:
    files = read_library(library_root(), report)
    cache = (config.cache_dir or default_cache_dir()).expanduser().absolute()
    key = cache_key(files, config.vocab_size)
    return built_once(
        cache,
        f"stdlib-{key}",
        build=lambda directory: build_dataset(directory, files, config.vocab_size, report),
        check=lambda directory: verify(directory, report),
        waiting=lambda: report("wait for another job that prepares the same data", 0, 1),
    )


def cache_key(files: Sequence[SourceFile], vocab_size: int) -> str:
    """32 hexadecimal digits for all that decides a dataset's bytes."""
    rules = (FORMAT, FORMAT_VERSION, RULES_VERSION, TOKENS_PER_FILE, END_OF_TEXT, version("tokenizers"), vocab_size)
    key = blake2b(repr(rules).encode(), digest_size=16)
    for file in files:
        path = file.path.encode("utf-8", "surrogateescape")
        key.update(f"{len(path)} {len(file.content)} ".encode() + path + file.content)
    return key.hexdigest()


def build_dataset(directory: Path, files: Sequence[SourceFile], vocab_size: int, report: Progress = _silent) -> None:
    """Fills an empty directory; the same files and versions give the same bytes. `dataset.json` comes last."""
    tokenizer = _train_tokenizer([file.text for file in files if file.split == "train"], vocab_size, report)
    size = tokenizer.get_vocab_size()  # smaller than asked for where the text has no more pairs to merge
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise InternalError(f"a trained tokenizer lacks its own token {END_OF_TEXT}")
    writers = {split: ShardWriter(directory, split, size, TOKENS_PER_FILE) for split in ("train", "valid")}
    for done, (file, ids) in enumerate(_encode(tokenizer, files), start=1):
        writers[file.split].add(ids, end_of_text)
        report("tokenize", done, len(files))

    text = tokenizer.to_str(pretty=True).encode()
    write_durably(directory / "tokenizer.json", text)
    index = DatasetIndex(
        format=FORMAT,
        version=FORMAT_VERSION,
        dtype=dtype_for(size),
        vocab_size=size,
        end_of_text=end_of_text,
        tokenizer=PlainFile(name="tokenizer.json", size=len(text), xxh3_128=xxhash.xxh3_128_hexdigest(text)),
        splits={split: writer.finish() for split, writer in writers.items()},
        origin={
            "source": "stdlib",
            "python": platform.python_version(),
            "tokenizers": version("tokenizers"),
            "files": len(files),
            "bytes": sum(len(file.content) for file in files),
        },
    )
    write_durably(directory / INDEX_NAME, (json.dumps(index.model_dump(), indent=1) + "\n").encode())


def _train_tokenizer(texts: Sequence[str], vocab_size: int, report: Progress) -> Tokenizer:
    # Imported here: it starts a thread pool of its own, and a job whose data is in the cache needs none of it.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # text that spells the end-of-text token is text
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes: any text can be written
        show_progress=False,
    )

    def counted() -> Iterator[str]:
        for done, text in enumerate(texts, start=1):
            yield text
            report("train tokenizer", done, len(texts))

    tokenizer.train_from_iterator(counted(), trainer, length=len(texts))
    return tokenizer


def _encode(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, list[int]]]:
    """Every file with its token ids, in order; the library works on a batch with all cores."""
    for start in range(0, len(files), _DOCUMENTS_AT_ONCE):
        batch = files[start : start + _DOCUMENTS_AT_ONCE]
        encodings = tokenizer.encode_batch_fast([file.text for file in batch], add_special_tokens=False)
        for file, encoding in zip(batch, encodings, strict=True):
            yield file, encoding.ids
