"""Real processes: one that stays, with a port, shared memory and a file, and a child of it that has no mark."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic.chaos.leftovers import MARK, witnessed

STAYS = """\
import mmap, os, socket, subprocess, sys
door = socket.create_server(("127.0.0.1", 0))
segment = open(f"/dev/shm/everstep-test-{os.getpid()}", "w+b")
segment.truncate(4096)
mapped = mmap.mmap(segment.fileno(), 4096)
open(os.path.join(os.environ["TMPDIR"], "a-file"), "w").close()
hidden = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"]}, start_new_session=True)
print(door.getsockname()[1], hidden.pid, flush=True)
sys.stdin.read()
"""


def test_what_stays_is_found_and_what_ends_is_not() -> None:
    with witnessed() as witness:
        assert os.environ["TMPDIR"] == str(witness.temporary)
        process = subprocess.Popen(
            [sys.executable, "-c", STAYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdin is not None
        port, hidden = map(int, process.stdout.readline().split())
        segment = Path(f"/dev/shm/everstep-test-{process.pid}")
        try:
            witness.look()
            left = witness.left(0.0)
            assert [line for line in left if line.startswith(f"process {process.pid}:")]
            assert [line for line in left if line.startswith(f"process {hidden}:")]
            assert f"port {port}" in left
            assert f"shared memory {segment}" in left
            assert f"temporary file {witness.temporary}/a-file" in left

            process.kill()
            process.wait()
            left = witness.left(0.0)
            assert [line.partition(":")[0] for line in left if line.startswith("process")] == [f"process {hidden}"]
            assert f"port {port}" not in left
            assert f"shared memory {segment}" in left
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait()
            os.kill(hidden, 9)
            segment.unlink()
        (witness.temporary / "a-file").unlink()
        assert witness.left() == []
    assert not witness.temporary.exists()
    assert MARK not in os.environ
    assert os.environ.get("TMPDIR") != str(witness.temporary)
    assert tempfile.gettempdir() != str(witness.temporary)
