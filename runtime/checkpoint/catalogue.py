"""Which checkpoints there are: manifests read, judged and committed. No tensor is touched here, and torch not imported,
so that the controller, which commits, is up again quickly.

A checkpoint is *complete* when its manifest is there and every file that it names is there with the right size.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from dataloader.errors import DataError, HostError, InternalError
from runtime.checkpoint.manifest import Manifest, manifest_key, version_of
from runtime.checkpoint.store import LocalStore, Store

CURE = "delete that version's folder to go on from an older one"


def read_manifest(store: Store, version: int) -> Manifest:
    """DataError if it is missing, or not a manifest of that version."""
    key = manifest_key(version)
    try:
        manifest = Manifest.model_validate_json(store.get(key))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "manifest"
        raise DataError(f"{store.where(key)}: {field}: {first['msg']}; {CURE}") from error
    if manifest.version != version:
        raise DataError(f"{store.where(key)}: is of version {manifest.version}; {CURE}")
    return manifest


def find_complete(store: Store, version: int) -> Manifest | None:
    """That version's manifest, if the checkpoint is complete; a torn one counts as none."""
    if store.size(manifest_key(version)) is None:
        return None
    try:
        manifest = read_manifest(store, version)
    except DataError:
        return None
    return manifest if all(store.size(entry.file) == entry.bytes for entry in manifest.files()) else None


def complete(store: Store) -> list[Manifest]:
    """All complete checkpoints, the newest first."""
    versions = {version for key in store.find() if (version := version_of(key)) is not None}
    found = (find_complete(store, version) for version in sorted(versions, reverse=True))
    return [manifest for manifest in found if manifest is not None]


def newest(place: Path | Store) -> Manifest | None:
    """The newest complete checkpoint, if there is any."""
    store = LocalStore(place) if isinstance(place, Path) else place
    while True:
        keys = store.find()
        found = complete(store)
        # None of those that were listed may be there any more, since a newer one was written and they were pruned.
        if found or store.find() == keys:
            return found[0] if found else None


def commit(store: Store, manifest: Manifest) -> None:
    """Make it a checkpoint, by its manifest. Saying it twice is harmless; InternalError if the bits differ.

    HostError if a data file isn't there: then nothing is committed.
    """
    key = manifest_key(manifest.version)
    there = find_complete(store, manifest.version)
    if there is not None:
        if [entry.digest for entry in there.shards] != [entry.digest for entry in manifest.shards]:
            raise InternalError(f"{store.where(key)}: version {manifest.version} was saved before, with other bits")
        return
    for entry in manifest.files():
        if store.size(entry.file) != entry.bytes:
            raise HostError(f"{store.where(entry.file)}: missing or short, so version {manifest.version} isn't saved")
    store.put(key, [manifest.encode()])
