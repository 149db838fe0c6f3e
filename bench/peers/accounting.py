"""From what workers wrote down to figures: values in, values out. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

LONG_GAP = 2.0  # times the usual time between steps: what is longer is a pause, whenever it comes
LAST_STEPS = 10  # whose mean is the final loss: one step's is mostly about its samples


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is part of the trained model. `digest`: of the parameters after it."""

    number: int
    time: float  # when it was first known to be committed
    samples: tuple[int, ...]
    loss: float
    digest: str


# --- which steps count ----------------------------------------------------------------------------------------------


def kept_steps(lines: Iterable[Mapping[str, Any]]) -> list[Step]:
    """From lines in order of time (step_lines.py): what is left after every return to a checkpoint.

    A step is committed if any of its group says so: one that was killed right after the reduction doesn't, and its
    samples are in the others' model all the same.
    """
    kept: dict[int, tuple[Any, Step]] = {}
    attempts: dict[tuple[int, Any], dict[int, Mapping[str, Any]]] = {}
    for line in lines:
        kind = line["kind"]
        if kind == "start" and line["resume"] is not None:
            kept = {number: step for number, step in kept.items() if number < line["resume"]}
        elif kind == "attempt":
            attempts.setdefault((line["step"], line["group"]), {})[line["rank"]] = line
        elif kind == "commit":
            number, group = line["step"], line["group"]
            if number in kept and kept[number][0] == group:
                continue
            # Another group's step of this number: whoever had those that follow is gone.
            kept = {n: step for n, step in kept.items() if n < number}
            kept[number] = group, _step(line, attempts[number, group])
    return [step for _, (_, step) in sorted(kept.items())]


def _step(commit: Mapping[str, Any], attempts: Mapping[int, Mapping[str, Any]]) -> Step:
    counted = [attempt for _, attempt in sorted(attempts.items()) if attempt["counts"]]
    samples = tuple(sample for attempt in counted for sample in attempt["samples"])
    loss = fmean(attempt["loss"] for attempt in counted) if counted else float("nan")
    return Step(commit["step"], commit["time"], samples, loss, commit["digest"])


# --- samples ----------------------------------------------------------------------------------------------------------


def lost_and_repeated(steps: Iterable[Step], streams: int = 1) -> tuple[int, int]:
    """Lost: never used, though a later one of the same stream was. Repeated: uses beyond the first."""
    uses = Counter(sample for step in steps for sample in step.samples)
    furthest: dict[int, int] = {}
    for sample in uses:
        stream, place = sample % streams, sample // streams
        furthest[stream] = max(furthest.get(stream, -1), place)
    drawn = sum(place + 1 for place in furthest.values())
    return drawn - len(uses), sum(uses.values()) - len(uses)


def rate(steps: Iterable[Step], begin: float, end: float) -> float:
    """Samples per second that became part of the model."""
    return sum(len(step.samples) for step in steps if begin <= step.time < end) / (end - begin)


def uneven_steps(steps: Iterable[Step], global_batch: int) -> int:
    return sum(len(step.samples) != global_batch for step in steps)


# --- time -------------------------------------------------------------------------------------------------------------


def pauses(commits: Sequence[float], kills: Sequence[float], end: float, usual: float) -> list[float]:
    """Seconds lost after each kill, until the next one: by how much gaps between steps were longer than usual.

    The gap that a kill falls into counts, and each that is LONG_GAP times the usual one: fewer workers make every step
    longer, but not by that much, and slow steps are no pause. `commits` in order, of all steps, also of those that were
    undone later: work that is done again is no pause either. At `end` a step that is still awaited is a gap as well.
    """
    out = [0.0] * len(kills)
    for before, after in pairwise([*(time for time in commits if time < end), end]):
        earlier = [number for number, kill in enumerate(kills) if kill < after]
        if earlier and (kills[earlier[-1]] >= before or after - before > LONG_GAP * usual):
            out[earlier[-1]] += max(0.0, after - before - usual)
    return out


# --- against the undisturbed run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deviation:
    steps: int  # that both runs have
    loss: float  # by how much the final loss differs, at the last of these steps
    first_step: int | None  # after which the parameters are other ones; None: never


def deviation(steps: Sequence[Step], undisturbed: Sequence[Step]) -> Deviation:
    ours, theirs = ({step.number: step for step in run} for run in (steps, undisturbed))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Deviation(0, float("nan"), None)
    different = (number for number in common if ours[number].digest != theirs[number].digest)
    last = common[-LAST_STEPS:]
    losses = (fmean(run[number].loss for number in last) for run in (ours, theirs))
    return Deviation(len(common), abs(next(losses) - next(losses)), next(different, None))
