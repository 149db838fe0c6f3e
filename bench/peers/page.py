"""docs/recovery.md, from figures: values in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.peers.shape import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCH_SECONDS,
    MICRO_BATCHES_PER_WORKER,
    WARM_STEPS,
    WORKERS,
)

HEAD = (
    "system",
    "set-up",
    "a kill every",
    "kills",
    "goodput",
    "pause a kill: median",
    "longest",
    "samples lost",
    "repeated",
    "in vain",
    "batch held",
    "final loss off by",
    "parameters",
)
SHORT_MINUTES = 2.0


def page(measured: Mapping[str, Any]) -> str:
    parts = [
        "# Recovery, beside other tools",
        _introduction(measured),
        "![goodput by interval, and progress under one kill per 15 s](recovery.svg)",
        table(measured["rows"]),
        _failures(measured["failures"]),
        WORDS,
        "## Set-ups",
        _set_ups(measured["set_ups"]),
        "## How it is measured",
        METHOD,
        "## Again",
        _again(measured),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(measured: Mapping[str, Any]) -> str:
    facts = measured["machine"]
    load = measured.get("load", 0.0)
    warnings = []
    if measured["minutes"] < SHORT_MINUTES:
        warnings.append("These are figures of a trial run: they show that everything works, and no more.")
    if note := measured.get("note"):
        warnings.append(note)
    elif load > facts["cores"]:
        warnings.append("Others used the machine meanwhile, now more and now less: the rows can't be compared.")
    warning = f"\n\n**{' '.join(warnings)}**" if warnings else ""
    return (
        f"One of {measured['workers']} workers is killed (SIGKILL) every so often, in Everstep and in other tools, on"
        " the same small model, data and batch. Each is compared with its own undisturbed run.\n\n"
        f"Measured on {measured['date']}, {measured['minutes']:g} min a run: {facts['cores']} cores,"
        f" {facts['memory_gib']} GiB, {facts['cpu']}, Linux {facts['kernel'].split('-')[0]}, Python {facts['python']},"
        f" torch {facts['torch']}; load average {load:g} before it began.{warning}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [_row(HEAD), _row("---" for _ in HEAD)]
    lines += [_row(cells(row)) for row in rows]
    return "\n".join(lines)


def _row(values: Any) -> str:
    return f"| {' | '.join(values)} |"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    undisturbed = row["interval"] is None
    off = row["deviation"]
    same = "the same" if off["first_step"] is None else f"others from step {off['first_step']}"
    kills = str(row["kills"]) + (f" ({row['missed_kills']} found no worker up)" if row["missed_kills"] else "")
    held = "yes" if row["uneven_steps"] == 0 else f"no: {row['uneven_steps']} of {row['steps']} steps"
    return (
        row["system"],
        row["variant"],
        "undisturbed" if undisturbed else f"{row['interval']:g} s",
        kills,
        f"{row['samples_per_second']:.1f} samples/s" if undisturbed else f"{row['goodput']:.3f}",
        f"{median(row['pauses']):.2f} s" if row["pauses"] else "",
        f"{max(row['pauses']):.2f} s" if row["pauses"] else "",
        str(row["lost"]),
        str(row["repeated"]),
        str(row["in_vain"]),
        held,
        "" if undisturbed else _loss(off["loss"]),
        "" if undisturbed else f"{same}",
    )


def _loss(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}"


def _failures(failures: Sequence[Mapping[str, str]]) -> str:
    if not failures:
        return ""
    return "Runs that failed:\n\n" + "\n".join(f"- {one['name']}, {one['what']}" for one in failures)


def _set_ups(set_ups: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for one in set_ups:
        packages = f" ({', '.join(one['packages'])})" if one["packages"] else ""
        lines.append(f"- **{one['name']}**{packages}: {one['settings']}.")
    return "\n".join(lines)


def _again(measured: Mapping[str, Any]) -> str:
    intervals = ",".join(dict.fromkeys(f"{row['interval']:g}" for row in measured["rows"] if row["interval"]))
    return (
        f"```\n.venv/bin/python -m bench.recovery --minutes {measured['minutes']:g}"
        f" --intervals {intervals or '15'}\n```\n\n"
        "makes the venvs that are missing (in `~/.cache/everstep/bench`), measures, and writes this page and its\n"
        "plot. The figures are in `runs/recovery.json`; `--render` writes the page from them again. Use a machine\n"
        "that does nothing else."
    )


WORDS = """\
- **goodput**: samples per second that became part of the model, against the same set-up undisturbed.
- **pause**: seconds in which no step was committed, beyond the usual time between two steps, from a kill to the next
  one: in the step that the kill fell into, and wherever a step took more than twice the usual time. Steps that are
  slower with fewer workers, and work that is done again after a return to a checkpoint, are no pause; goodput has them.
- **lost**: samples that no step of the model used though later ones of the same order were. **repeated**: uses beyond
  a sample's first. **in vain**: samples that were computed and are not in the model, since a step failed or was undone,
  or its worker came late.
- **batch held**: whether every step was of the whole global batch.
- **final loss off by**: mean training loss of the last 10 steps that both runs have, against the undisturbed run's.
  **parameters**: whether their digests are the undisturbed run's after every step that both have (Everstep's include
  the optimizer's state)."""

METHOD = f"""\
- A model of 58 thousand parameters on synthetic data, AdamW, one thread a worker. A step is {WORKERS} workers x
  {MICRO_BATCHES_PER_WORKER} micro-batches x {MICRO_BATCH} samples = {GLOBAL_BATCH} samples.
- Each micro-batch is padded to {MICRO_BATCH_SECONDS * 1000:.0f} ms: it computes for some milliseconds and sleeps the
  rest, in all systems alike. Without that, two cores give the same speed to one worker as to four, and losing one
  would cost nothing. What is not padded is the start of processes: four that import torch at once take longer on two
  cores than on many, so restarts are slower here than on a large machine.
- The clock starts after {WARM_STEPS} steps with all workers. Kills come in the middle of each interval, the same slots
  in each system. The process that has the slot is killed, whatever it does; if there is none, the next slot's.
- Everstep runs {WORKERS} workers and one standby, as it recommends; the other tools have no standby process.
- Each replica group of torchft is under a torchrun of its own, which starts it again. The place of each replica's
  loader is kept at every step, as torchft's documentation recommends.
- Samples are counted from what workers write down before and after each step. Everstep's are its ledger's, after
  `everstep audit` has compared it with the data."""
