"""All figures, one after another. Each script is a process of its own, so that none measures what another left."""

from __future__ import annotations

import subprocess
import sys

from bench.results import ROOT

SCRIPTS = ("step", "kills", "slow")


def main() -> int:
    codes = []
    for script in SCRIPTS:
        print(f"== bench.{script}", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", f"bench.{script}"], cwd=ROOT).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
