"""The values behind the step protocol: tensors in production, small values in the simulator.

The transaction (runtime/step.py) decides; an ``Arithmetic`` holds what it decides about. Every call is
synchronous and does just what it says; none decides, sends, or looks at a clock.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from runtime.guard import Verdict
from runtime.protocol import Node

Payload: TypeAlias = Any  # sent: a buffer or a list of buffers; received: one contiguous buffer
Parts: TypeAlias = list[tuple[tuple[Node, ...], Payload]]


class Arithmetic(Protocol):
    """See docs/architecture.md, "The arithmetic", for the order in which everything is added."""

    # gradients of the step in progress, kept by subtree; a computed rank arrives as node (rank, rank + 1)
    def merge(self, left: Node, right: Node) -> None:
        """Replace two sibling subtrees by their parent: left + right."""

    def forget(self, node: Node) -> None: ...

    def contribution(self, nodes: tuple[Node, ...], shard: int) -> Payload:
        """These subtrees' gradients of one shard, in order."""

    # reduced gradients: pending at owner and backups by (shard, step)
    def reduce(self, shard: int, step: int, parts: Parts) -> tuple[float, bytes]:
        """Add the parts, which tile all logical ranks, in tree order; (squared norm, digest) of the result."""

    def gradient(self, shard: int, step: int) -> Payload: ...

    def store_gradient(self, shard: int, step: int, payload: Payload) -> bytes:
        """Keep it as pending, the payload itself; its digest."""

    def forget_gradient(self, shard: int, step: int) -> None: ...

    # holdings: master parameters and optimizer state of a shard
    def apply(self, shard: int, step: int, verdict: Verdict) -> bytes:
        """Version step -> step + 1, consuming the pending gradient; digest of the new state."""

    def digest(self, shard: int) -> bytes: ...

    def parameters(self, shard: int) -> Payload: ...

    def snapshot(self, shard: int) -> tuple[Any, Payload]:
        """(plain meta, payload): a copy of the holding."""

    def restore(self, shard: int, meta: Any, payload: Payload) -> None: ...

    def drop(self, shard: int) -> None:
        """Forget the holding and its pending gradients."""

    # whole parameters of the next version
    def stage(self, shard: int, payload: Payload | None) -> None:
        """None: a copy of one's own holding's parameters. A payload is kept itself."""

    def staged_digest(self, shard: int) -> bytes:
        """Of the staged parameters alone."""

    def load(self, version: int, holdings: tuple[int, ...]) -> None:
        """From the checkpoint of that version: stage every shard's parameters, create these holdings."""
