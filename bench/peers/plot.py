"""docs/recovery.svg: goodput by interval, and samples over time under the shortest interval.

python bench/peers/plot.py FIGURES.json OUT.svg       in the venv that has matplotlib; imports nothing of ours
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib  # type: ignore[import-not-found]

matplotlib.use("svg")
import matplotlib.pyplot as plt  # type: ignore[import-not-found]

COLOURS = {"Everstep": "#1b6ca8", "torchft": "#d1495b", "torchrun": "#66a182", "Ray Train": "#edae49"}


def main() -> None:
    measured = json.loads(Path(sys.argv[1]).read_text())
    rows = [row for row in measured["rows"] if row["interval"] is not None]
    plt.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "everstep", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    if rows:
        bars(left, rows)
        progress(right, measured["rows"], min(row["interval"] for row in rows))
    figure.savefig(sys.argv[2], metadata={"Date": None})


def bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    intervals = sorted({row["interval"] for row in rows})
    names = list(dict.fromkeys((row["system"], row["variant"]) for row in rows))
    width = 0.8 / len(names)
    for place, (system, variant) in enumerate(names):
        mine = {row["interval"]: row["goodput"] for row in rows if (row["system"], row["variant"]) == (system, variant)}
        at = [number + (place - (len(names) - 1) / 2) * width for number, _ in enumerate(intervals)]
        axes.bar(
            at,
            [mine.get(interval, 0.0) for interval in intervals],
            width * 0.92,
            label=f"{system}, {variant}" if system != "Everstep" else system,
            color=COLOURS.get(system, "grey"),
            alpha=0.55 if variant == "tuned" else 1.0,
        )
    axes.set_xticks(range(len(intervals)), [f"one kill per {interval:g} s" for interval in intervals])
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_ylabel("goodput, of its own undisturbed rate")
    axes.set_ylim(0.0, 1.08)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4, frameon=False)


def progress(axes: Any, rows: list[dict[str, Any]], interval: float) -> None:
    for row in rows:
        if row["interval"] == interval and row["progress"]:
            seconds, samples = zip(*row["progress"], strict=True)
            axes.plot(
                seconds,
                samples,
                label=f"{row['system']}, {row['variant']}",
                color=COLOURS.get(row["system"], "grey"),
                linestyle="--" if row["variant"] == "tuned" else "-",
                linewidth=1.3,
            )
    axes.set_xlabel(f"seconds, one kill per {interval:g} s")
    axes.set_ylabel("samples in the model")


if __name__ == "__main__":
    main()
