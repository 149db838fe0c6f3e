"""Silent corruption: what a worker holds is compared with what it was given, and a worker that differs ends.

    the model's parameters   what a logical rank was computed with, against the digests that the owners published with
                             them: before the rank's gradient is contributed
    a shard's state          right before a step is applied to it, against its digest right after the last one: before
                             anything that comes of it is published
    owner and backup         what both made of one step, against each other

The first two are a worker's own affair: it finds its own memory changed, ends, and is replaced like any that dies, so
nothing of it counts and nothing has to be undone. They are done at every `guard.compare_every`-th step. As each step
brings all parameters anew, with 1 nothing can go wrong unseen; with more, what was wrong and written over between two
comparisons has left its traces in the gradients. The last costs nothing, as both digests are there at every step. It
doesn't tell who is wrong, so it ends the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloader.errors import CorruptionError, HostError
from runtime.protocol import RankWork

if TYPE_CHECKING:
    from runtime.copies import Holding
    from runtime.step import StepTransaction


def check_parameters(tx: StepTransaction, step: int, work: RankWork) -> None:
    """CorruptionError if a rank of this step was computed with other parameters than were published."""
    for shard, digest in enumerate(work.parameter_digests):
        version, published = tx.published.get(shard, (-1, b""))
        if version == step == tx.step and digest != published:
            raise CorruptionError(
                f"worker {tx.worker}'s parameters of shard {shard} at step {step} are not those that were published"
            )


def check_state(tx: StepTransaction, shard: int, holding: Holding) -> None:
    """CorruptionError if this copy has changed by itself since the last step was applied to it."""
    version = holding.version
    if holding.digest and tx.facts.guard.compares(version) and tx.arithmetic.digest(shard) != holding.digest:
        raise CorruptionError(
            f"worker {tx.worker}'s copy of shard {shard} at version {version} is not what it made of the last step"
        )


def check_replica(tx: StepTransaction, shard: int, holding: Holding) -> None:
    """HostError if the owner published another state than this copy came to."""
    version, digest = tx.owners_say.get(shard, (-1, b""))
    if version == holding.version and holding.digest != digest:
        raise HostError(
            f"shard {shard} of version {version} is not the same at its owner and at worker {tx.worker}: one of their"
            " machines computes wrongly; go on from the last checkpoint with --resume, without it"
        )
