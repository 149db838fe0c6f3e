"""Where the job stands: what `everstep status --json` and the live view show. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic.roster import Worker, WorkerState

if TYPE_CHECKING:
    from elastic.controller import Controller


def standing(controller: Controller) -> dict[str, Any]:
    ballots, chronicle, costs = controller.ballots, controller.chronicle, controller.costs
    step, generation = controller.place()
    return {
        "state": state(controller),
        "step": step,
        "steps": controller.facts.steps,
        "generation": generation,
        "leaving": [node.id for node in controller.roster.leaving_nodes()],
        "members": [member(controller, w) for w in controller.roster if w.alive],
        "incarnation": ballots.incarnation,
        "last": dict(controller.last_step),
        "micro_batches_computed": controller.computed,
        "micro_batches_recomputed": costs.recomputed,
        "faults": costs.faults,
        "pause_seconds": round(costs.pause_seconds, 6),
        "shards_without_backup": ballots.without_backup(),
        "checkpoint": chronicle.checkpoint,
    }


def state(controller: Controller) -> str:
    """starting | training | replaying | changing | recovering | waiting | done | stopped | failed"""
    if controller.ended is not None:
        return controller.ended[0]
    if controller.waiting_for_workers:
        return "waiting"
    if controller.costs.now is not None:
        return "recovering"
    if controller.ballots.asking is not None:
        return "changing"
    if controller.ballots.plan is None:
        return "starting"
    return "training" if controller.position >= controller.chronicle.ledger_next else "replaying"


def member(controller: Controller, worker: Worker) -> dict[str, Any]:
    plan = controller.ballots.plan
    role = "member" if worker.id in controller.ballots.members else "standby"
    if worker.id in controller.cut_off():
        role = "cut off"
    return {
        "id": worker.id,
        "node": worker.node,
        "role": role if worker.state is WorkerState.READY else "starting",
        "pid": worker.info.pid if worker.info is not None else None,
        "logical_ranks": [r for r, w in enumerate(plan.ranks_next) if w == worker.id] if plan is not None else [],
        "optimizer_bytes": worker.optimizer_bytes,
    }
