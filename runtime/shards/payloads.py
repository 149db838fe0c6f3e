"""How large the largest payload of a job is: known before it starts, since a link refuses what is over its limit.

A snapshot carries a shard's parameters and optimizer state. A contribution carries a shard's gradient once per subtree,
and a worker's logical ranks may be every other one, of which no two make a larger subtree.
"""

from __future__ import annotations

from dataloader.errors import ConfigError
from runtime.shards.layout import UNIT, FlatLayout

_FLOAT_BYTES = 4


def unit_bytes(logical_ranks: int, state_bytes: float) -> float:
    """Of the largest payload, per unit of a shard. `state_bytes`: what the optimizer keeps for a parameter."""
    snapshot = _FLOAT_BYTES + state_bytes
    contribution = _FLOAT_BYTES * ((logical_ranks + 1) // 2)
    return UNIT * max(snapshot, contribution)


def fewest_shards(units: int, unit_bytes: float, limit_bytes: int) -> int:
    """Into how many shards so many units must be cut at least; a shard has all of them / shards, rounded up."""
    most = max(1, int(limit_bytes // unit_bytes))  # one unit fits, or there are 2**29 logical ranks
    return -(-units // most)


def check_payloads(layout: FlatLayout, logical_ranks: int, state_bytes: float, limit_bytes: int) -> None:
    """ConfigError if a payload could be over the limit: it would be found out at the first failure only."""
    units, bytes_each = layout.total // UNIT, unit_bytes(logical_ranks, state_bytes)
    fewest = fewest_shards(units, bytes_each, limit_bytes)
    if layout.shards < fewest:
        largest = round(-(-units // layout.shards) * bytes_each)
        raise ConfigError(
            f"train.shards: {layout.shards} for {layout.total:,} parameters makes messages of {largest:,} bytes, and a"
            f" link takes {limit_bytes:,}; set it to {fewest} or more"
        )
