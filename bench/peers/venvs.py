"""A venv for each system, made once and kept, so that a peer runs as it is released and never in Everstep's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = "installed.txt"  # written last; what it names is there


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "everstep" / "bench"


def venv(name: str, packages: Sequence[str]) -> Path:
    """Its bin directory."""
    directory = cache_directory() / name
    stamp = directory / STAMP
    wanted = "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making the venv {directory}: {' '.join(packages)}", flush=True)
        _run(sys.executable, "-m", "venv", "--clear", str(directory))
        for part in _without_cuda(packages):
            _run(str(directory / "bin" / "python"), "-m", "pip", "install", "-q", *part)
        stamp.write_text(wanted)
    return directory / "bin"


def _without_cuda(packages: Sequence[str]) -> list[list[str]]:
    """torch first and by itself, from the index of its CPU builds if that answers, so that no CUDA is downloaded."""
    torch = [package for package in packages if package.startswith("torch==")]
    first = [[*torch, "--no-deps", "--extra-index-url", CPU_INDEX]] if torch else []
    return [*first, list(packages)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
