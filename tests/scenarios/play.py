"""Plays a scenario's file in the simulator, and gives the file as it should be."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.script import RULE, Script, read
from tests.scenarios.transcript import Transcript, ending
from tests.sim.world import World

HERE = Path(__file__).parent
SEED = 7  # of the values only


def scenarios() -> list[Path]:
    return sorted(HERE.glob("*.txt"))


def transcript(script: Script) -> list[str]:
    watch = Transcript(whole=not script.schedule)
    world = watch.world = World(SEED, setting=script.setting(), watch=watch)
    outcome = world.run()
    last = [f"VIOLATION: {outcome.violation}"] if outcome.violation is not None else list(ending(world))
    return [*watch.text(), "", *last]


def played(text: str) -> str:
    """The same scenario, with what follows from it now."""
    head = text.split(RULE)[0].rstrip()
    return "\n".join([head, "", RULE, "", *transcript(read(text)), ""])
