"""What a checkpoint consists of. The manifest is written last, so where there is none there is no checkpoint.

    v00000040/shard-0003.<checksum's start>.safetensors   one shard: parameters and optimizer state
    v00000040/manifest.json                               this
    buffers.<checksum's start>.safetensors                the model's buffers: written once, by version 0

File names carry a checksum, so two writers with the same bits write the same file, and with others another one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.checkpoint.store import KEY_PATTERN

_Key = Annotated[str, Field(pattern=f"^{KEY_PATTERN}$")]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # xxh3_128


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Closed):
    """One data file."""

    file: _Key
    bytes: int = Field(ge=0)
    checksum: _Hash  # of the file


class ShardEntry(FileEntry):
    """One shard's file."""

    shard: int = Field(ge=0)
    digest: _Hash  # of the state: what the ledger's digests are made of


class Manifest(_Closed):
    """A whole checkpoint: every shard at one version."""

    format: Literal[1] = 1
    version: int = Field(ge=0)  # decided steps
    layout: _Hash  # FlatLayout.fingerprint()
    bounds: tuple[int, ...]  # shard s is elements [bounds[s], bounds[s + 1])
    optimizer: str  # variant: name and the options that choose its kernel
    shards: tuple[ShardEntry, ...]
    buffers: FileEntry | None = None
    facts: dict[str, Any] = Field(default_factory=dict)  # the job's own words, for whoever finds the file; plain values

    @model_validator(mode="after")
    def _one_entry_per_shard(self) -> Manifest:
        if [entry.shard for entry in self.shards] != list(range(len(self.bounds) - 1)):
            raise ValueError(f"there must be one entry per shard, 0 to {len(self.bounds) - 2}, in order")
        return self

    def files(self) -> tuple[FileEntry, ...]:
        return (*self.shards, self.buffers) if self.buffers else self.shards

    def encode(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


def folder(version: int) -> str:
    return f"v{version:08d}"


def manifest_key(version: int) -> str:
    return f"{folder(version)}/manifest.json"


def version_of(key: str) -> int | None:
    """The version that an object belongs to; None for those of no version."""
    match = re.match(r"v([0-9]{8,})/", key)
    return int(match[1]) if match else None
