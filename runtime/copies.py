"""What a worker knows of its copy of one shard: how far it has come, and what it holds for later."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.protocol import Certificate


@dataclass(slots=True)
class Pending:
    """A reduced gradient that is held and not applied; its step's certificate once that is known."""

    digest: bytes
    certificate: Certificate | None = None


@dataclass(slots=True)
class Holding:
    """One shard's copy at this worker. Filling: `version` is the one its snapshot will have."""

    complete: bool
    version: int
    pending: dict[int, Pending] = field(default_factory=dict)
    digest: bytes = b""  # of its state, as of when it came to `version` by applying a step

    def reaches(self, version: int) -> bool:
        """Whether this copy, with what is pending, gives exactly `version` (rule 12)."""
        return (
            self.complete and self.version <= version and all(k in self.pending for k in range(self.version, version))
        )
