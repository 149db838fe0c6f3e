"""Load any shard of any checkpoint, verified. Which checkpoints there are is the catalogue's.

Checksums and state digests are checked as a file is loaded: nothing unverified leaves this room.
"""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from dataloader.errors import DataError
from runtime.checkpoint.catalogue import CURE, read_manifest
from runtime.checkpoint.format import decode, decode_state
from runtime.checkpoint.manifest import FileEntry, Manifest, manifest_key
from runtime.checkpoint.store import LocalStore, Store
from runtime.shards.layout import FlatLayout
from runtime.shards.state import HoldingState


class CheckpointReader:
    """Loads from a directory of checkpoints, or from any store."""

    def __init__(self, place: Path | Store) -> None:
        self.store: Store = LocalStore(place) if isinstance(place, Path) else place
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, version: int) -> Manifest:
        if version not in self._manifests:
            self._manifests[version] = read_manifest(self.store, version)
        return self._manifests[version]

    def check(self, version: int, layout: FlatLayout, optimizer: str) -> None:
        """DataError unless that version is complete and was written for this layout and optimizer variant."""
        self._manifests.pop(version, None)  # a torn one may have been written anew meanwhile
        manifest = self.manifest(version)
        where = self.store.where(manifest_key(version))
        if manifest.layout != layout.fingerprint():
            raise DataError(f"{where}: made for another model or train.shards; resume with the job it was made by")
        if manifest.optimizer != optimizer:
            raise DataError(
                f"{where}: made by optimizer {manifest.optimizer}, this job's is {optimizer}; resume with the same one"
            )
        for entry in manifest.files():
            if self.store.size(entry.file) != entry.bytes:
                raise DataError(f"{self.store.where(entry.file)}: missing or short; {CURE}")

    def load_shard(self, version: int, shard: int) -> HoldingState:
        """A shard's state, its checksum and digest verified. DataError names the file that is damaged."""
        manifest = self.manifest(version)
        if not 0 <= shard < len(manifest.shards):
            raise DataError(f"{self.store.where(manifest_key(version))}: has no shard {shard}")
        entry = manifest.shards[shard]
        where = self.store.where(entry.file)
        number, state = decode_state(self._verified(entry), where)
        if (number, state.version) != (shard, version):
            raise DataError(f"{where}: holds shard {number} of version {state.version} instead; {CURE}")
        if state.digest().hex() != entry.digest:
            raise DataError(f"{where}: its state has another digest than the manifest says; {CURE}")
        return state

    def load_buffers(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The model's buffers by name; empty if it has none. The checkpoint itself may be gone by now."""
        entry = manifest.buffers
        if entry is None:
            return {}
        return decode(self._verified(entry), self.store.where(entry.file))[0]

    def _verified(self, entry: FileEntry) -> bytes:
        data = self.store.get(entry.file)
        if len(data) != entry.bytes or xxhash.xxh3_128_hexdigest(data) != entry.checksum:
            raise DataError(f"{self.store.where(entry.file)}: damaged, its checksum is not the manifest's; {CURE}")
        return data
