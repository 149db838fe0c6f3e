"""Where agents run: one placement group for the nodes that a job starts with, one of a single bundle per later node.

Bundles are spread over hosts, strictly where there are several; on one host strict would never place. Groups are named
and detached, so a controller that comes back finds them and whoever cleans up removes them by name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataloader.errors import HostError
from elastic.cluster.engine import cpus_per_node
from elastic.config import JobConfig

PLACING_PATIENCE_SECONDS = 300.0  # an autoscaler may have to bring hosts up
LOOK_SECONDS = 1  # Ray takes whole ones


def place_first(namespace: str, job: JobConfig, given_up: Callable[[], bool]) -> bool:
    """Reserve the nodes that the job starts with; False if that was given up. Raises HostError if they can't be had."""
    nodes_of_ray: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    several = sum(bool(node["Alive"]) for node in nodes_of_ray) > 1
    cpus, nodes = cpus_per_node(job), job.cluster.nodes
    group = placement_group(
        [{"CPU": cpus}] * nodes,
        strategy="STRICT_SPREAD" if several else "SPREAD",
        name=_name(namespace, "first"),
        lifetime="detached",
    )
    deadline = time.monotonic() + PLACING_PATIENCE_SECONDS
    while not group.wait(timeout_seconds=LOOK_SECONDS):
        if given_up():
            remove_placement_group(group)
            return False
        if time.monotonic() > deadline:
            remove_placement_group(group)
            raise HostError(
                f"cluster.nodes: the Ray cluster has no room for {nodes} nodes of {cpus} CPUs each; "
                "ask for fewer, or add hosts"
            )
    return True


def strategy(namespace: str, job: JobConfig, slot: int) -> PlacementGroupSchedulingStrategy:
    """Where the agent of this slot goes."""
    if slot < job.cluster.nodes:
        group = ray.util.get_placement_group(_name(namespace, "first"))
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot)
    return PlacementGroupSchedulingStrategy(_later(namespace, job, slot), placement_group_bundle_index=0)


def remove_later(namespace: str, job: JobConfig, slot: int) -> None:
    """The group of a later node that is given up. (The bundles of the first nodes are one group: they go together.)"""
    if slot >= job.cluster.nodes:
        with contextlib.suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(_name(namespace, str(slot))))


def remove_all(namespace: str) -> None:
    """Every group of this job."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    for key, entry in table.items():
        if entry["name"].startswith(_name(namespace, "")) and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(key))))


def _later(namespace: str, job: JobConfig, slot: int) -> PlacementGroup:
    name = _name(namespace, str(slot))
    with contextlib.suppress(ValueError):
        there: PlacementGroup = ray.util.get_placement_group(name)
        return there
    new: PlacementGroup = placement_group([{"CPU": cpus_per_node(job)}], name=name, lifetime="detached")
    return new


def _name(namespace: str, which: str) -> str:
    return f"{namespace}-nodes-{which}"
