"""What a job's actors are called in its namespace, and where they log."""

from __future__ import annotations

import logging
from pathlib import Path

CONTROLLER = "controller"
_AGENT = "agent-"


def namespace(run_id: str) -> str:
    return f"everstep-{run_id}"


def agent_name(slot: int) -> str:
    return f"{_AGENT}{slot}"


def agent_slot(name: str) -> int | None:
    """The slot of an agent's name; None if it is no agent's."""
    number = name.removeprefix(_AGENT)
    return int(number) if name.startswith(_AGENT) and number.isdigit() else None


def log_to(path: Path) -> None:
    """What an actor has to say goes to the run directory; the file appears with the first line."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logger = logging.getLogger("everstep")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
