import math
from collections.abc import Callable

import pytest

from elastic.audit import Expected, audit, diff
from runtime.protocol import StepRecord

Make = Callable[..., StepRecord]
EXPECTED = Expected(steps=10, global_batch=16, tokens=2048, done=True)


def findings(records: list[StepRecord], expected: Expected = EXPECTED) -> list[str]:
    checks = audit(records, expected, lambda first: f"{first // 16 + 1000:032x}")
    return [check.finding for check in checks if check.finding is not None]


def test_a_sound_run_passes(step_record: Make) -> None:
    assert findings([step_record(step) for step in range(10)]) == []


def test_a_run_that_is_not_done_may_be_shorter(step_record: Make) -> None:
    records = [step_record(step) for step in range(7)]
    assert findings(records, Expected(10, 16, 2048, done=False)) == []
    assert findings(records) == ["the run says that it is done, and step 7 is missing"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": (80, 95)}, "samples [80, 95], expected [80, 96]"),
        ({"samples": (64, 80)}, "samples [64, 80], expected [80, 96]"),
        ({"tokens": 2047}, "2047 tokens, expected 2048"),
        ({"generation": 1}, "generation 1 after generation 2"),
        ({"digest": "abc"}, "digest is 'abc'"),
        ({"digest": "g" * 32}, "digest is"),
        ({"verdict": "maybe"}, "verdict 'maybe'"),
        ({"data_digest": "0" * 32}, "the data files give"),
    ],
)
def test_each_rule_finds_its_breach(step_record: Make, changes: dict[str, object], says: str) -> None:
    records = [step_record(step) for step in range(10)]
    records[5] = step_record(5, **{"generation": 2, **changes})
    found = findings(records)
    assert found
    assert found[0].startswith(f"step 5: {says}") or f"step 5: {says}" in found[0] or says in found[0]


def test_lost_and_repeated_steps(step_record: Make) -> None:
    records = [step_record(step) for step in range(10)]
    assert findings(records[:4] + records[5:])[0] == "step 5: is record 4 of the ledger, where step 4 belongs"
    assert findings([*records[:4], records[3], *records[4:]])[0].startswith("step 3: is record 4")
    assert "the job only 10" in findings([*records, step_record(10)])[0]


def test_a_recipe_decides_which_tokens_count(step_record: Make) -> None:
    expected = Expected(10, 16, None, done=False)
    assert findings([step_record(0, tokens=5)], expected) == []
    assert findings([step_record(0, tokens=0, verdict="skip")], expected) == []
    assert findings([step_record(0, tokens=0)], expected) == ["step 0: 0 tokens were counted"]


def test_equal_runs_under_other_memberships(step_record: Make) -> None:
    a = [step_record(step) for step in range(5)]
    b = [step_record(step, generation=7, workers=1, copies=1, time=0.0, seconds=9.0) for step in range(5)]
    assert diff(a, b).same
    assert diff([step_record(0, loss=math.nan)], [step_record(0, loss=math.nan)]).same


def test_the_first_difference_is_named_by_step_and_field(step_record: Make) -> None:
    a = [step_record(step) for step in range(5)]
    b = [*a[:2], step_record(2, digest="f" * 32, loss=math.nextafter(a[2].loss, 0)), *a[3:]]
    first = diff(a, b).first
    assert first is not None
    assert (first.step, first.field) == (2, "loss")
    assert first.a != first.b
    zero = diff([step_record(0, lr=0.0)], [step_record(0, lr=-0.0)]).first
    assert zero is not None
    assert zero.field == "lr"


def test_lengths_count(step_record: Make) -> None:
    a = [step_record(step) for step in range(5)]
    comparison = diff(a, a[:3])
    assert (comparison.first, comparison.common, comparison.lengths) == (None, 3, (5, 3))
    assert not comparison.same
