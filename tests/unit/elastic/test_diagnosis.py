"""What the attempts at a step come to, in words."""

from __future__ import annotations

import math

from elastic.diagnosis import diagnose, not_reproduced
from runtime.guard import GuardRules
from runtime.protocol import Attempt, Header

STOP = GuardRules("stop")


def attempt(bits: bytes, workers: tuple[int, ...], digests: tuple[bytes, ...], bad: str) -> Attempt:
    return Attempt((Header(0, math.nan if bad else 4.0, bits, 20.0, 10, b"data"),), workers, digests, bad)


def test_the_first_time_it_is_only_computed_again():
    finding = diagnose(7, 16, [attempt(b"a", (0, 1), (b"p", b"q"), "the loss is nan")], STOP, False)
    assert finding.event == {"step": 7, "attempt": 1, "reason": "the loss is nan", "outcome": "computed again"}
    assert (finding.wrong, finding.stop, finding.hopeless) == ((), "", "")


def test_bad_data_stop_the_job_with_one_line():
    attempts = [attempt(b"a", w, (b"p", b"q"), "the gradient's norm is nan") for w in ((0, 1), (1, 0))]
    finding = diagnose(7, 16, attempts, STOP, False)
    assert finding.stop == (
        "step 7 is bad, and so it is when others compute it: the gradient's norm is nan"
        " (samples [112, 128), loss 2, gradient norm nan); guard.on_bad_data is stop"
    )
    assert finding.event["outcome"] == "stopped"


def test_a_worker_that_is_always_wrong_is_outvoted():
    attempts = [
        attempt(b"a", (0, 1), (b"x", b"q"), "nan"),
        attempt(b"b", (1, 0), (b"p", b"y"), "nan"),
        attempt(b"c", (2, 2), (b"p", b"q"), ""),
    ]
    finding = diagnose(7, 16, attempts, STOP, False)
    assert finding.wrong == ((0, 0), (0, 1))
    assert not_reproduced(finding.wrong, 7) == {0: "its gradient of rank 0, 1 at step 7 could not be reproduced"}


def test_six_attempts_of_which_no_two_agree_end_the_job():
    attempts = [attempt(bytes([n]), (n % 2,), (b"",), "") for n in range(6)]
    assert diagnose(7, 16, attempts[:5], STOP, False).hopeless == ""
    assert "no two agree; workers [0, 1] took part" in diagnose(7, 16, attempts, STOP, False).hopeless


def test_one_worker_s_word_is_enough_only_where_nobody_else_was_there() -> None:
    """Who has joined since computed nothing of it yet: the workers doubt the step again, so it isn't the data."""
    attempts = [attempt(b"a", (0, 0), (b"p", b"q"), "the loss is nan")] * 2
    assert diagnose(7, 16, attempts, STOP, alone=True).stop
    assert not diagnose(7, 16, attempts, STOP, alone=False).stop
