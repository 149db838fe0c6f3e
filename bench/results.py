"""The one form of a result: what was measured, how much, beside what, and on which machine.

    {"time", "name", "figure", "unit", "ratio", "target", "met", "detail": {...}, "machine": {...}}

`ratio` compares the figure with its peer's in the same run (None: it has none); `target` says what is asked for, in
words, and `met` whether that holds (None: reported only).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "bench.jsonl"


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    figure: float
    unit: str
    ratio: float | None = None
    target: str = ""
    met: bool | None = None
    detail: dict[str, Any] = field(default_factory=dict)


def report(results: Iterable[Result], path: Path = RESULTS) -> bool:
    """Append to the file, print the table; whether every target was met."""
    results = list(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for result in results:
            file.write(json.dumps({"time": time.time(), **asdict(result), "machine": machine()}) + "\n")
    print(table(results), flush=True)
    return all(result.met is not False for result in results)


def table(results: Iterable[Result]) -> str:
    rows = [("name", "figure", "unit", "ratio", "target", "")]
    for r in results:
        ratio = "" if r.ratio is None else f"{r.ratio:.3f}"
        verdict = "" if r.met is None else "met" if r.met else "MISSED"
        rows.append((r.name, f"{r.figure:.4g}", r.unit, ratio, r.target, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    return "\n".join([*lines, f"on: {facts}; load {os.getloadavg()[0]:.1f} at the end"])


@cache
def machine() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
