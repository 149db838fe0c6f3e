"""What the records of a run prove, and in what two runs differ.

    audit   every sample of the global order was used once and in its place: steps 0, 1, 2, ... without gap or repeat,
            each with the samples [t * B, (t + 1) * B), and each with the digest of exactly those tokens, computed
            again from the data files
    diff    the first step in which two runs differ, and in which field

Pure functions over records; only the caller reads files.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from elastic.record_lines import differing_field
from runtime.protocol import StepRecord

DataDigest: TypeAlias = Callable[[int], str]  # first sample of a global batch -> its digest, hexadecimal
VERDICTS = ("commit", "skip")
DIGEST_LENGTH = 32  # hexadecimal digits of xxh3_128


@dataclass(frozen=True, slots=True)
class Expected:
    """What the job says of its ledger. `tokens` a step: None where a recipe decides what counts."""

    steps: int
    global_batch: int
    tokens: int | None
    done: bool  # the run says of itself that it reached its end


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, and the first place where it doesn't hold."""

    name: str
    finding: str | None = None

    @property
    def holds(self) -> bool:
        return self.finding is None


def audit(records: Sequence[StepRecord], expected: Expected, data_digest: DataDigest) -> Iterator[Check]:
    """Each check as it is finished; the last one reads all the data that the run has used."""
    batch = expected.global_batch
    yield _check("steps in order, none lost, none repeated", records, _order)
    yield _check(f"samples [t*{batch}, (t+1)*{batch})", records, lambda t, r: _samples(r, batch))
    yield _check("tokens per step", records, lambda t, r: _tokens(r, expected.tokens))
    yield _check("generations never go back", records, lambda t, r: _generation(records, t))
    yield _check("digests and verdicts are whole", records, lambda t, r: _whole(r))
    yield _length(len(records), expected)
    yield _check("tokens handed to the loss are those of the data files", records, lambda t, r: _data(r, data_digest))


def _check(name: str, records: Sequence[StepRecord], rule: Callable[[int, StepRecord], str | None]) -> Check:
    for place, record in enumerate(records):
        finding = rule(place, record)
        if finding is not None:
            return Check(name, f"step {record.step}: {finding}")
    return Check(name)


def _order(place: int, record: StepRecord) -> str | None:
    return None if record.step == place else f"is record {place} of the ledger, where step {place} belongs"


def _samples(record: StepRecord, global_batch: int) -> str | None:
    first = record.step * global_batch
    right = (first, first + global_batch)
    return None if record.samples == right else f"samples {list(record.samples)}, expected {list(right)}"


def _tokens(record: StepRecord, tokens: int | None) -> str | None:
    if tokens is None:
        return None if record.tokens > 0 or record.verdict == "skip" else f"{record.tokens} tokens were counted"
    return None if record.tokens == tokens else f"{record.tokens} tokens, expected {tokens}"


def _generation(records: Sequence[StepRecord], place: int) -> str | None:
    before = records[place - 1].generation if place else 0
    now = records[place].generation
    return None if now >= before else f"generation {now} after generation {before}"


def _whole(record: StepRecord) -> str | None:
    for name in ("digest", "data_digest"):
        text = getattr(record, name)
        if len(text) != DIGEST_LENGTH or not set(text) <= set(string.hexdigits):
            return f"{name} is {text!r}, expected {DIGEST_LENGTH} hexadecimal digits"
    return None if record.verdict in VERDICTS else f"verdict {record.verdict!r}, expected one of {', '.join(VERDICTS)}"


def _data(record: StepRecord, data_digest: DataDigest) -> str | None:
    again = data_digest(record.samples[0])
    return None if record.data_digest == again else f"data_digest {record.data_digest}, the data files give {again}"


def _length(found: int, expected: Expected) -> Check:
    name = f"{found} of {expected.steps} steps"
    if found > expected.steps:
        return Check(name, f"the ledger has {found} steps, and the job only {expected.steps}")
    if expected.done and found < expected.steps:
        return Check(name, f"the run says that it is done, and step {found} is missing")
    return Check(name)


# --- two runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step in which two runs differ. `a` and `b` are the values as text."""

    step: int
    field: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ledgers side by side. `same` also wants them equally long."""

    common: int  # steps that both have
    lengths: tuple[int, int]
    first: Difference | None

    @property
    def same(self) -> bool:
        return self.first is None and self.lengths[0] == self.lengths[1]


def diff(a: Sequence[StepRecord], b: Sequence[StepRecord]) -> Comparison:
    """Compare what must not depend on the membership: samples, data, loss, norm, rate, verdict and state digest."""
    first = None
    for of_a, of_b in zip(a, b, strict=False):
        if of_a.step != of_b.step:
            first = Difference(min(of_a.step, of_b.step), "step", str(of_a.step), str(of_b.step))
        elif (name := differing_field(of_a, of_b)) is not None:
            first = Difference(of_a.step, name, str(getattr(of_a, name)), str(getattr(of_b, name)))
        if first is not None:
            break
    return Comparison(min(len(a), len(b)), (len(a), len(b)), first)
