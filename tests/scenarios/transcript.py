"""What somebody who sees everything writes down of a run: who did what, in the protocol's words.

Lines of several workers that say the same, with nothing in between that matters to them, are one line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from elastic.faults import Fault
from runtime.protocol import Ballot, Certificate, Plan, WorkerId
from tests.scenarios import plans
from tests.sim.watch import Watch
from tests.sim.worker import SimWorker

if TYPE_CHECKING:
    from tests.sim.world import World

WHO = 14  # columns
PAUSE_SECONDS = 0.95  # of silence that are worth a word
TOGETHER_SECONDS = 0.05
DOING = {
    "contributed": "right before it sends a contribution",
    "vote": "right before it sends a record",
    "publish": "right before it sends new parameters",
    "first plan": "right before it installs its first plan",
    "next plan": "right before it installs the plan",
    "fill": "right before it sends a snapshot",
    "take": "right before it takes a snapshot",
    "write": "right before it writes a file of a checkpoint",
    "plan sent": "right before it sends the plan",
    "save": "right before it writes the manifest",
}


class Line:
    def __init__(self, time: float, workers: list[WorkerId], who: str, text: str) -> None:
        self.time, self.workers, self.who, self.text = time, workers, who, text

    def __str__(self) -> str:
        who = self.who or ("worker " if len(self.workers) == 1 else "workers ") + " ".join(map(str, self.workers))
        first, *more = self.text.splitlines()
        return "\n".join([f"{who:{WHO}} {first}".rstrip(), *(f"{'':{WHO}}   {line}" for line in more)])


class Transcript(Watch):
    """Of a run with faults the time before the first plan is left out: it is always the same."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.world: World | None = None
        self.lines: list[Line] = []
        self.plan: Plan | None = None
        self.asks: dict[Ballot, set[WorkerId]] = defaultdict(set)
        self.told: set[tuple[Any, ...]] = set()

    # --- writing ----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        assert self.world is not None
        return self.world.engine.now

    def text(self) -> list[str]:
        out, before = [], None
        for line in self.lines[0 if self.whole else self.beginning() :]:
            if before is not None and line.time - before >= PAUSE_SECONDS:
                out.append(f"{'':{WHO}} ... {plans.seconds_in_words(line.time - before)} later")
            before = line.time
            out += str(line).splitlines()
        return out

    def beginning(self) -> int:
        return next((n for n, line in enumerate(self.lines) if line.text.startswith("plans ")), 0)

    def by(self, worker: WorkerId, text: str) -> None:
        """Something that a worker did, and others perhaps as well, at about the same time."""
        for line in reversed(self.lines[-6:]):
            if line.who or self.now - line.time > TOGETHER_SECONDS:
                break
            if line.text == text and worker not in line.workers:
                line.workers = sorted([*line.workers, worker])
                return
            if worker in line.workers:
                break  # what it did before comes before
        self.lines.append(Line(self.now, [worker], "", text))

    def say(self, who: str, text: str) -> None:
        self.lines.append(Line(self.now, [], who, text))

    def controller(self, text: str) -> None:
        assert self.world is not None
        self.say(f"controller {self.world.cluster.incarnation}", text)

    def once(self, *key: Any) -> bool:
        new = key not in self.told
        self.told.add(key)
        return new

    # --- faults and ends --------------------------------------------------------------------------------------

    def fault(self, fault: Fault, at: SimWorker | None) -> None:
        assert self.world is not None
        hook = self.world.vocabulary.happened[-1][1]
        who = f"worker {at.id}" if at is not None else "the controller"
        where = f": {who}, {DOING[hook]}" if hook else ""
        self.say("fault", f"{fault}{where}")

    def died(self, worker: SimWorker) -> None:
        if worker.tx.plan is None:
            self.by(worker.id, "died before it had joined")
        else:
            self.by(worker.id, f"died in step {worker.tx.step}{', certified' if worker.tx.certificate else ''}")

    def woke(self, worker: SimWorker) -> None:
        self.by(worker.id, f"woke in step {worker.tx.step}")

    def lost_link(self, worker: SimWorker, peer: WorkerId) -> None:
        if self.once("lost", worker.id, peer, worker.tx.installed().ballot):
            self.by(worker.id, f"lost the link to {peer}")

    # --- a change of members ----------------------------------------------------------------------------------

    def controller_started(self, incarnation: int) -> None:
        self.controller("started" if incarnation == 1 else "started, with what its predecessor wrote down")

    def asked(self, ballot: Ballot, worker: WorkerId) -> None:
        again = worker in self.asks[ballot]
        self.asks[ballot].add(worker)
        if again and not self.once("asked again", worker, ballot):
            return
        head = f"asks {plans.name(ballot)} again, every second:" if again else f"asks {plans.name(ballot)}:"
        last = self.lines[-1] if self.lines else None
        if last is not None and last.text.startswith(head) and self.now - last.time < TOGETHER_SECONDS:
            last.text += f" {worker}"
        else:
            self.controller(f"{head} {worker}")

    def promised(self, worker: SimWorker) -> None:
        tx = worker.tx
        name = plans.name(tx.promise)
        if not self.once("promised", worker.id, tx.promise):
            return
        if tx.plan is None:
            self.by(worker.id, f"promised {name}; new here")
        else:
            self.by(worker.id, f"froze for {name} in step {tx.step}{', certified' if tx.certificate else ''}")

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        assert self.world is not None
        match kind:
            case "plan":
                plan = self.world.checks.newest
                assert plan is not None
                self.controller("\n".join(plans.in_words(plan, self.plan, facts)))
                self.plan = plan
            case "member_left":
                self.controller(f"gives up worker {facts['worker']}: {facts['reason']}")
            case "recovery":
                self.controller(recovered(facts))
            case "standby":
                self.controller(f"node {facts['node']} is here: {facts['reason']}")
            case "checkpoint":
                self.controller(f"has checkpoint {facts['version']} complete")
            case "fault_injected" if facts["fault"] != self.lines[-1].text:
                self.say("fault", f"{facts['fault']}, by the controller itself")
            case "fault_skipped":
                self.controller(f"skips {facts['fault']}: {facts['reason']}")
            case "run_ended":
                self.controller(f"ends the job: {facts['state']}, {facts['reason']}")

    def installed(self, worker: SimWorker, plan: Plan) -> None:
        self.by(worker.id, f"installed plan {plans.name(plan.ballot)}")

    def refused(self, worker: SimWorker, ballot: Ballot) -> None:
        if ballot < worker.tx.promise and self.once("refused", worker.id, ballot):
            self.by(worker.id, f"refused plan {plans.name(ballot)}: it has promised {plans.name(worker.tx.promise)}")

    # --- steps ------------------------------------------------------------------------------------------------

    def certified(self, worker: SimWorker, certificate: Certificate) -> None:
        assert self.world is not None
        if certificate.void or not self.world.checks.standing(worker):
            return
        digest = self.world.reference.version(certificate.step + 1).digest[:6]
        again = "" if self.once("decided", certificate.step) else " again: the same bits"
        self.say(f"step {certificate.step}", f"decided, first seen by {worker.id}; digest {digest}{again}")

    def filled(self, worker: SimWorker, shard: int) -> None:
        self.by(worker.id, f"has a complete copy of shard {shard}")

    def over(self, worker: SimWorker, sender: WorkerId, ballot: Ballot) -> None:
        assert self.world is not None
        if sender not in self.world.checks.members and self.once("over", worker.id, sender):
            self.by(worker.id, f"dropped what {sender} sends under {plans.name(ballot)}: that is over")


def recovered(facts: Mapping[str, Any]) -> str:
    who = plans.listed(facts["workers"])
    cost = f"{facts['recomputed']} micro-batches computed again" if facts["recomputed"] else "nothing computed again"
    links = f"links opened {facts['links_opened']}, closed {facts['links_closed']}"
    back = ", back to a checkpoint" if facts["rollback"] else ""
    return f"is over the loss of {who}{back}: {cost}; {links}" if who else f"is over the change{back}: {cost}; {links}"


def ending(world: World) -> Iterable[str]:
    """What the checks have found at the end; they raise on any other finding."""
    steps = len(world.disk.ledger)
    yield f"ledger: steps 0 to {steps - 1}, each once"
    yield f"weights and checkpoint {world.disk.newest()}: the bits of an undisturbed run"
