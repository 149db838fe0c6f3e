"""How the figures and the verdict look: a table on a terminal, the same without colours elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.chaos.figures import Row
from elastic.chaos.promises import Promise

PLAIN_WIDTH = 120  # rather than the 80 that rich takes for a pipe


def show(*parts: RenderableType) -> None:
    """One below the other, with a line between them."""
    console = Console()
    if console.is_terminal:
        for part in parts:
            console.print()
            console.print(part, soft_wrap=isinstance(part, Text))
        return
    plain = Console(width=PLAIN_WIDTH)
    for part in parts:
        with plain.capture() as captured:
            plain.print(part, soft_wrap=isinstance(part, Text))
        print("\n".join(["", *(line.rstrip() for line in captured.get().splitlines())]), flush=True)


def shown(path: Path) -> str:
    """As short as it can be typed from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def faults_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    table.add_column("fault")
    for name in ("count", "detected", "detect p50/p99", "pause p50/p99", "recomputed", "moved"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kind,
            str(row.count),
            f"{row.detected} of {row.hit}" if row.hit else "-",
            milliseconds(row.detect_ms),
            milliseconds(row.pause_ms),
            str(row.recomputed),
            size(row.bytes_moved),
        )
    return table


def promises_table(promises: Sequence[Promise]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, show_header=False)
    table.add_column("promise")
    table.add_column("verdict")
    table.add_column("what was found", overflow="fold")
    for promise in promises:
        verdict = Text("kept", style="green") if promise.kept else Text("BROKEN", style="bold red")
        table.add_row(promise.name, verdict, Text(promise.finding or promise.proof))
    return table


def facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, show_header=False)
    table.add_column("what")
    table.add_column("how much", overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def verdict_text(text: str, good: bool) -> Text:
    return Text(text, style="bold green" if good else "bold red")


def milliseconds(spread: tuple[float, float] | None) -> str:
    """Median and 99th percentile: 12 / 340 ms, 1.2 / 4.0 s"""
    if spread is None:
        return "-"
    if max(spread) >= 10_000.0:
        return f"{spread[0] / 1e3:.1f} / {spread[1] / 1e3:.1f} s"
    return f"{spread[0]:.0f} / {spread[1]:.0f} ms"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
