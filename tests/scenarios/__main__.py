"""python -m tests.scenarios [--regenerate] [FILE ...]: show scenarios as they go now, or write them back"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.scenarios.play import played, scenarios


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="all, if none is named")
    parser.add_argument("--regenerate", action="store_true", help="write them back; then read what git diff says")
    options = parser.parse_args()
    for path in options.files or scenarios():
        text = path.read_text()
        now = played(text)
        if not options.regenerate:
            print(now)
        elif now != text:
            path.write_text(now)
            print(f"{path}: changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
