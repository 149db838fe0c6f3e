"""The words of the step and recovery protocol: values only, shared by workers, controller and simulator.

Rule numbers are those of docs/architecture.md ("The protocol"). Nothing here acts; everything here crosses a
link or a Ray call as plain values (``to_plain`` / ``from_plain``), never pickled by Everstep.

    ballot       (incarnation, number): names one round of ask, report, plan. Totally ordered.
    plan         the outcome of a ballot: who is a member, where to go on, which pieces are where.
    frame        what one worker sends another inside a generation (= under one installed plan).
    header       what a shard's owner says of its reduced gradient; a backup's *record* is the same header.
    certificate  one header per shard, of one step: the step is durable and may be judged.
    node         a whole subtree [low, high) of the reduction tree over logical ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import IntEnum
from struct import pack
from typing import Any, NamedTuple, TypeAlias

WorkerId: TypeAlias = int
Node: TypeAlias = tuple[int, int]  # [low, high) over logical ranks
Figures: TypeAlias = tuple[float, float]  # of a step: (loss per token, gradient norm before clipping)


class Ballot(NamedTuple):
    """Round of ask, report and plan. The incarnation comes from one linearizable counter (rule 9)."""

    incarnation: int
    number: int


NO_BALLOT = Ballot(0, 0)


class FrameKind(IntEnum):
    CONTRIBUTION = 1  # a worker's pre-added gradients of one shard -> its owner
    GRADIENT = 2  # a reduced shard, owner -> backup, with its header
    RECORD = 3  # a header, backup -> all: "I hold this reduced shard"
    PARAMETERS = 4  # a shard's new parameters, owner -> all, with the certificate
    SNAPSHOT = 5  # a shard's whole state, owner -> a backup that is being filled
    LOST = 6  # link control: "I lost my link to worker N"; outside the step protocol


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one logical rank reports of one step: its micro-batches' losses (in order), tokens and data digest."""

    losses: tuple[float, ...]
    tokens: int
    data_digest: bytes
    gradient_digest: bytes = b""  # told of in reports only
    parameter_digests: tuple[bytes, ...] = ()  # by shard: what it was computed with, where the step compares; not sent


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What the owner says of one reduced shard of one step; the same from every shard but for the first three.

    Headers are equal when their bits are: a NaN equals itself here.
    """

    shard: int
    squared_norm: float
    digest: bytes
    loss: float  # summed loss of the global batch (fsum over micro-batches)
    tokens: int
    data_digest: bytes

    def _bits(self) -> tuple[int, bytes, bytes, int, bytes]:
        return self.shard, pack("<dd", self.squared_norm, self.loss), self.digest, self.tokens, self.data_digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Header) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash(self._bits())


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof that `step` is decided. Without headers it is *void*: version step + 1 came from a checkpoint."""

    step: int
    headers: tuple[Header, ...]  # by shard
    skipped: str = ""  # why the step is not applied, though it is decided
    attempts: int = 1  # computations that it took
    wrong: tuple[tuple[WorkerId, int], ...] = ()  # (worker, logical rank) of gradients that could not be reproduced

    @property
    def void(self) -> bool:
        return not self.headers


@dataclass(frozen=True, slots=True)
class Attempt:
    """One computation of a step that was not decided by it: its figures are bad, or nobody else got the same bits."""

    headers: tuple[Header, ...]
    workers: tuple[WorkerId, ...]  # by logical rank: who computed it
    digests: tuple[bytes, ...]  # by logical rank: of its gradient, as who computed it says; b"": it is dead
    bad: str  # what is wrong with its figures; "": nothing


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    ballot: Ballot
    step: int
    shard: int
    meta: Any = None  # plain values
    payload: Any = None  # a buffer in production, any value in the simulator


@dataclass(frozen=True, slots=True)
class Member:
    worker: WorkerId
    node: int
    joining: bool = False  # empty-handed: everything it holds is forgotten (rule 12)
    behind: bool = False  # gets version B from the owners


@dataclass(frozen=True, slots=True)
class ShardPlan:
    owner: WorkerId
    backups: tuple[WorkerId, ...]  # every named backup votes, filled or not (rule 5)
    fill: tuple[WorkerId, ...] = ()  # the backups that hold no complete copy yet


@dataclass(frozen=True, slots=True)
class Plan:
    ballot: Ballot
    members: tuple[Member, ...]  # by worker id
    version: int  # B: where to go on (rule 13)
    certificate: Certificate  # certificate(B-1), void if version B came from a checkpoint
    checkpoint: int | None  # set: roll back to (or start from) this checkpoint's version == B (rule 17)
    shards: tuple[ShardPlan, ...]
    ranks_now: tuple[WorkerId, ...]  # logical rank -> worker, for step B
    ranks_next: tuple[WorkerId, ...]  # logical rank -> worker, from step B+1 on
    stop_at: int  # training ends at this version: a policy decision bound to steps >= B
    attempts: tuple[Attempt, ...] = ()  # at step B, so far
    history: tuple[Figures, ...] = ()  # of the last committed steps before B, as many as the job looks back at

    def ids(self) -> tuple[WorkerId, ...]:
        return tuple(m.worker for m in self.members)

    def member(self, worker: WorkerId) -> Member | None:
        return next((m for m in self.members if m.worker == worker), None)

    def copies(self) -> int:
        """Complete copies of the worst-off shard; 1 means that some shard has no filled backup."""
        return min(1 + len(s.backups) - len(s.fill) for s in self.shards)


@dataclass(frozen=True, slots=True)
class HoldingReport:
    """One shard's copy at one worker."""

    shard: int
    complete: bool
    version: int  # optimizer version; when filling: the version its snapshot will have
    pending: tuple[int, ...]  # steps whose reduced gradient is held and not yet applied


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's promise and all it holds (rule 10). ``plan`` is the whole installed plan, or None for a joiner."""

    ballot: Ballot
    worker: WorkerId
    plan: Plan | None
    step: int
    bare: bool  # its parameters are not complete: it is being brought to `step + 1`
    certificate: Certificate | None  # of `step`, if certified
    previous: Certificate | None  # of `step - 1`
    holdings: tuple[HoldingReport, ...]
    computed: tuple[Node, ...]  # cost only: subtrees of `step` that it has computed
    doubted: tuple[Header, ...] = ()  # of `step`: what its records say, if that doesn't decide it
    doubt: str = ""  # what is wrong with the figures of that
    digests: tuple[tuple[int, bytes], ...] = ()  # (logical rank, digest of its gradient) of those computed here
    history: tuple[Figures, ...] = ()  # of the last committed steps before `reached`

    @property
    def reached(self) -> int:
        return self.step + (1 if self.certificate is not None else 0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decided step, as a worker saw it; the ledger adds nothing but its place."""

    step: int
    generation: int
    workers: int
    copies: int
    samples: tuple[int, int]
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    verdict: str
    digest: str
    data_digest: str
    time: float = 0.0
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # of a skipped step
    attempts: int = 1
    wrong: tuple[tuple[WorkerId, int], ...] = ()


# --- plain values: the only form in which these cross a process boundary -------------------------------------


def to_plain(value: Any) -> Any:
    """Dataclasses -> dicts, tuples -> lists; the rest is plain already."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    return value


def header_from_plain(d: Mapping[str, Any]) -> Header:
    return Header(**d)


def certificate_from_plain(d: Mapping[str, Any]) -> Certificate:
    headers = tuple(header_from_plain(h) for h in d["headers"])
    return Certificate(d["step"], headers, d["skipped"], d["attempts"], _pairs(d["wrong"]))


def _certificate_if_any(d: Mapping[str, Any] | None) -> Certificate | None:
    return None if d is None else certificate_from_plain(d)


def pack_header(h: Header) -> list[Any]:
    """The short form used in frames, where every microsecond is paid once per shard and peer."""
    return [h.shard, h.squared_norm, h.digest, h.loss, h.tokens, h.data_digest]


def unpack_header(v: Sequence[Any]) -> Header:
    return Header(*v)


def pack_certificate(c: Certificate) -> list[Any]:
    return [c.step, [pack_header(h) for h in c.headers], c.skipped, c.attempts, [list(pair) for pair in c.wrong]]


def unpack_certificate(v: Sequence[Any]) -> Certificate:
    return Certificate(v[0], tuple(unpack_header(h) for h in v[1]), v[2], v[3], _pairs(v[4]))


def attempt_from_plain(d: Mapping[str, Any]) -> Attempt:
    headers = tuple(header_from_plain(h) for h in d["headers"])
    return Attempt(headers, tuple(d["workers"]), tuple(d["digests"]), d["bad"])


def _pairs(v: Sequence[Sequence[Any]]) -> tuple[tuple[Any, Any], ...]:
    return tuple((first, second) for first, second in v)


def plan_from_plain(d: Mapping[str, Any] | None) -> Plan | None:
    if d is None:
        return None
    return Plan(
        ballot=Ballot(*d["ballot"]),
        members=tuple(Member(**m) for m in d["members"]),
        version=d["version"],
        certificate=certificate_from_plain(d["certificate"]),
        checkpoint=d["checkpoint"],
        shards=tuple(ShardPlan(s["owner"], tuple(s["backups"]), tuple(s["fill"])) for s in d["shards"]),
        ranks_now=tuple(d["ranks_now"]),
        ranks_next=tuple(d["ranks_next"]),
        stop_at=d["stop_at"],
        attempts=tuple(attempt_from_plain(a) for a in d["attempts"]),
        history=_pairs(d["history"]),
    )


def report_from_plain(d: Mapping[str, Any]) -> Report:
    return Report(
        ballot=Ballot(*d["ballot"]),
        worker=d["worker"],
        plan=plan_from_plain(d["plan"]),
        step=d["step"],
        bare=d["bare"],
        certificate=_certificate_if_any(d["certificate"]),
        previous=_certificate_if_any(d["previous"]),
        holdings=tuple(
            HoldingReport(h["shard"], h["complete"], h["version"], tuple(h["pending"])) for h in d["holdings"]
        ),
        computed=tuple((low, high) for low, high in d["computed"]),
        doubted=tuple(header_from_plain(h) for h in d["doubted"]),
        doubt=d["doubt"],
        digests=_pairs(d["digests"]),
        history=_pairs(d["history"]),
    )


def record_from_plain(d: Mapping[str, Any]) -> StepRecord:
    return StepRecord(**{**d, "samples": tuple(d["samples"]), "wrong": _pairs(d["wrong"])})
