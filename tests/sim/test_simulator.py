"""The production protocol under a thousand seeds of faults, and every planted bug found."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS
from tests.sim.report import run_seed, run_seeds

SEEDS = 1000
# Where each bug was found; a seed means another run as soon as the simulator or the code draws otherwise, so this only
# saves the search.
FOUND_AT = {
    "old-frames-accepted": 0,
    "future-frames-dropped": 1,
    "empty-contributions-not-awaited": 41,
    "owner-vouches": 0,
    "filling-backup-has-no-vote": 0,
    "one-backup-is-enough": 13,
    "gradients-before-the-snapshot-dropped": 1,
    "parameters-installed-uncertified": 6,
    "backup-applies-uncertified": 0,
}


@pytest.mark.timeout(900)
def test_no_seed_breaks_a_promise() -> None:
    report = run_seeds(range(SEEDS))
    told = [f"{violation}; replay: python -m tests.sim --seed {seed} --trace" for seed, violation in report.failed]
    assert not told, "\n".join(told)
    assert report.outcomes == SEEDS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(FOUND_AT))
def test_a_planted_bug_is_found(name: str) -> None:
    assert name in BUGS
    if run_seed(FOUND_AT[name], name).violation is not None:
        return
    assert run_seeds(range(SEEDS), plant=name, first_only=True).failed
