"""Nodes that are told to go: how the simulated agents, the checks and the seeds deal with them.

A notice comes to an agent by itself (a signal, a drain) or by way of the controller (an injected fault). The agent says
it to whoever controls, goes when it is released, and is gone at its deadline in any case.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from elastic import messages as m

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster, SimAgent
    from tests.sim.faults import Chance
    from tests.sim.worker import SimWorker
    from tests.sim.world import World

KIND = "preempt-node"
SHARE = 0.25  # of the seeds that have one, or several
SECONDS = (0.0, 0.2, 1.0, 5.0, 60.0, 600.0)


def planned(seed: int, steps: int) -> list[Chance]:
    """By a chance of its own, so that the other seeds stay what they are. One may follow hard upon another."""
    from tests.sim.faults import CHANGE_POINTS, STEP_POINTS, Chance

    random = Random(f"{seed}/preempt")
    if random.random() >= SHARE:
        return []
    faults = []
    for index in range(random.choice((1, 1, 2, 3))):
        latest = random.randrange(1, steps - 2)
        points = CHANGE_POINTS if index and random.random() < 0.5 else STEP_POINTS[:8]
        count, chained = random.randint(1, 6), index > 0 and random.random() < 0.6
        earliest = max(-1, latest - 3)
        faults.append(Chance(KIND, random.choice(points), count, earliest, latest, chained, random.random() < 0.5))
    return faults


def happen(world: World, target: SimWorker) -> None:
    """Told directly, or by `everstep inject`."""
    random = world.engine.random
    seconds = random.choice(SECONDS)
    controller = world.cluster.controller
    node = controller.roster.node_in(target.agent.slot) if controller is not None else None
    if node is not None and random.random() < 0.3 and world.request(f"{KIND}={node.id},seconds={seconds}"):
        return
    notice(world.cluster, target.agent, seconds, "SIGTERM")


def notice(cluster: Cluster, agent: SimAgent, seconds: float, how: str = "injected") -> None:
    by = cluster.engine.now + seconds
    if agent.alive and by < agent.leave_by:
        agent.leave_by = by
        cluster.world.trace(f"*** the node of agent {agent.instance} goes away in {seconds} s ({how})")
        say_again(cluster, agent)
        cluster.engine.at(by, deadline, cluster, agent)


def say_again(cluster: Cluster, agent: SimAgent) -> None:
    seconds = agent.leave_by - cluster.engine.now
    if seconds != float("inf"):
        cluster.tell(agent, m.Preempted(agent.slot, agent.instance, max(0.0, seconds), "SIGTERM"))


def deadline(cluster: Cluster, agent: SimAgent) -> None:
    if agent.alive and cluster.engine.now >= agent.leave_by:
        cluster.lose_agent(agent, again=False, gone_for_good=True)


def release(cluster: Cluster, slot: int) -> None:
    """As told by the controller; a dead one's words may be lost."""
    cluster.to_agent(slot, lambda agent: cluster.engine.after(cluster.engine.jitter(0.05), leave, cluster, agent))


def leave(cluster: Cluster, agent: SimAgent) -> None:
    if not agent.alive:
        return
    checks = cluster.world.checks
    needed = [w.id for w in agent.living() if checks.standing(w) and not checks.parked]
    if needed and not any(w.impaired for w in agent.living()):
        checks.violation(f"agent {agent.instance} is let go, and workers {needed} are members")
    cluster.lose_agent(agent, again=False, gone_for_good=True)


def goes(worker: SimWorker) -> bool:
    """Its node was told to go, and nothing else is wrong with it: so nobody may do again what it did."""
    return worker.agent.leave_by != float("inf") and not worker.impaired
