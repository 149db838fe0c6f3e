"""Injected faults, done: what waits for a point of the protocol (runtime/injected.py) strikes this very process."""

from __future__ import annotations

import os
import signal
import time

from dataloader.errors import InternalError
from runtime.comm import impaired
from runtime.comm.link import Mesh
from runtime.compute_thread import ComputeThread
from runtime.injected import STORE_FAILURES, Armed, Plain
from runtime.links import Tell
from runtime.sabotage import Sabotage
from runtime.saving import Saver
from runtime.thawing import thaw_later


class Strikes:
    def __init__(self, mesh: Mesh, compute: ComputeThread, saver: Saver, sabotage: Sabotage, tell: Tell) -> None:
        self._mesh, self._compute, self._saver, self._sabotage, self._tell = mesh, compute, saver, sabotage, tell
        self._armed = Armed()

    def __bool__(self) -> bool:
        return bool(self._armed)

    def arm(self, fault: Plain) -> None:
        self._armed.arm(fault)
        self.reach(None)

    def reach(self, point: str | None) -> None:
        """Do what was armed for this point; None: at once."""
        for fault in self._armed.due(point):
            self._strike(fault)

    def _strike(self, fault: Plain) -> None:
        match fault["kind"]:
            case "kill-worker":
                self._tell("Struck", time=time.time())
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill-agent" | "kill-node":
                os.kill(os.getppid(), signal.SIGKILL)  # which takes this process with it
            case "freeze-worker":
                self._tell("Struck", time=time.time())
                if fault["seconds"] is not None:
                    thaw_later([os.getpid()], fault["seconds"])
                os.kill(os.getpid(), signal.SIGSTOP)
            case "disk-full" | "store-down" as kind:
                self._saver.fail_for(fault["seconds"], STORE_FAILURES[kind])
            case "partition-worker" | "partition-node" | "delay-worker":
                impaired.inject(self._mesh, fault)
            case "corrupt-worker" if fault["what"] == "link":
                impaired.inject(self._mesh, fault)
            case "slow-worker" | "slow-node":
                self._compute.slow(fault["factor"], fault["seconds"])
            case "poison" | "corrupt-worker":
                self._sabotage.arm(fault)
            case other:
                raise InternalError(f"no fault {other!r} can happen in a worker")
