"""`python -m elastic.chaos.injector RUN`: asks a running job for faults, as `everstep inject` does, but stays.

A fault a line on stdin, an answer a line on stdout. A process of its own, so that whoever judges the job is not tied to
its Ray, which takes those who are connected along when it dies; and a connection takes a second or two to make.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from pathlib import Path

from dataloader.errors import EverstepError

END_PATIENCE_SECONDS = 10.0
READY = "ready"  # its first answer, once it is connected


class Injector:
    """Ask, and later look for the answer; nothing here waits."""

    def __init__(self, run_dir: Path, log: Path) -> None:
        command = [sys.executable, "-P", "-m", "elastic.chaos.injector", str(run_dir)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for whoever judges
            )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="injector", daemon=True).start()

    def ask(self, fault: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the answer is then None
            self._process.stdin.write(fault + "\n")
            self._process.stdin.flush()

    def answer(self) -> str | None:
        """Raises `queue.Empty` while there is none; None: the injector has gone."""
        return self._answers.get_nowait()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.rstrip("\n"))
        self._answers.put(None)


def main(run_dir: Path) -> int:
    from elastic.cluster.attach import reached

    try:
        with reached(run_dir) as request:
            print(READY, flush=True)
            for line in sys.stdin:
                fault = line.strip()
                try:
                    answer = "; ".join(request(fault))
                except EverstepError as error:
                    answer = f"{fault}: no answer: {error}"
                print(" ".join(answer.split()), flush=True)
    except EverstepError as error:
        print(f"everstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
