"""A Ray cluster of several raylets on this machine, as a program: a test tells it what to do, line by line.

    start N           a head without CPUs, so that no agent goes there, and N further raylets: their address and pids
    add               one more raylet
    kill PID          SIGKILL to that raylet, and only to it; it is reaped, since the workers of one that isn't would
                      live on
    (end of input)    the end of all

Each answer is one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 * 1024 * 1024


def main() -> None:
    cpus = int(sys.argv[1])
    common: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster()
    raylets: dict[int, Any] = {}

    def add() -> None:
        raylet = cluster.add_node(num_cpus=cpus, **common).all_processes["raylet"][0].process
        raylets[raylet.pid] = raylet

    try:
        for line in sys.stdin:
            word, *rest = line.split()
            answer: dict[str, Any] = {}
            match word:
                case "start":
                    cluster.add_node(num_cpus=0, temp_dir=sys.argv[2], **common)
                    for _ in range(int(rest[0])):
                        add()
                    answer = {"address": cluster.address, "raylets": list(raylets)}
                case "add":
                    add()
                case "kill":
                    raylet = raylets.pop(int(rest[0]))
                    answer = {"time": time.time()}
                    raylet.kill()
                    raylet.wait()
            print(json.dumps(answer), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
