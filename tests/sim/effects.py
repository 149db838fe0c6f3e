"""What each fault of the vocabulary does to a simulated world: to whom it hits, and nothing about when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from elastic.detector import FROZEN_SECONDS

if TYPE_CHECKING:
    from runtime.protocol import WorkerId
    from tests.sim.cluster import SimAgent
    from tests.sim.worker import SimWorker
    from tests.sim.world import World

ASK_AGAIN_SECONDS = 0.1  # a request while no controller lives


class Effects:
    def __init__(self, world: World) -> None:
        self.world, self.engine = world, world.engine

    def later(self, seconds: float | None, call: Any, *arguments: Any) -> None:
        """None: never."""
        if seconds is not None:
            self.engine.after(seconds, call, *arguments)

    # --- ends -------------------------------------------------------------------------------------------------

    def kill_worker(self, worker: SimWorker) -> None:
        self.world.cluster.worker_dies(worker, "kill-worker")

    def kill_agent(self, agent: SimAgent) -> None:
        """Ray brings it back, as a new node."""
        self.world.cluster.lose_agent(agent, again=True, gone_for_good=False)

    def kill_node(self, agent: SimAgent) -> None:
        """It stays away until a node is added."""
        self.world.cluster.lose_agent(agent, again=False, gone_for_good=True)

    def kill_controller(self) -> None:
        self.world.cluster.kill_controller()

    def kill_driver(self) -> None:
        self.world.cluster.end_job()

    # --- signals ----------------------------------------------------------------------------------------------

    def freeze_worker(self, worker: SimWorker, seconds: float | None) -> None:
        """Its agent will see that, unless it goes on before."""
        worker.stopped = worker.impaired = True
        worker.stopped_at = self.engine.now
        self.later(seconds, worker.resume)
        self.engine.after(self.engine.jitter(FROZEN_SECONDS), self.world.cluster.watch_frozen, worker, self.engine.now)

    def freeze_agent(self, agent: SimAgent, seconds: float | None) -> None:
        agent.stopped = True
        self.impair(agent.living())  # nobody hears of them
        self.later(seconds, agent.resume)

    def freeze_node(self, agent: SimAgent, seconds: float | None) -> None:
        self.freeze_agent(agent, seconds)
        for worker in agent.living():
            self.freeze_worker(worker, seconds)

    def freeze_controller(self, seconds: float | None) -> None:
        cluster = self.world.cluster
        if cluster.controller is not None:
            cluster.stopped = True
            self.later(seconds, cluster.resume_controller)

    def thaw_node(self, agent: SimAgent) -> None:
        agent.resume()
        for worker in agent.living():
            worker.resume()

    # --- speed ------------------------------------------------------------------------------------------------

    def slow_worker(self, worker: SimWorker, factor: float, seconds: float | None) -> None:
        worker.slowness *= factor
        self.later(seconds, self.speed_up, worker, factor)

    def speed_up(self, worker: SimWorker, factor: float) -> None:
        worker.slowness = max(1.0, worker.slowness / factor)

    def delay_worker(self, worker: SimWorker, peer: WorkerId | None, seconds: float) -> None:
        late = self.world.network.late
        for other in self.others(worker):
            if peer in (None, other.id):
                late[worker.id, other.id] = seconds

    # --- partitions -------------------------------------------------------------------------------------------

    def partition_worker(
        self, worker: SimWorker, peer: WorkerId | None, way: str | None, seconds: float | None
    ) -> None:
        others = [w for w in self.others(worker) if peer in (None, w.id)]
        self.impair([worker, *others] if peer is not None else [worker])
        self.part([worker], others, way, seconds)

    def partition_node(self, agent: SimAgent, way: str | None, seconds: float | None) -> None:
        """A half of the net; also the controller can't be reached from there, and gives it up if it hears no beat."""
        self.impair(agent.living())
        self.part(agent.living(), [w for w in self.world.workers.values() if w.agent is not agent], way, seconds)
        agent.cut_off += 1
        self.later(seconds, self.reach, agent)

    def part(
        self, inside: list[SimWorker], outside: Iterable[SimWorker], way: str | None, seconds: float | None
    ) -> None:
        network = self.world.network
        pairs = []
        for here in inside:
            for there in outside:
                if way != "in":
                    pairs.append((here.id, there.id))
                if way != "out":
                    pairs.append((there.id, here.id))
        network.part(pairs)
        self.later(seconds, network.mend, pairs)

    def reach(self, agent: SimAgent) -> None:
        if agent.cut_off:
            agent.cut_off -= 1
            if not agent.cut_off:
                self.world.cluster.rejoin(agent)

    # --- bits and bytes ---------------------------------------------------------------------------------------

    def damage_frame(self, worker: SimWorker) -> None:
        """The next that it sends: its receiver finds that, and breaks the link."""
        worker.mesh.damages = True

    def fail_store(self, seconds: float, how: str) -> None:
        disk = self.world.disk
        disk.fails_until, disk.failure = max(disk.fails_until, self.engine.now + seconds), how

    # --- the rest ---------------------------------------------------------------------------------------------

    def clock_jump(self, agent: SimAgent, seconds: float) -> None:
        agent.ahead_seconds += seconds

    def request(self, fault: str) -> None:
        """What the controller itself does; while there is none, the user tries again."""
        if not self.world.request(fault):
            self.engine.after(ASK_AGAIN_SECONDS, self.request, fault)

    def heal(self) -> None:
        """Whatever lasts is over."""
        world = self.world
        network = world.network
        network.calm = True
        world.disk.fails_until = 0.0
        network.slow.clear()
        network.late.clear()
        network.blocked.clear()
        network.mend_all()
        for worker in list(world.workers.values()):
            worker.slowness = min(worker.slowness, 3.0)
            worker.resume()
        for agent in world.cluster.every_agent():
            agent.held_until = 0.0
            agent.resume()
            while agent.cut_off:
                self.reach(agent)
            if agent.deserted:
                self.engine.after(self.engine.jitter(0.5), world.cluster.die, agent, "given up")
        world.cluster.resume_controller()

    def impair(self, workers: Iterable[SimWorker]) -> None:
        """Whoever gives these up makes no mistake."""
        for worker in workers:
            worker.impaired = True

    def others(self, worker: SimWorker) -> list[SimWorker]:
        return [w for w in self.world.workers.values() if w.alive and w is not worker]
