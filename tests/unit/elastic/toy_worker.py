"""A worker that trains nothing: it says what it is told to, over the real socket. Started by the agent under test.

TOY   words: up (say WorkerUp), echo (say back what it is told), exit=N, raise (through `record`), stubborn
      (ignores SIGTERM), child (leaves a child behind), gossip (says many things at once, then dies), lie (claims
      what it may not), spam (a second channel)
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.comm.local import connect_local
from runtime.comm.loop import dispatch

WORDS = dict(word.partition("=")[::2] for word in os.environ["TOY"].split())


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if "stubborn" in WORDS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("toy out", flush=True)
    print("toy err", file=sys.stderr, flush=True)
    selector = selectors.DefaultSelector()
    path = Path(os.environ["EVERSTEP_AGENT_SOCKET"])
    agent = connect_local(path, selector)
    agent.send({"kind": "Hello", "worker": int(os.environ["EVERSTEP_WORKER"]), "pid": os.getpid()})
    setup = None
    while setup is None:
        dispatch(selector, 10.0)
        for message in agent.receive():
            setup = message
    worker = setup["worker"]
    info = {"worker": worker, "pid": os.getpid(), "address": ["127.0.0.1", 1], "numerics": {}, "probe": "p"}
    if "up" in WORDS:
        agent.send({"kind": "WorkerUp", "info": info})
        agent.send({"kind": "WorkerLinked"})
    if "child" in WORDS:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    if "lie" in WORDS:
        agent.send({"kind": "WorkerExited", "worker": 99, "reason": "", "time": 0.0})
    if "spam" in WORDS:
        second = connect_local(path, selector)
        while second.closed is None:
            dispatch(selector, 10.0)
        agent.send({"kind": "WorkerFailed", "message": second.closed, "theirs": False})
    if "gossip" in WORDS:
        for number in range(300):
            agent.send({"kind": "Progress", "step": number // 100, "micro_batches": number % 100, "total": number})
        agent.send({"kind": "WorkerFailed", "message": "last words", "theirs": True})
        while agent.unsent_bytes:
            dispatch(selector, 10.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in WORDS:
        print("it went wrong", file=sys.stderr, flush=True)
        os._exit(int(WORDS["exit"]))
    if "raise" in WORDS:
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def failing() -> None:
            raise ValueError("the recipe broke")

        failing()
    while agent.closed is None:
        dispatch(selector, 10.0)
        for message in agent.receive():
            if "echo" in WORDS:
                agent.send({"kind": "WeightsWritten", "version": message["n"]})
            if message["kind"] == "leave":
                os._exit(0)
    if "stubborn" in WORDS:
        time.sleep(20)


main()
