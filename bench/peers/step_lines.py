"""What a worker of a peer writes down, one JSON object a line, each line one write, so that a kill leaves whole ones.

    start     {rank, pid, ticks, resume}    ticks: when the kernel says the process began; resume: the step from which
                                            everybody goes on with it, None if it joins the others where they are
    computed  {rank, samples}               one micro-batch, forward
    attempt   {rank, step, group, samples, counts, loss}
                                            before gradients are reduced; group: who attempt it together; counts: false
                                            for one that came late, whose gradients are zeroed; loss: its samples' mean
    commit    {rank, step, group, digest}   after the optimizer's step; digest: of the parameters

Standard library only: it is imported in every system's venv.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class StepLines:
    def __init__(self, directory: Path, rank: int, resume: int | None) -> None:
        self.rank = rank
        path = directory / f"steps-{rank}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write("start", pid=os.getpid(), ticks=start_ticks(os.getpid()), resume=resume)

    def write(self, kind: str, **fields: Any) -> None:
        line = {"time": time.time(), "kind": kind, "rank": self.rank, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read_lines(directory: Path) -> list[dict[str, Any]]:
    """Of all workers, in the order of time."""
    return sorted(_all_lines(directory), key=lambda line: line["time"])


def _all_lines(directory: Path) -> Iterator[dict[str, Any]]:
    for path in directory.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def start_ticks(pid: int) -> int | None:
    """When the process began, in ticks since boot: with the number, its name. None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
