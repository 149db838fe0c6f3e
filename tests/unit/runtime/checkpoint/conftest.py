"""A small trained job to save, load and break."""

from __future__ import annotations

import shutil

import pytest
import torch

from runtime.checkpoint.catalogue import commit, newest
from runtime.checkpoint.reader import CheckpointReader
from runtime.checkpoint.store import LocalStore
from runtime.checkpoint.writer import write_initial, write_shard
from runtime.guard import Verdict
from runtime.shards.holding import optimizer_variant
from runtime.shards.layout import flat_layout
from runtime.shards.state import unpack
from runtime.shards.tensors import TensorArithmetic

LAYOUT = flat_layout([[("w", (10, 16)), ("odd", (3, 7))], [("b", (32,))]], 4)
GROUPS = [{"weight_decay": 0.1}, {"weight_decay": 0.0}]
ALL = tuple(range(LAYOUT.shards))


def make(groups):
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


class Job:
    """Several workers' arithmetic in one, with a checkpoint directory."""

    layout = LAYOUT

    def __init__(self, root):
        self.root = root
        self.store = LocalStore(root)

    def arithmetic(self, version=0, holdings=ALL):
        made = TensorArithmetic(LAYOUT, make, GROUPS, CheckpointReader(self.root))
        made.load(version, holdings)
        return made

    def start(self):
        flat = torch.zeros(LAYOUT.total)
        for slot in LAYOUT.slots:
            values = torch.arange(float(slot.numel)).sin()
            flat[slot.start : slot.start + slot.numel] = values
        buffers, facts = {"rope": torch.ones(2, 3)}, {"seed": 7, "name": "é"}
        write_initial(self.store, LAYOUT, optimizer_variant(make, GROUPS), flat, buffers, facts)
        return self

    @staticmethod
    def train(made, step, steps):
        for now in range(step, step + steps):
            for shard in sorted(made.holdings):
                low, high = LAYOUT.shard_range(shard)
                gradient = torch.randn(LAYOUT.total, generator=torch.Generator().manual_seed(now))[low:high]
                made.store_gradient(shard, now, gradient.numpy())
                made.apply(shard, now, Verdict("commit", 1.0, 1.0, 0.0, 1.0, 1.0, 1))
        return made

    @staticmethod
    def digests(made):
        return {shard: made.digest(shard) for shard in sorted(made.holdings)}

    def manifest(self, made, version):
        """Write the shards of `made` and say what the manifest would be."""
        entries = tuple(write_shard(self.store, s, unpack(*made.snapshot(s))) for s in sorted(made.holdings))
        return newest(self.root).model_copy(update={"version": version, "shards": entries})

    def save(self, made, version):
        manifest = self.manifest(made, version)
        commit(self.store, manifest)
        return manifest


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "checkpoints").start()


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("template") / "checkpoints").start()
    made = job.arithmetic()
    for version in (2, 4):
        job.save(job.train(made, version - 2, 2), version)
    return job


@pytest.fixture
def trained(template, tmp_path):
    """A job with checkpoints 0, 2 and 4."""
    root = tmp_path / "checkpoints"
    shutil.copytree(template.root, root)
    return Job(root)
