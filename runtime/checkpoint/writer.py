"""Write a checkpoint: data files first, in any order and by anyone, then the manifest by whoever has all entries.

Give it a copy of the state (``HoldingState.pack`` and ``unpack``) if training goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from runtime.checkpoint.catalogue import commit
from runtime.checkpoint.format import encode, encode_state
from runtime.checkpoint.manifest import FileEntry, Manifest, ShardEntry, folder
from runtime.checkpoint.store import Store
from runtime.shards.layout import FlatLayout
from runtime.shards.state import HoldingState, PieceState


def write_shard(store: Store, shard: int, state: HoldingState) -> ShardEntry:
    """Write one shard's file; its entry for the manifest. HostError if the store fails."""
    stem = f"{folder(state.version)}/shard-{shard:04d}"
    entry = _write(store, stem, encode_state(shard, state))
    return ShardEntry(**entry.model_dump(), shard=shard, digest=state.digest().hex())


def write_buffers(store: Store, buffers: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write the model's buffers, by name. Once per job: later manifests name the same file."""
    return _write(store, "buffers", encode(buffers, {}))


def initial_states(flat: torch.Tensor, layout: FlatLayout) -> Iterator[HoldingState]:
    """Version 0, shard by shard: parameters of `flat` (fp32 [layout.total]), and optimizers that keep nothing yet."""
    for shard in range(layout.shards):
        low, high = layout.shard_range(shard)
        yield HoldingState(0, flat[low:high], tuple(PieceState() for _ in layout.pieces(shard)))


def write_initial(
    store: Store,
    layout: FlatLayout,
    optimizer: str,
    flat: torch.Tensor,
    buffers: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> Manifest:
    """The checkpoint of version 0, from which every worker starts. `optimizer`: its variant."""
    shards = tuple(write_shard(store, shard, state) for shard, state in enumerate(initial_states(flat, layout)))
    manifest = Manifest(
        version=0,
        layout=layout.fingerprint(),
        bounds=layout.bounds,
        optimizer=optimizer,
        shards=shards,
        buffers=write_buffers(store, buffers) if buffers else None,
        facts=dict(facts),
    )
    commit(store, manifest)
    return manifest


def _write(store: Store, stem: str, chunks: list[memoryview]) -> FileEntry:
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        hasher.update(chunk)
    checksum = hasher.hexdigest()
    key = f"{stem}.{checksum[:8]}.safetensors"
    store.put(key, chunks)
    return FileEntry(file=key, bytes=sum(chunk.nbytes for chunk in chunks), checksum=checksum)
