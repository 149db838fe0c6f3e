"""Whole checkpoints: written, found, loaded into any holdings, broken in every way, and thrown away."""

from __future__ import annotations

import json

import pytest
import torch

from dataloader.errors import DataError, HostError, InternalError
from runtime.checkpoint.catalogue import commit, complete, newest
from runtime.checkpoint.manifest import Manifest, manifest_key
from runtime.checkpoint.reader import CheckpointReader
from runtime.checkpoint.retention import prune
from runtime.checkpoint.store import LocalStore
from runtime.checkpoint.writer import write_shard
from runtime.shards.layout import flat_layout
from runtime.shards.state import unpack


def versions(job):
    return [manifest.version for manifest in complete(job.store)]


def shard_file(job, version, shard):
    return job.root / CheckpointReader(job.root).manifest(version).shards[shard].file


def buffers(job, version):
    reader = CheckpointReader(job.root)
    return reader.load_buffers(reader.manifest(version))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# --- save and load ----------------------------------------------------------------------------------------------


def test_any_holdings_go_on_from_any_checkpoint(trained):
    undisturbed = trained.digests(trained.train(trained.arithmetic(), 0, 6))
    for version in (0, 2, 4):
        for holdings in [(0, 1, 2, 3), (3,), (1, 2), ()]:
            made = trained.arithmetic(version, holdings)
            trained.train(made, version, 6 - version)
            assert trained.digests(made) == {shard: undisturbed[shard] for shard in holdings}
            assert torch.equal(made.staged, trained.arithmetic(version).staged)  # everybody gets all parameters


def test_the_manifest_says_what_there_is(trained):
    manifest = newest(trained.root)
    assert manifest.version == 4
    assert manifest.bounds == trained.layout.bounds
    assert manifest.facts == {"seed": 7, "name": "é"}
    assert "AdamW" in manifest.optimizer
    made = trained.arithmetic(4)
    assert {entry.shard: bytes.fromhex(entry.digest) for entry in manifest.shards} == trained.digests(made)
    for version in (0, 4):  # shipped once, named by all
        assert torch.equal(buffers(trained, version)["rope"], torch.ones(2, 3))
    assert len(list(trained.root.glob("buffers.*"))) == 1
    assert Manifest.model_validate_json(manifest.encode()) == manifest


def test_a_model_without_buffers_has_none(trained):
    reader = CheckpointReader(trained.root)
    assert reader.load_buffers(reader.manifest(4).model_copy(update={"buffers": None})) == {}


def test_saving_again_is_harmless_and_other_bits_are_not(trained):
    made = trained.arithmetic(2)
    before = {path: path.read_bytes() for path in trained.root.rglob("*") if path.is_file()}
    trained.save(made, 2)
    assert {path: path.read_bytes() for path in trained.root.rglob("*") if path.is_file()} == before
    made.holdings[1].parameters[0] += 1.0
    with pytest.raises(InternalError, match="version 2 was saved before, with other bits"):
        trained.save(made, 2)
    assert trained.digests(trained.arithmetic(2)) != trained.digests(made)  # and the good one is still whole


def test_a_copy_is_what_is_written(job):
    made = job.arithmetic()
    meta, payload = made.snapshot(0)
    digest = made.digest(0)
    job.train(made, 0, 1)
    assert write_shard(job.store, 0, unpack(meta, payload)).digest == digest.hex()


# --- torn, damaged, of another kind -----------------------------------------------------------------------------


def test_no_manifest_no_checkpoint(trained):
    manifest = trained.manifest(trained.train(trained.arithmetic(4), 4, 2), 6)
    assert newest(trained.root).version == 4
    first = trained.root / manifest.shards[0].file
    data = first.read_bytes()
    for tear in (first.unlink, lambda: first.write_bytes(data[:-1])):
        tear()
        with pytest.raises(
            HostError, match=r"shard-0000\.\w+\.safetensors: missing or short, so version 6 isn't saved"
        ):
            commit(trained.store, manifest)
        assert newest(trained.root).version == 4
    first.write_bytes(data)
    commit(trained.store, manifest)
    assert newest(trained.root).version == 6


def test_torn_checkpoints_are_passed_over(trained):
    assert newest(trained.root / "nowhere") is None
    shard_file(trained, 4, 3).unlink()
    assert versions(trained) == [2, 0]
    path = shard_file(trained, 2, 0)
    path.write_bytes(path.read_bytes()[:-4])
    assert versions(trained) == [0]
    trained.save(trained.train(trained.arithmetic(0), 0, 2), 2)  # and are mended by writing them again
    assert versions(trained) == [2, 0]
    (trained.root / manifest_key(2)).write_text("{")
    assert versions(trained) == [0]
    made = trained.train(trained.arithmetic(0), 0, 2)
    made.holdings[0].parameters[0] += 1.0
    manifest = trained.save(made, 2)  # nothing of a torn one binds anybody
    assert trained.digests(trained.arithmetic(2)) == trained.digests(made)
    assert CheckpointReader(trained.root).manifest(2) == manifest
    next(trained.root.glob("buffers.*")).unlink()
    assert versions(trained) == []


@pytest.mark.parametrize("at", [9, 200, -1])
def test_a_flipped_bit_is_found_on_loading(trained, at):
    path = shard_file(trained, 4, 1)
    flip(path, at)
    with pytest.raises(DataError, match=rf"{path}: damaged.*delete that version's folder"):
        trained.arithmetic(4, (0,))
    flip(next(trained.root.glob("buffers.*")), -1)
    with pytest.raises(DataError, match="damaged"):
        buffers(trained, 4)


def rewrite(job, version, change):
    path = job.root / manifest_key(version)
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_files_in_each_others_place_are_found(trained):
    """Right checksums, wrong places: position and version are part of a shard's file."""

    def swap(manifest):
        first, second = manifest["shards"][:2]
        for key in ("file", "bytes", "checksum", "digest"):
            first[key], second[key] = second[key], first[key]

    older = json.loads(CheckpointReader(trained.root).manifest(2).encode())["shards"][0]
    rewrite(trained, 4, swap)
    with pytest.raises(DataError, match="holds shard 1 of version 4 instead"):
        CheckpointReader(trained.root).load_shard(4, 0)
    rewrite(trained, 4, lambda manifest: manifest["shards"].__setitem__(0, older))
    with pytest.raises(DataError, match="holds shard 0 of version 2 instead"):
        CheckpointReader(trained.root).load_shard(4, 0)


def test_a_state_with_another_digest_is_found(trained):
    rewrite(trained, 4, lambda manifest: manifest["shards"][2].update(digest="0" * 32))
    with pytest.raises(DataError, match="another digest"):
        CheckpointReader(trained.root).load_shard(4, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.update(format=2), "format"),
        (lambda m: m.update(version=3), "is of version 3"),
        (lambda m: m["shards"].pop(), "one entry per shard, 0 to 3"),
        (lambda m: m["shards"][1].update(shard=2), "one entry per shard"),
        (lambda m: m["shards"][0].update(file="../../secret"), r"shards\.0\.file"),
        (lambda m: m["shards"][0].update(file="/etc/passwd"), r"shards\.0\.file"),
        (lambda m: m["shards"][0].update(bytes=-1), r"shards\.0\.bytes"),
        (lambda m: m["buffers"].update(checksum="zz"), r"buffers\.checksum"),
    ],
)
def test_a_strange_manifest_is_refused_in_one_line(trained, change, says):
    rewrite(trained, 4, change)
    assert newest(trained.root).version == 2
    with pytest.raises(DataError, match=says) as caught:
        trained.arithmetic(4)
    assert "\n" not in str(caught.value)
    assert manifest_key(4) in str(caught.value)


def test_a_checkpoint_of_another_job_is_refused(trained):
    reader = CheckpointReader(trained.root)
    other = flat_layout([[("w", (10, 16)), ("odd", (3, 7))], [("b", (32,))]], 2)
    with pytest.raises(DataError, match=r"another model or train\.shards"):
        reader.check(4, other, reader.manifest(4).optimizer)
    with pytest.raises(DataError, match=r"made by optimizer .*AdamW.*, this job's is sgd"):
        reader.check(4, trained.layout, "sgd")
    with pytest.raises(DataError, match=r"v00000005/manifest\.json: missing"):
        reader.check(5, trained.layout, "sgd")
    with pytest.raises(DataError, match="has no shard 4"):
        reader.load_shard(4, 4)
    shard_file(trained, 4, 3).unlink()
    with pytest.raises(DataError, match="missing or short"):
        reader.check(4, trained.layout, reader.manifest(4).optimizer)


# --- dying in the middle ----------------------------------------------------------------------------------------


class Power(Exception):
    pass


class Dying(LocalStore):
    """Loses power before its n-th verb that changes anything."""

    def __init__(self, root, verbs):
        super().__init__(root)
        self.verbs = verbs

    def _spend(self):
        if self.verbs == 0:
            raise Power
        self.verbs -= 1

    def put(self, key, chunks):
        self._spend()
        super().put(key, chunks)

    def delete(self, key):
        self._spend()
        super().delete(key)


@pytest.mark.parametrize("verbs", range(21))
def test_at_any_moment_there_is_a_newest_checkpoint_that_loads(trained, verbs):
    """Power goes at each step of saving version 6 and pruning to one; then it is all done again."""
    goal = trained.digests(trained.train(trained.arithmetic(), 0, 6))
    made = trained.train(trained.arithmetic(4), 4, 2)
    plain, trained.store = trained.store, Dying(trained.root, verbs)
    survived = False
    try:
        trained.save(made, 6)
        prune(trained.store, 1)
        survived = True
    except Power:
        pass
    assert survived == (verbs == 20)  # 5 files, 3 x 5 deletions: so every moment is tried
    found = newest(trained.root)
    assert len(versions(trained)) == len(list(trained.root.glob("*/manifest.json")))  # none of them torn
    again = trained.arithmetic(found.version)
    trained.store = plain
    trained.save(trained.train(again, found.version, 6 - found.version), 6)
    prune(trained.store, 1)
    assert versions(trained) == [6]
    assert trained.digests(trained.arithmetic(6)) == goal


# --- retention --------------------------------------------------------------------------------------------------


def test_the_newest_stay(trained):
    assert prune(trained.store, 2) == [0]
    assert versions(trained) == [4, 2]
    assert prune(trained.store, 2) == []
    assert prune(trained.store, 0) == [2]
    assert versions(trained) == [4]
    assert torch.equal(buffers(trained, 4)["rope"], torch.ones(2, 3))
    assert sorted(path.name for path in trained.root.iterdir() if path.is_dir()) == ["v00000004"]


class Overtaken(LocalStore):
    """Right after its n-th listing, a newer checkpoint is written and all others are pruned."""

    def __init__(self, job, listing):
        super().__init__(job.root)
        self.job, self.listings = job, listing

    def find(self):
        keys = super().find()
        self.listings -= 1
        if self.listings == 0:
            last = newest(self.job.root).version
            self.job.save(self.job.train(self.job.arithmetic(last), last, 2), last + 2)
            prune(self.job.store, 1)
        return keys


def test_a_newest_one_is_found_while_the_older_ones_are_pruned(trained):
    assert newest(Overtaken(trained, listing=1)).version == 6
    assert newest(Overtaken(trained, listing=2)).version == 8


def test_buffers_can_be_loaded_when_their_checkpoint_is_pruned(trained):
    manifest = newest(trained.root)
    trained.save(trained.train(trained.arithmetic(4), 4, 2), 6)
    assert prune(trained.store, 1) == [0, 2, 4]
    assert torch.equal(CheckpointReader(trained.root).load_buffers(manifest)["rope"], torch.ones(2, 3))


def test_nothing_is_thrown_away_before_something_is_whole(tmp_path):
    store = LocalStore(tmp_path)
    store.put("v00000002/shard-0000.x.safetensors", [b"x"])
    assert prune(store, 1) == []
    assert store.find() == ["v00000002/shard-0000.x.safetensors"]


def test_debris_goes_only_where_it_is_older_than_the_newest(trained):
    def leave(*names):
        for name in names:
            path = trained.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"half")
        return [trained.root / name for name in names]

    old = leave(
        "v00000001/shard-0000.dead.safetensors",
        "v00000003/.shard-0001.dead.safetensors.77-ab.tmp",
        "v00000002/shard-0000.dead.safetensors",
        "v00000002/.manifest.json.77-ab.tmp",
        ".buffers.dead.safetensors.77-ab.tmp",
    )
    live = leave("v00000004/.shard-0001.x.safetensors.78-ab.tmp", "v00000006/shard-0000.x.safetensors", "notes.txt")
    live += leave("v00000006/.shard-0001.x.safetensors.78-ab.tmp")
    assert prune(trained.store, 2) == [0, 1]
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in live)
    assert versions(trained) == [4, 2]
    assert not (trained.root / "v00000003").exists()
    trained.arithmetic(2)


def test_a_torn_checkpoint_does_not_count_as_one_to_keep(trained):
    shard_file(trained, 2, 0).unlink()
    assert prune(trained.store, 2) == [2]
    assert versions(trained) == [4, 0]
