"""Events and actions as plain values, the only form in which they cross a Ray call or an agent's socket.

    {"kind": the class's name, ...its fields}

Rules of this room: whatever comes in is checked for shape here and nowhere else; what doesn't fit is a PeerError with
one line, never a crash of the one who listens. Maps have string keys on the way (msgpack takes no others).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from dataloader.errors import PeerError
from elastic import messages as m
from elastic.messages import Event
from runtime.protocol import Ballot, record_from_plain, report_from_plain, to_plain

Plain: TypeAlias = dict[str, Any]
AgentAction: TypeAlias = (
    m.WelcomeAgent
    | m.StartWorker
    | m.KillWorker
    | m.Freeze
    | m.Thaw
    | m.CutAgent
    | m.JumpClock
    | m.PreemptAgent
    | m.ToWorker
)

# What a worker may say. Its agent adds "worker" to those that have the field and leave it away.
WORKER_KINDS = frozenset(
    {
        "WorkerUp",
        "WorkerLinked",
        "WorkerFailed",
        "LinkLost",
        "Reported",
        "PlanInstalled",
        "Resumed",
        "Recomputed",
        "ShardFilled",
        "StepDoubted",
        "StepsDecided",
        "Progress",
        "ShardSaved",
        "SaveDelayed",
        "WeightsWritten",
        "WaitingAtGate",
        "CheckpointWritten",
    }
)
# Events that nobody says again: an agent keeps them until the controller has them.
KEPT_KINDS = frozenset({"WorkerUp", "WorkerLinked", "WorkerExited", "WorkerFailed", "Killed", "Preempted"})
# Events that bear waiting for company: no decision that somebody stands still for hangs on them.
PATIENT_KINDS = frozenset({"AgentBeat", "Progress", "StepsDecided", "ShardFilled", "Recomputed", "WorkerLinked"})

# The others (AgentDown, FaultRequested, CannotGoOn, Tick) are made where the controller is.
_EVENTS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        m.AgentUp,
        m.AgentBeat,
        m.WorkerUp,
        m.WorkerLinked,
        m.WorkerExited,
        m.WorkerFailed,
        m.LinkLost,
        m.Reported,
        m.PlanInstalled,
        m.Resumed,
        m.Recomputed,
        m.ShardFilled,
        m.StepDoubted,
        m.StepsDecided,
        m.Progress,
        m.ShardSaved,
        m.SaveDelayed,
        m.WeightsWritten,
        m.WaitingAtGate,
        m.Killed,
        m.Preempted,
        m.CheckpointWritten,
    )
}
_AGENT_ACTIONS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        m.WelcomeAgent,
        m.StartWorker,
        m.KillWorker,
        m.Freeze,
        m.Thaw,
        m.CutAgent,
        m.JumpClock,
        m.PreemptAgent,
        m.ToWorker,
    )
}


def _ballot(value: Any) -> Ballot:
    incarnation, number = value
    return Ballot(incarnation, number)


def worker_info(value: Mapping[str, Any]) -> m.WorkerInfo:
    """Raises TypeError, KeyError or ValueError if it is none."""
    host, port = value["address"]
    return m.WorkerInfo(**{**value, "address": (str(host), int(port))})


# Fields whose plain form is not the value itself.
_FIELDS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("AgentUp", "workers"): lambda v: tuple(worker_info(w) for w in v),
    ("AgentUp", "starting"): tuple,
    ("AgentUp", "exited"): lambda v: tuple(m.Exit(**e) for e in v),
    ("WorkerUp", "info"): worker_info,
    ("WorkerLinked", "unreached"): tuple,
    ("Reported", "report"): report_from_plain,
    ("PlanInstalled", "ballot"): _ballot,
    ("Resumed", "ballot"): _ballot,
    ("Recomputed", "ballot"): _ballot,
    ("ShardFilled", "ballot"): _ballot,
    ("StepDoubted", "ballot"): _ballot,
    ("StepsDecided", "records"): lambda v: tuple(record_from_plain(r) for r in v),
}


def event_to_plain(event: Event) -> Plain:
    return {"kind": type(event).__name__, **_plain_fields(event)}


def event_from_plain(value: Mapping[str, Any]) -> Event:
    """Raises PeerError if it is no event."""
    return _build(_EVENTS, value, "event")  # type: ignore[no-any-return]


def action_to_plain(action: AgentAction) -> Plain:
    """An action that an agent carries out."""
    return {"kind": type(action).__name__, **_plain_fields(action)}


def action_from_plain(value: Mapping[str, Any]) -> AgentAction:
    """Raises PeerError if it is no action of an agent's."""
    return _build(_AGENT_ACTIONS, value, "action")  # type: ignore[no-any-return]


def from_worker(worker: int, message: Mapping[str, Any]) -> Plain:
    """A worker's message as a plain event of that worker. Raises PeerError for a kind that is not a worker's to say."""
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in WORKER_KINDS:
        raise PeerError(f"worker {worker} says {kind!r}, which no worker may")
    takes_worker = any(f.name == "worker" for f in fields(_EVENTS[kind]))
    return {**message, "worker": message.get("worker", worker)} if takes_worker else dict(message)


def _plain_fields(value: Any) -> Plain:
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    """`to_plain` with string keys. Values that are plain already, most of them, pass quickly."""
    kind = type(value)
    if kind is dict:
        return {key if type(key) is str else str(key): _plain(inner) for key, inner in value.items()}
    if kind is list or kind is tuple:
        return [inner if type(inner) is int else _plain(inner) for inner in value]
    if kind is int or kind is str or kind is float or kind is bytes:
        return value
    if isinstance(value, Mapping):
        return _plain(dict(value))
    if is_dataclass(value) or isinstance(value, tuple):
        return _plain(to_plain(value))
    return value


def _build(known: Mapping[str, type[Any]], value: Mapping[str, Any], what: str) -> Any:
    given = dict(value)
    kind = given.pop("kind", None)
    cls = known.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise PeerError(f"{kind!r} is no {what}")
    try:
        for name in given.keys() & {name for of, name in _FIELDS if of == kind}:
            given[name] = _FIELDS[kind, name](given[name])
        return cls(**given)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise PeerError(f"malformed {what} {kind}: {type(error).__name__} {error}".splitlines()[0]) from error
