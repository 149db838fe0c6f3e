"""Which checkpoints stay: the newest complete ones. The newest itself is never touched, nor anything newer.

What is older than the newest and belongs to no checkpoint that stays is debris: of checkpoints that were never
finished, and of writers that died. Manifests go first, so that at no moment a torn checkpoint looks whole.
"""

from __future__ import annotations

from runtime.checkpoint.catalogue import complete
from runtime.checkpoint.manifest import manifest_key, version_of
from runtime.checkpoint.store import Store


def prune(store: Store, keep: int) -> list[int]:
    """Keep the `keep` newest complete checkpoints (one at least); the versions that were removed, ascending."""
    whole = complete(store)
    if not whole:
        return []
    newest = whole[0].version
    stay = {m.version: {manifest_key(m.version), *(e.file for e in m.files())} for m in whole[: max(1, keep)]}

    def version(key: str) -> int:
        found = version_of(key)
        return 0 if found is None else found  # the buffers are written by version 0

    older = [key for key in store.find() if version_of(key) is not None and version(key) < newest]
    doomed = [key for key in older if key not in stay.get(version(key), set())]
    for key in sorted(doomed, key=lambda k: k != manifest_key(version(k))):
        store.delete(key)
    store.sweep(lambda key: version(key) < newest)
    return sorted({version(key) for key in doomed} - stay.keys())
