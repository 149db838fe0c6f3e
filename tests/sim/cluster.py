"""What stands between the controller and the workers: the shell around the controller, the node agents, the disk.

The shell executes actions strictly in order, and may die between any two. Messages from one controller incarnation to
one agent keep their order, as do those from an agent to the controller; nothing else does, so asks and plans of a
dead controller may arrive long after its successor's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic import messages as m
from elastic.controller import Controller
from elastic.controller_state import resumed_state
from elastic.detector import AGENT_SILENT_SECONDS, FROZEN_SECONDS
from elastic.shell import RETRY_SECONDS
from elastic.wire import event_from_plain, from_worker
from elastic.workforce import BEAT_PERIOD_SECONDS
from runtime.protocol import Ballot, StepRecord, WorkerId
from tests.sim import preemption
from tests.sim.values import digest_of
from tests.sim.worker import SimWorker

if TYPE_CHECKING:
    from tests.sim.world import World

FOREVER = float("inf")
LATEST_SECONDS = 8.0
STOPPED_SECONDS = 0.1  # how often somebody looks whether it goes on


@dataclass
class Disk:
    """What survives everything."""

    controller: str | None = None
    incarnations: int = 0
    ledger: list[StepRecord] = field(default_factory=list)
    events: list[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    shards: dict[tuple[int, int], int] = field(default_factory=dict)
    manifests: dict[int, dict[int, str]] = field(default_factory=dict)
    weights: tuple[int, tuple[int, ...]] | None = None
    fails_until: float = 0.0  # no file of a checkpoint can be written before
    failure: str = ""

    def write_shard(self, version: int, shard: int, state: int) -> dict[str, Any]:
        self.shards[version, shard] = state
        return {"shard": shard, "digest": digest_of(state).hex()}

    def initialise(self, states: tuple[int, ...]) -> None:
        entries = {shard: self.write_shard(0, shard, state)["digest"] for shard, state in enumerate(states)}
        self.manifests[0] = entries

    def publish(self, version: int, entries: Mapping[int, Mapping[str, Any]]) -> None:
        self.manifests[version] = {shard: entry["digest"] for shard, entry in entries.items()}

    def prune(self, keep: int) -> None:
        for old in sorted(self.manifests)[:-keep]:
            del self.manifests[old]
            for key in [key for key in self.shards if key[0] == old]:
                del self.shards[key]

    def newest(self) -> int | None:
        return max(self.manifests, default=None)


@dataclass(eq=False)
class SimAgent:
    """One life of the agent in a slot."""

    slot: int
    instance: str
    alive: bool = True
    deserted: bool = False  # the shell has given it up; it doesn't know
    workers: dict[WorkerId, SimWorker] = field(default_factory=dict)
    infos: dict[WorkerId, m.WorkerInfo] = field(default_factory=dict)
    starting: set[WorkerId] = field(default_factory=set)
    linked: set[WorkerId] = field(default_factory=set)
    exited: list[m.Exit] = field(default_factory=list)
    up_last: float = 0.0
    held_until: float = 0.0  # its words and what is told to it are under way until then
    node: int = -1  # the controller's number for it, once it is welcomed
    ahead_seconds: float = 0.0  # of its wall clock
    stopped: bool = False  # by a signal
    cut_off: int = 0  # partitions that lie between it and the controller
    backlog: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)  # for it, while it is stopped
    parked: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)  # between it and the controller
    down_last: dict[int, float] = field(default_factory=dict)  # by incarnation
    late: dict[int, float] = field(default_factory=dict)  # by incarnation: nothing of it arrives before
    held: dict[int, list[tuple[Any, tuple[Any, ...]]]] = field(default_factory=dict)  # what has come meanwhile
    leave_by: float = FOREVER  # its node goes away then
    slow_reports: float = 0.0  # the next reports take so many seconds longer

    def living(self) -> list[SimWorker]:
        return [w for w in self.workers.values() if w.alive]

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for call, arguments in backlog:
            call(*arguments)

    def introduction(self) -> m.AgentUp:
        infos = tuple(
            m.WorkerInfo(i.worker, i.pid, i.address, i.numerics, i.probe, i.worker in self.linked, 8)
            for i in self.infos.values()
            if self.workers[i.worker].alive
        )
        starting, exited = tuple(sorted(self.starting)), tuple(self.exited)
        return m.AgentUp(self.slot, self.instance, f"host-{self.slot}", infos, starting, exited)


class Cluster:
    """Agents by slot, and the one controller."""

    def __init__(self, world: World) -> None:
        self.world, self.engine = world, world.engine
        self.agents: dict[int, SimAgent] = {}
        self.booting: set[int] = set()
        self.away: set[int] = set()  # slots whose node stays away until it is wanted again
        self.lives = 0
        self.controller: Controller | None = None
        self.incarnation = 0
        self.deposed: dict[int, Controller] = {}  # that still think, cut off from the disk
        self.restarting = False
        self.alarms: dict[int, float] = {}
        self.unwritten: dict[int, Mapping[int, Mapping[str, Any]]] = {}  # manifests, by version
        self.stopped = False  # the controller, by a signal
        self.unheard: list[tuple[int, m.Event]] = []  # meanwhile
        self.jobs = 0  # that were there before this one

    def every_agent(self) -> list[SimAgent]:
        """Also those that others have replaced: they may be alive."""
        known = {w.agent.instance: w.agent for w in self.world.workers.values()}
        return list((known | {a.instance: a for a in self.agents.values()}).values())

    # --- the controller ------------------------------------------------------------------------------------------

    def start_controller(self, job: int = 0) -> None:
        if job != self.jobs:
            return
        self.restarting = False
        disk, sdc = self.world.disk, self.world.job.sdc
        disk.incarnations += 1
        self.incarnation = disk.incarnations
        ledger = disk.ledger
        self.controller = Controller(
            self.world.job.controller_facts(),
            json.loads(disk.controller) if disk.controller is not None else None,
            self.incarnation,
            len(ledger),
            lambda step: ledger[step].digest if step < len(ledger) and not sdc else None,
            disk.newest(),
            self.world.wall() - self.engine.now,
            self.ledger_figures,
        )
        self.world.trace(f"controller {self.incarnation} starts")
        self.world.watch.controller_started(self.incarnation)
        self.execute(self.controller, self.incarnation, self.controller.start(self.engine.now))
        for _, agent in sorted(self.agents.items()):
            if agent.alive and not agent.deserted:
                self.introduce(agent)
        for slot in sorted(self.controller.returning):
            self.engine.after(0.05, self.found_missing, slot)

    def ledger_figures(self, end: int, count: int) -> tuple[tuple[float, float], ...]:
        committed = [(r.loss, r.grad_norm) for r in self.world.disk.ledger[:end] if r.verdict == "commit"]
        return tuple(committed[-count:]) if count else ()

    def found_missing(self, slot: int) -> None:
        agent = self.agents.get(slot)
        if slot not in self.booting and (agent is None or not agent.alive or agent.deserted):
            self.think(self.incarnation, m.AgentDown(slot, "", self.world.wall()))

    def kill_controller(self) -> None:
        """Dead at once; another comes. What it has sent may still arrive. Some live on for a while, deposed."""
        if self.controller is None:
            return
        self.world.trace(f"*** controller {self.incarnation} dies")
        if self.engine.random.random() < 0.6:
            self.deposed[self.incarnation] = self.controller
        self.controller = None
        self.unwritten.clear()
        self.resume_controller()
        self.delay_last_words()
        if not self.restarting:
            self.restarting = True
            self.engine.after(self.engine.jitter(self.world.profile.restart_seconds), self.start_controller, self.jobs)

    def resume_controller(self) -> None:
        """SIGCONT; or there is no such process any more."""
        self.stopped = False
        unheard, self.unheard = self.unheard, []
        for incarnation, event in unheard:
            self.think(incarnation, event)

    def end_job(self) -> None:
        """The job process is killed, and the local Ray with everything in it. Another job resumes the run."""
        self.jobs += 1
        self.world.trace("*** the job process dies, and all with it")
        self.controller, self.restarting = None, False
        self.deposed.clear()
        self.unwritten.clear()
        self.unheard.clear()
        self.stopped = False
        self.world.checks.begin_anew()
        for agent in self.every_agent():
            self.die(agent, "with the job")
            agent.deserted = True
        self.booting.clear()
        self.away.clear()
        self.engine.after(self.engine.jitter(self.world.profile.restart_seconds), self.resume_job, self.jobs)

    def resume_job(self, job: int) -> None:
        """`everstep run --resume`."""
        disk = self.world.disk
        if job == self.jobs:
            if disk.controller is not None:
                disk.controller = json.dumps(resumed_state(json.loads(disk.controller), same_faults=True))
            self.start_controller(job)

    def delay_last_words(self) -> None:
        """What a dead controller has said may come after its successor's words: some time later, or (the worst moment)
        when somebody there has just reported to that; here or there or everywhere."""
        random, now, late = self.engine.random, self.engine.now, self.incarnation
        everywhere = random.random() < 0.3
        for agent in self.agents.values():
            if everywhere or random.random() < 0.3:
                agent.late[late] = FOREVER
                self.engine.after(LATEST_SECONDS, self.let_through, agent, late)
            elif random.random() < 0.3:
                agent.late[late] = now + random.choice((0.3, 2.0, 6.0)) * random.random()
                self.engine.at(agent.late[late], self.let_through, agent, late)
        if everywhere and self.agents:
            answering = random.choice(list(self.agents.values()))
            self.world.effects.impair(answering.living())
            answering.slow_reports = random.choice((0.5, 2.0))

    def heal(self) -> None:
        self.deposed.clear()
        for agent in self.agents.values():
            for lane in list(agent.late):
                self.let_through(agent, lane)

    def let_through(self, agent: SimAgent, lane: int) -> None:
        if agent.late.pop(lane, None) is not None:
            for call, arguments in agent.held.pop(lane, ()):
                self.at_slot(agent, lane, call, arguments)

    def has_reported(self, worker: SimWorker, message: Mapping[str, Any]) -> None:
        """To a newer controller: now the older one's words may come."""
        agent = worker.agent
        if agent.slow_reports:
            agent.up_last = max(agent.up_last, self.engine.now + agent.slow_reports)
            agent.slow_reports = 0.0
        for lane, until in list(agent.late.items()):
            if until == FOREVER and lane < message["report"]["ballot"][0]:
                self.engine.after(
                    self.engine.jitter(0.5 * self.world.profile.control_seconds), self.let_through, agent, lane
                )

    def think(self, incarnation: int, event: m.Event) -> None:
        """An event reaches the controller that it was meant for, if that is still there."""
        controller = self.controller if incarnation == self.incarnation else self.deposed.get(incarnation)
        if controller is None:
            return
        if self.stopped and controller is self.controller:
            self.unheard.append((incarnation, event))
            return
        before = controller.ballots.plan
        actions = controller.handle(event, self.engine.now)
        plan = controller.ballots.plan
        if plan is not before and plan is not None:
            self.world.checks.planned(plan, current=controller is self.controller)
        self.execute(controller, incarnation, actions)

    def execute(self, controller: Controller, incarnation: int, actions: list[m.Action]) -> None:
        for action in actions:
            if controller is self.controller:
                self.act(action)
            elif incarnation in self.deposed:
                if isinstance(action, m.ToWorker) and action.message["kind"] in ("ask", "plan"):
                    self.to_worker(incarnation, action)
                    if self.engine.random.random() < 0.05:  # in mid-sentence
                        del self.deposed[incarnation]
                elif isinstance(action, m.Wake):
                    self.wake(incarnation, action.after_seconds)
            else:
                return

    def act(self, action: m.Action) -> None:
        disk, after = self.world.disk, self.engine.after
        match action:
            case m.ToWorker():
                if action.message["kind"] in ("ask", "plan"):
                    self.world.reached(f"{action.message['kind']} sent", None)
                    if self.controller is None:
                        return
                    if action.message["kind"] == "ask":
                        self.world.watch.asked(Ballot(*action.message["ballot"]), action.worker)
                self.to_worker(self.incarnation, action)
            case m.AppendLedger(record):
                self.world.checks.ledger(record, disk.ledger)
                self.write_ripe_manifests()
            case m.AppendEvent(kind, fields):
                disk.events.append((self.engine.now, kind, fields))
                self.world.watch.event(kind, fields)
                self.world.checks.parked |= kind == "waiting"
                self.world.trace(f"event {kind} {dict(fields)}")
            case m.Persist(state):
                disk.controller = json.dumps(state)
            case m.PruneCheckpoints():
                after(self.engine.jitter(0.02), disk.prune, self.world.job.keep)
            case m.Wake(seconds):
                self.wake(self.incarnation, seconds)
            case m.PublishStatus():
                if self.engine.random.random() < 0.02 and self.controller is not None:
                    json.dumps(self.controller.status())
            case m.StartAgent(slot):
                self.start_agent(slot)
            case m.StartWorker(slot, worker):
                self.to_agent(slot, self.start_worker, worker)
            case m.KillWorker(slot, worker, fault):
                self.to_agent(slot, self.kill_worker, worker, fault)
            case m.KillAgent(slot, again):
                after(self.engine.jitter(0.005), self.kill_agent_as_told, slot, again)
            case m.PreemptAgent(slot, seconds):
                self.to_agent(slot, lambda agent: preemption.notice(self, agent, seconds))
            case m.ReleaseAgent(slot):
                preemption.release(self, slot)
            case m.KillController():
                self.kill_controller()
            case m.Freeze(slot, worker, seconds, whole):
                self.to_agent(slot, self.freeze, worker, seconds, whole)
            case m.JumpClock(slot, seconds):
                self.to_agent(slot, self.world.effects.clock_jump, seconds)
            case m.Thaw(slot, worker):
                self.to_agent(slot, self.thaw, worker)
            case m.ThawAgent(slot):
                after(self.engine.jitter(0.005), self.thaw_agent, slot)
            case m.FailStore(seconds, how):
                self.world.effects.fail_store(seconds, how)
            case m.FreezeController(seconds):
                self.world.effects.freeze_controller(seconds)
            case m.KillDriver():
                after(0.0, self.world.effects.kill_driver)
            case m.WriteManifest(version, shards):
                self.unwritten[version] = shards
                self.write_ripe_manifests()
            case m.End(state, reason):
                self.world.ended = (state, reason)
            case m.WelcomeAgent(slot, node):
                self.agents[slot].node = node

    def wake(self, incarnation: int, seconds: float) -> None:
        """One alarm clock per controller: the earliest wish counts, the others are forgotten with it."""
        due = self.engine.now + seconds
        if due < self.alarms.get(incarnation, FOREVER):
            self.alarms[incarnation] = due
            self.engine.at(due, self.tick, incarnation, due)

    def tick(self, incarnation: int, due: float) -> None:
        if self.alarms.get(incarnation) == due:
            del self.alarms[incarnation]
            self.think(incarnation, m.Tick())

    def write_ripe_manifests(self) -> None:
        """Not before the ledger has all steps up to it."""
        for version in [v for v in self.unwritten if v <= len(self.world.disk.ledger)]:
            shards = self.unwritten.pop(version)
            self.engine.after(self.engine.jitter(0.02), self.write_manifest, self.incarnation, version, shards)

    def write_manifest(self, incarnation: int, version: int, shards: Mapping[int, Mapping[str, Any]]) -> None:
        """In a thread of the controller's process: it may have died before, or die before it can tell."""
        if self.controller is not None:
            self.world.reached("save", None)
        if self.stopped:
            self.engine.after(STOPPED_SECONDS, self.write_manifest, incarnation, version, shards)
        elif self.controller is not None and self.incarnation == incarnation:
            if self.engine.now < self.world.disk.fails_until:
                self.think(incarnation, m.SaveDelayed(-1, version, self.world.disk.failure))
                self.engine.after(RETRY_SECONDS, self.write_manifest, incarnation, version, shards)
                return
            self.world.disk.publish(version, shards)
            self.think(self.incarnation, m.CheckpointWritten(version))

    # --- agents ---------------------------------------------------------------------------------------------------

    def start_agent(self, slot: int) -> None:
        self.away.discard(slot)
        agent = self.agents.get(slot)
        if agent is not None and agent.alive and not agent.deserted:
            self.introduce(agent)
        elif slot not in self.booting:
            self.booting.add(slot)
            self.engine.after(self.engine.jitter(self.world.profile.boot_seconds), self.agent_up, slot, self.jobs)

    def agent_up(self, slot: int, job: int) -> None:
        if job != self.jobs:
            return
        old = self.agents.get(slot)
        if old is not None and old.alive and old.cut_off:  # nothing can be started there either
            self.engine.after(STOPPED_SECONDS, self.agent_up, slot, job)
            return
        self.booting.discard(slot)
        if old is not None and old.alive:
            self.engine.after(self.engine.jitter(0.5), self.die, old, "superseded")
        self.lives += 1
        agent = self.agents[slot] = SimAgent(slot, f"{slot}-{self.lives}")
        self.introduce(agent)
        self.beat(agent)

    def beat(self, agent: SimAgent) -> None:
        """It tells that it lives. The controller judges by that who doesn't."""
        if agent.alive:
            if not agent.stopped:
                self.tell(agent, m.AgentBeat(agent.slot, agent.instance, self.wall(agent)))
            self.engine.after(BEAT_PERIOD_SECONDS, self.beat, agent)

    def introduce(self, agent: SimAgent) -> None:
        self.tell(agent, agent.introduction())
        preemption.say_again(self, agent)
        self.engine.at(agent.up_last, self.introduced, self.incarnation, agent)

    def introduced(self, incarnation: int, agent: SimAgent) -> None:
        """The shell watches whoever has introduced itself, and so learns that it died meanwhile."""
        if not agent.alive and self.agents[agent.slot] is agent:
            self.think(incarnation, m.AgentDown(agent.slot, agent.instance, self.world.wall()))

    def die(self, agent: SimAgent, why: str) -> None:
        """The agent's process ends, and with it its workers."""
        if agent.alive:
            self.world.trace(f"*** agent {agent.instance} dies with workers {[w.id for w in agent.living()]}: {why}")
            self.world.checks.failing(agent.living())
            agent.alive = False
            for worker in agent.living():
                worker.kill()

    def kill_agent_as_told(self, slot: int, again: bool) -> None:
        agent = self.agents.get(slot)
        if agent is None or not agent.alive or agent.cut_off:
            return
        self.think(self.incarnation, m.Killed(-1, self.world.wall(), slot))
        self.lose_agent(agent, again=again, gone_for_good=not again)

    def rejoin(self, agent: SimAgent) -> None:
        """The last partition between it and the controller is mended: what was under way arrives."""
        parked, agent.parked = agent.parked, []
        for call, arguments in parked:
            call(*arguments)
        if agent.deserted:
            self.engine.after(self.engine.jitter(0.5), self.die, agent, "superseded")

    def lose_agent(self, agent: SimAgent, again: bool, gone_for_good: bool) -> None:
        """``again``: Ray starts it again by itself. Else the shell says so, unless it is to stay away."""
        self.die(agent, "killed")
        slot = agent.slot
        if agent.deserted:
            return
        if again and slot not in self.booting:
            self.booting.add(slot)
            self.engine.after(self.engine.jitter(self.world.profile.boot_seconds), self.agent_up, slot, self.jobs)
        elif gone_for_good:
            self.away.add(slot)
        named = agent.instance if again or gone_for_good else ""
        self.engine.after(self.engine.jitter(self.world.profile.notice_seconds), self.agent_down, agent, named)

    def agent_down(self, agent: SimAgent, named: str) -> None:
        agent.deserted = True
        if self.agents[agent.slot] is agent and not (named == "" and agent.slot in self.booting):
            self.think(self.incarnation, m.AgentDown(agent.slot, named, self.world.wall()))

    def desert(self, agent: SimAgent) -> None:
        """The shell can't reach a living agent and gives it up; its workers go on, and are killed when that can be."""
        if agent.alive and not agent.deserted:
            self.world.trace(f"*** agent {agent.instance} is given up, its workers live on")
            self.world.effects.impair(agent.living())
            self.agent_down(agent, "")

    # --- workers --------------------------------------------------------------------------------------------------

    def start_worker(self, agent: SimAgent, worker: WorkerId) -> None:
        if worker not in agent.workers and worker not in agent.starting:
            agent.starting.add(worker)
            self.engine.after(self.engine.jitter(self.world.profile.boot_seconds), self.worker_up, agent, worker)

    def worker_up(self, agent: SimAgent, worker: WorkerId) -> None:
        agent.starting.discard(worker)
        if not agent.alive:
            return
        new = SimWorker(self.world, agent, worker, self.world.slowness())
        agent.workers[worker] = self.world.workers[worker] = new
        info = m.WorkerInfo(worker, 1000 + worker, (f"host-{agent.slot}", 4000 + worker), {}, "")
        agent.infos[worker] = info
        self.world.reached("join", new)
        if new.alive:
            self.tell(agent, m.WorkerUp(info))

    def freeze(self, agent: SimAgent, worker: WorkerId, seconds: float | None, whole: bool) -> None:
        known = agent.workers.get(worker)
        if whole:
            self.world.effects.freeze_node(agent, seconds)
        elif worker < 0:
            self.world.effects.freeze_agent(agent, seconds)
        elif known is not None and known.alive:
            self.world.effects.freeze_worker(known, seconds)
            self.tell(agent, m.Killed(worker, self.wall(agent)))

    def thaw(self, agent: SimAgent, worker: WorkerId) -> None:
        if worker in agent.workers:
            agent.workers[worker].resume()

    def thaw_agent(self, slot: int) -> None:
        if slot in self.agents:
            self.world.effects.thaw_node(self.agents[slot])

    def watch_frozen(self, worker: SimWorker, since: float) -> None:
        """Its agent, if that runs, sees that it is stopped and silent, and kills it before anybody hears of it."""
        if not (worker.alive and worker.stopped and worker.stopped_at == since and worker.agent.alive):
            return
        if worker.agent.stopped or worker.stubborn_until > self.engine.now:
            self.engine.after(FROZEN_SECONDS, self.watch_frozen, worker, since)
        else:
            self.worker_dies(worker, "stopped, and silent: killed", notice="frozen")

    def kill_worker(self, agent: SimAgent, worker: WorkerId, fault: bool) -> None:
        if worker in agent.starting:
            agent.starting.discard(worker)
        known = agent.workers.get(worker)
        if known is not None and known.alive:
            if known.stubborn_until > self.engine.now:
                self.engine.at(known.stubborn_until, self.kill_worker, agent, worker, fault)
                return
            if fault:
                self.tell(agent, m.Killed(worker, self.wall(agent)))
            self.worker_dies(known, "SIGKILL")

    def worker_dies(self, worker: SimWorker, why: str, unseen_seconds: float = 0.0, notice: str = "exit") -> None:
        if worker.alive:
            self.world.trace(f"*** worker {worker.id} dies in step {worker.tx.step}: {why}")
            self.world.checks.failing([worker])
            worker.kill()
            seen = max(min(worker.up_last, self.engine.now + 0.01), self.engine.now) + self.engine.jitter(
                self.world.profile.exit_seconds
            )
            if unseen_seconds:
                seen += unseen_seconds
            elif self.engine.random.random() < 0.1:
                seen = self.engine.now + 0.0001  # before its own last words
            self.engine.at(seen, self.worker_exited, worker, why, notice)

    def worker_exited(self, worker: SimWorker, why: str, notice: str) -> None:
        agent, now = worker.agent, self.wall(worker.agent)
        if agent.alive and agent.stopped:
            agent.backlog.append((self.worker_exited, (worker, why, notice)))
        elif agent.alive:
            agent.exited.append(m.Exit(worker.id, why, now, worker.driver.computed))
            self.tell(agent, m.WorkerExited(worker.id, why, now, notice))

    # --- messages -------------------------------------------------------------------------------------------------

    def wall(self, agent: SimAgent) -> float:
        return self.world.wall() + agent.ahead_seconds

    def control_seconds(self) -> float:
        random = self.engine.random.random
        seconds = self.engine.jitter(self.world.profile.control_seconds)
        return seconds * 40.0 * random() if random() < 0.01 and not self.world.network.calm else seconds

    def from_worker(self, worker: SimWorker, message: dict[str, Any]) -> None:
        """Over the unix socket, in order."""
        if message["kind"] == "Alive":  # for the agent's own watch
            return
        worker.up_last = max(worker.up_last, self.engine.now + self.engine.jitter(0.0003), worker.mute_until)
        self.engine.at(worker.up_last, self.at_agent, worker, message)

    def at_agent(self, worker: SimWorker, message: dict[str, Any]) -> None:
        if not worker.agent.alive:
            return
        if worker.agent.stopped:
            worker.agent.backlog.append((self.at_agent, (worker, message)))
            return
        if message["kind"] == "WorkerLinked":
            worker.agent.linked.add(worker.id)
        elif message["kind"] == "Reported":
            self.has_reported(worker, message)
        self.tell(worker.agent, event_from_plain(from_worker(worker.id, message)))

    def tell(self, agent: SimAgent, event: m.Event) -> None:
        """An agent's word to the controller that it knows; none is kept for later."""
        if self.controller is None and self.incarnation not in self.deposed:
            return
        if agent.cut_off:
            agent.parked.append((self.tell, (agent, event)))
            return
        arrival = max(agent.up_last, self.engine.now + self.control_seconds(), agent.held_until)
        agent.up_last = arrival
        if arrival > self.engine.now + AGENT_SILENT_SECONDS / 2:  # it may well be taken for dead
            self.world.effects.impair(agent.living())
        self.engine.at(arrival, self.think, self.incarnation, m.Told(agent.slot, event))

    def to_worker(self, incarnation: int, action: m.ToWorker) -> None:
        self.to_agent(action.slot, self.at_worker, action.worker, action.message, incarnation=incarnation)

    def at_worker(self, agent: SimAgent, worker: WorkerId, message: dict[str, Any]) -> None:
        known = agent.workers.get(worker)
        if known is not None and known.mute_until > self.engine.now:
            self.engine.at(known.mute_until, self.at_worker, agent, worker, message)
        elif known is not None:
            known.receive(known.on_message, message)

    def to_agent(self, slot: int, call: Any, *arguments: Any, incarnation: int | None = None) -> None:
        agent = self.agents.get(slot)
        if agent is None or not agent.alive or agent.deserted:
            return
        lane = self.incarnation if incarnation is None else incarnation
        if agent.cut_off:
            agent.parked.append((self.to_this_agent, (agent, lane, call, arguments)))
        else:
            self.to_this_agent(agent, lane, call, arguments)

    def to_this_agent(self, agent: SimAgent, lane: int, call: Any, arguments: tuple[Any, ...]) -> None:
        arrival = max(agent.down_last.get(lane, 0.0), self.engine.now + self.control_seconds(), agent.held_until)
        agent.down_last[lane] = arrival
        self.engine.at(arrival, self.at_slot, agent, lane, call, arguments)

    def at_slot(self, agent: SimAgent, lane: int, call: Any, arguments: tuple[Any, ...]) -> None:
        if lane in agent.late:
            agent.held.setdefault(lane, []).append((call, arguments))
        elif agent.stopped:
            agent.backlog.append((self.at_slot, (agent, lane, call, arguments)))
        elif agent.alive:
            call(agent, *arguments)
