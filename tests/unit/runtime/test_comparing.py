"""Memory that changes by itself is found by who holds it, before anything that comes of it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataloader.errors import CorruptionError, HostError
from runtime import comparing
from runtime.copies import Holding
from runtime.guard import GuardRules
from runtime.protocol import RankWork
from runtime.sabotage import Sabotage, poisoned_steps


def transaction(compare_every: int = 1, state: bytes = b"now", **known: Any) -> Any:
    arithmetic = SimpleNamespace(digest=lambda shard: state)
    facts = SimpleNamespace(guard=GuardRules(compare_every=compare_every))
    return SimpleNamespace(worker=3, step=8, facts=facts, arithmetic=arithmetic, published={}, owners_say={}, **known)


def work(*digests: bytes) -> RankWork:
    return RankWork((1.0,), 1, b"", b"", digests)


def test_a_rank_computed_with_other_parameters_ends_its_worker():
    tx = transaction()
    tx.published = {0: (8, b"a"), 1: (8, b"b")}
    comparing.check_parameters(tx, 8, work(b"a", b"b"))
    with pytest.raises(CorruptionError, match="worker 3's parameters of shard 1 at step 8"):
        comparing.check_parameters(tx, 8, work(b"a", b"x"))
    comparing.check_parameters(tx, 7, work(b"a", b"x"))  # of a step that is over
    comparing.check_parameters(tx, 8, work())  # not compared


def test_a_copy_that_changed_between_two_steps_ends_its_worker():
    held = Holding(True, 8, digest=b"then")
    with pytest.raises(CorruptionError, match="copy of shard 2 at version 8"):
        comparing.check_state(transaction(), 2, held)
    comparing.check_state(transaction(state=b"then"), 2, held)
    comparing.check_state(transaction(compare_every=3), 2, held)
    comparing.check_state(transaction(compare_every=0), 2, held)
    comparing.check_state(transaction(), 2, Holding(True, 8))  # just taken over


def test_owner_and_backup_that_differ_end_the_job():
    tx = transaction()
    tx.owners_say = {2: (8, b"mine")}
    comparing.check_replica(tx, 2, Holding(True, 8, digest=b"mine"))
    comparing.check_replica(tx, 2, Holding(True, 9, digest=b"other"))  # the owner has not said
    with pytest.raises(HostError, match="shard 2 of version 8 is not the same"):
        comparing.check_replica(tx, 2, Holding(True, 8, digest=b"other"))


def test_a_corrupted_gradient_gets_huge_and_a_parameter_hardly_changes():
    sabotage = Sabotage()
    sabotage.arm({"kind": "corrupt-worker", "what": "gradient"})
    gradient = torch.tensor([0.25, -3.0, 1e-6, 0.5])
    sabotage.rank_done(gradient)
    changed = (gradient != torch.tensor([0.25, -3.0, 1e-6, 0.5])).nonzero().flatten().tolist()
    assert changed == [3]
    assert float(gradient[3]) > 1e38
    before = gradient.clone()
    sabotage.rank_done(gradient)  # once
    assert torch.equal(gradient, before)

    sabotage.arm({"kind": "corrupt-worker", "what": "parameter"})
    flat = torch.tensor([0.25, -3.0])
    sabotage.installed(flat)
    assert flat.tolist() != [0.25, -3.0]
    assert np.allclose(flat.numpy(), [0.25, -3.0], rtol=1e-6)


def test_poison_hits_the_first_micro_batch_of_its_step_however_often():
    faults = [{"at_step": 4, "fault": "poison,what=nan"}, {"at_step": 6, "fault": "poison,what=spike"}]
    sabotage = Sabotage(poisoned_steps([*faults, {"at_step": 5, "fault": "kill-worker=1"}]))
    sabotage.arm({"kind": "poison", "what": "spike", "step": 9})
    for step, expected in ((4, torch.nan), (5, 1.0), (6, 1.0e4), (9, 1.0e4)):
        for _ in range(2):
            gradient = torch.ones(4)
            sabotage.micro_batch_done(step, 0, gradient)
            assert float(gradient[0]) == pytest.approx(expected, nan_ok=True)
            sabotage.micro_batch_done(step, 1, gradient := torch.ones(4))
            assert torch.equal(gradient, torch.ones(4))
