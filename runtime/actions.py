"""What the step transaction asks of the world around it: values, in the order in which they are to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from runtime.arithmetic import Payload
from runtime.protocol import Ballot, Frame, Report, StepRecord, WorkerId


@dataclass(frozen=True, slots=True)
class Send:
    to: WorkerId
    frame: Frame


@dataclass(frozen=True, slots=True)
class Compute:
    """The logical ranks still wanted of `step`, in order; replaces what was wanted before.

    A rank of the same step that is being computed right now goes on. Staged parameters are those of version
    `step` and are to be installed first where they aren't yet. No ranks: stop after the current micro-batch.
    """

    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendReport:
    report: Report


@dataclass(frozen=True, slots=True)
class Doubted:
    """All records of the step are here, and don't decide it: it is to be computed again (runtime/trial.py)."""

    ballot: Ballot
    step: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A step was decided and all its parameters are here: for the ledger."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class Save:
    """Write one's own shards to the checkpoint of this version: (shard, copy as ``Arithmetic.snapshot`` gives it)."""

    version: int
    shards: tuple[tuple[int, tuple[Any, Payload]], ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """This backup's copy of the shard is complete."""

    ballot: Ballot
    shard: int


@dataclass(frozen=True, slots=True)
class AtGate:
    """Held at the boundary before `step` until released."""

    step: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last version of the plan was reached."""

    version: int


Action: TypeAlias = Send | Compute | SendReport | Doubted | Decided | Save | Filled | AtGate | Ended
