"""A Ray cluster of several raylets on this machine, as a program: a test tells it what to do, line by line.

    start N           a head without CPUs, so that no agent goes there, and N further raylets; says the address
    add               one more raylet
    kill K            SIGKILL to the K-th further raylet, and only to that; it is reaped, since the workers of one that
                      isn't would live on
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
    nodes: list[Any] = []
    try:
        for line in sys.stdin:
            word, *rest = line.split()
            answer: dict[str, Any] = {}
            match word:
                case "start":
                    cluster.add_node(num_cpus=0, temp_dir=sys.argv[2], **common)
                    nodes += [cluster.add_node(num_cpus=cpus, **common) for _ in range(int(rest[0]))]
                    answer = {"address": cluster.address}
                case "add":
                    nodes.append(cluster.add_node(num_cpus=cpus, **common))
                case "kill":
                    raylet = nodes[int(rest[0])].all_processes["raylet"][0].process
                    answer = {"time": time.time()}
                    raylet.kill()
                    raylet.wait()
            print(json.dumps(answer), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
