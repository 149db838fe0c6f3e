"""What the controller is told, and what it asks for: values only.

Events come from node agents (which pass on what their workers say), from the shell around the controller (agents that
came up or went down, requests, time) and carry wall-clock stamps only where they are measured, never decided on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from runtime.protocol import Ballot, Report, StepRecord, WorkerId

NodeId: TypeAlias = int

# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that is up: its model is built, it listens, its probe has run."""

    worker: WorkerId
    pid: int
    address: tuple[str, int]
    numerics: Mapping[str, str]
    probe: str
    linked: bool = False
    optimizer_bytes: int = 0
    computed: int = 0  # micro-batches in its life


@dataclass(frozen=True, slots=True)
class Exit:
    """A worker that its agent saw end."""

    worker: WorkerId
    reason: str
    time: float
    computed: int  # micro-batches in its life


@dataclass(frozen=True, slots=True)
class AgentUp:
    """An agent introduces itself, to a new controller or anew. `instance` is unique to its process."""

    slot: int
    instance: str
    host: str
    workers: tuple[WorkerInfo, ...] = ()
    starting: tuple[WorkerId, ...] = ()  # workers that it started and that aren't up yet
    exited: tuple[Exit, ...] = ()  # of its life, for a controller that has not heard of them


@dataclass(frozen=True, slots=True)
class AgentDown:
    slot: int
    instance: str  # "": whichever the slot held
    time: float


@dataclass(frozen=True, slots=True)
class AgentBeat:
    """It lives, and its control thread runs. `sent`: by its wall clock."""

    slot: int
    instance: str
    sent: float


@dataclass(frozen=True, slots=True)
class WorkerUp:
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerLinked:
    """It has tried its links to all the peers that it was told of. `unreached`: to these it has none, as of now."""

    worker: WorkerId
    unreached: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """`notice`: how it was found: it ended by itself (exit), or its agent killed it (frozen, hung, stuck)."""

    worker: WorkerId
    reason: str
    time: float
    notice: str = "exit"


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """It says itself why it can't go on. `theirs`: the user or the host is to blame, another try won't help."""

    worker: WorkerId
    message: str
    theirs: bool


@dataclass(frozen=True, slots=True)
class LinkLost:
    """`dialled`: it could not be opened again."""

    worker: WorkerId
    peer: WorkerId
    time: float
    dialled: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    report: Report


@dataclass(frozen=True, slots=True)
class PlanInstalled:
    worker: WorkerId
    ballot: Ballot
    waiting: bool  # it was not computing a micro-batch of its own
    links_opened: int = 0
    links_closed: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """It goes on at the plan's version. `bytes_moved`: state that it sent before it could."""

    worker: WorkerId
    ballot: Ballot
    time: float
    bytes_moved: int = 0
    optimizer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The logical ranks that a plan handed over are computed."""

    worker: WorkerId
    ballot: Ballot
    milliseconds: float


@dataclass(frozen=True, slots=True)
class ShardFilled:
    worker: WorkerId
    ballot: Ballot
    shard: int
    optimizer_bytes: int = 0
    bytes_moved: int = 0  # of the snapshot that filled it


@dataclass(frozen=True, slots=True)
class StepDoubted:
    """All records of a step are there, and don't decide it: it is to be computed again."""

    worker: WorkerId
    ballot: Ballot
    step: int


@dataclass(frozen=True, slots=True)
class StepsDecided:
    worker: WorkerId
    records: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Micro-batches of `step` that this worker has computed so far, and of all steps in its life.

    `optimizer_bytes`: held when it began the step; state comes into being with the first step, so a plan's say is old.
    `micro_batch_seconds`: the median of the step's so far; of one that belongs to none, where it has no logical rank.
    """

    worker: WorkerId
    step: int
    micro_batches: int
    total: int
    optimizer_bytes: int = 0
    micro_batch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardSaved:
    """One data file of a checkpoint is durable. `file` is the manifest's entry for it."""

    worker: WorkerId
    version: int
    shard: int
    file: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SaveDelayed:
    """A file of this version's checkpoint can't be written now. It is tried again, until a newer one waits."""

    worker: WorkerId
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsWritten:
    worker: WorkerId
    version: int


@dataclass(frozen=True, slots=True)
class WaitingAtGate:
    worker: WorkerId
    step: int


@dataclass(frozen=True, slots=True)
class FaultRequested:
    """A fault from the command line."""

    fault: str


@dataclass(frozen=True, slots=True)
class CannotGoOn:
    """What the job runs on is broken: it is to save what it can, and to end with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Killed:
    """An injected kill or freeze was done: the moment of it. `slot`: an agent's (worker is -1 then)."""

    worker: WorkerId
    time: float
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Preempted:
    """An agent was told that its node goes away in so many seconds. It says so again whenever it introduces itself."""

    slot: int
    instance: str
    seconds: float
    notice: str  # how it was told


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Its manifest is in place: by the shell, and version 0 by the worker that computed the initial weights."""

    version: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class Told:
    """An event that came from an agent, or from a worker by way of it: its times are that host's."""

    slot: int
    event: Event


Event: TypeAlias = (
    AgentUp
    | AgentDown
    | AgentBeat
    | WorkerUp
    | WorkerLinked
    | WorkerExited
    | WorkerFailed
    | LinkLost
    | Reported
    | PlanInstalled
    | Resumed
    | Recomputed
    | ShardFilled
    | StepDoubted
    | StepsDecided
    | Progress
    | ShardSaved
    | SaveDelayed
    | WeightsWritten
    | WaitingAtGate
    | FaultRequested
    | CannotGoOn
    | Killed
    | Preempted
    | CheckpointWritten
    | Tick
    | Told
)

# --- actions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the controller's durable state durable, before anything that follows."""

    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StartAgent:
    slot: int


@dataclass(frozen=True, slots=True)
class WelcomeAgent:
    """Tell an agent its node id."""

    slot: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class StartWorker:
    slot: int
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class KillWorker:
    """SIGKILL. `fault`: an injected one; the agent tells when it was done."""

    slot: int
    worker: WorkerId
    fault: bool = False


@dataclass(frozen=True, slots=True)
class Freeze:
    """An injected SIGSTOP, and SIGCONT after so many seconds, if any: a worker; -1: the agent, `whole` with workers."""

    slot: int
    worker: WorkerId
    seconds: float | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Thaw:
    """SIGCONT to a worker."""

    slot: int
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class CutAgent:
    """An injected partition: nothing passes between the agent and the controller, for so many seconds; 0: no more."""

    slot: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JumpClock:
    """An injected fault: the wall clock of the agent and its workers is so many seconds ahead from now on."""

    slot: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ThawAgent:
    """SIGCONT to an agent and its workers, for which it can't do it itself."""

    slot: int


@dataclass(frozen=True, slots=True)
class KillAgent:
    """SIGKILL the agent's process; its workers die with it. `again`: Ray brings it back."""

    slot: int
    again: bool


@dataclass(frozen=True, slots=True)
class PreemptAgent:
    """Tell an agent that its node goes away in so many seconds: an injected notice."""

    slot: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseAgent:
    """Nothing is held on that node any more: its workers may finish what they write and leave, and the agent with them.
    Nobody is started there again."""

    slot: int


@dataclass(frozen=True, slots=True)
class KillController:
    pass


@dataclass(frozen=True, slots=True)
class FreezeController:
    seconds: float | None


@dataclass(frozen=True, slots=True)
class FailStore:
    """An injected fault: no manifest can be written for so long."""

    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class KillDriver:
    """SIGKILL to the job process."""


@dataclass(frozen=True, slots=True)
class ToWorker:
    """A message for one worker, through its agent: ask, plan, peers, release, initialise, ack."""

    slot: int
    worker: WorkerId
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AppendEvent:
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AppendLedger:
    record: StepRecord


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """All data files of this checkpoint are durable."""

    version: int
    shards: Mapping[int, Mapping[str, Any]]  # entries for the manifest, by shard


@dataclass(frozen=True, slots=True)
class PruneCheckpoints:
    """Nobody reads an old checkpoint: keep the newest `checkpoint.keep` ones."""


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """Something that people look at has changed."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a Tick after so many seconds. One that comes earlier may do for several; each asks for the next."""

    after_seconds: float


@dataclass(frozen=True, slots=True)
class End:
    state: str  # done | stopped | failed
    reason: str


Action: TypeAlias = (
    Persist
    | StartAgent
    | WelcomeAgent
    | StartWorker
    | KillWorker
    | Freeze
    | Thaw
    | ThawAgent
    | CutAgent
    | JumpClock
    | KillAgent
    | PreemptAgent
    | ReleaseAgent
    | KillController
    | FreezeController
    | FailStore
    | KillDriver
    | ToWorker
    | AppendEvent
    | AppendLedger
    | WriteManifest
    | PruneCheckpoints
    | PublishStatus
    | Wake
    | End
)
