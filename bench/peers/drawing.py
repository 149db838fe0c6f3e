"""Runs the plot in a venv of its own, so that Everstep's needs no matplotlib."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.peers.systems import ROOT
from bench.peers.venvs import venv

PACKAGES = ("matplotlib==3.11.2",)


def draw(figures: Path, out: Path) -> None:
    python = venv("plot", PACKAGES) / "python"
    done = subprocess.run([str(python), str(ROOT / "bench" / "peers" / "plot.py"), str(figures), str(out)])
    if done.returncode != 0:
        raise SystemExit(f"{out}: not drawn, exit code {done.returncode}")
