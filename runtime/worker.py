"""The worker process: says hello to its agent, is told its job, builds, and hands over to the driver.

    EVERSTEP_AGENT_SOCKET   the agent's unix socket       EVERSTEP_WORKER   this worker's number
    EVERSTEP_PARENT         the agent's pid

Secrets come over the socket, never in argv or environment. The process dies with its agent, and says why it failed
before it ends: 0 it was told to leave, 3 the user or the host is to blame, 4 Everstep is.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.elastic.multiprocessing.errors import record

from dataloader.errors import ConfigError, DataError, EverstepError, HostError, RecipeError
from dataloader.shards import TokenShards
from dataloader.stream import SampleStream
from runtime import wall_clock
from runtime.checkpoint.catalogue import newest
from runtime.checkpoint.reader import CheckpointReader
from runtime.checkpoint.store import LocalStore
from runtime.checkpoint.writer import write_initial
from runtime.comm.frames import PAYLOAD_LIMIT_BYTES
from runtime.comm.impaired import ImpairedMesh
from runtime.comm.local import Channel, connect_local
from runtime.comm.loop import Wake, dispatch
from runtime.comm.tcp import TcpMesh
from runtime.compute import MicroBatches
from runtime.compute_thread import ComputeThread
from runtime.config import CheckpointConfig, LinksConfig, ScheduleConfig, TrainConfig
from runtime.driver import Driver
from runtime.guard import GuardRules, Verdict, judge
from runtime.numerics import numerics_class, pin, probe
from runtime.priority import answer_first, take_turns
from runtime.protocol import Certificate
from runtime.recipe import GuardedRecipe, build_recipe
from runtime.recipe_checks import check_recipe, group_names, group_options
from runtime.sabotage import Sabotage, poisoned_steps
from runtime.saving import Saver
from runtime.schedule import lr_ratio
from runtime.shards.holding import optimizer_variant
from runtime.shards.layout import UNIT, FlatLayout, flat_layout
from runtime.shards.payloads import check_payloads
from runtime.shards.tensors import TensorArithmetic
from runtime.step import StepTransaction
from runtime.step_state import JobFacts

PR_SET_PDEATHSIG = 1
BLAME_THEIRS = (RecipeError, ConfigError, DataError, HostError)


@dataclass(frozen=True, slots=True)
class Built:
    """The user's part, ready to train."""

    recipe: GuardedRecipe
    layout: FlatLayout
    micro_batches: MicroBatches
    options: list[dict[str, Any]]
    numerics: dict[str, str]
    probe: str


@record
def main() -> None:
    die_with(int(os.environ["EVERSTEP_PARENT"]))
    take_turns()  # until there is something to answer
    selector = selectors.DefaultSelector()
    agent = connect_local(Path(os.environ["EVERSTEP_AGENT_SOCKET"]), selector)
    agent.send({"kind": "Hello", "worker": int(os.environ["EVERSTEP_WORKER"]), "pid": os.getpid()})
    setup = await_setup(agent, selector)
    try:
        work(setup, agent, selector)
    except Exception as error:  # the process's edge: say whose fault it is, then end
        theirs = isinstance(error, BLAME_THEIRS)
        if not theirs or error.__cause__ is not None:  # into this worker's log, for whoever wrote the code
            traceback.print_exception(error if error.__cause__ is None else error.__cause__)
        message = str(error) if isinstance(error, EverstepError) else f"{type(error).__name__}: {error}"
        agent.send({"kind": "WorkerFailed", "message": message, "theirs": theirs})
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        os._exit(3 if theirs else 4)
    sys.stderr.write(f"worker {setup['worker']} ends: {agent.closed or 'told to leave'}\n")
    sys.stderr.flush()
    os._exit(0)  # the compute thread may be in the middle of a micro-batch that nobody wants


def die_with(parent: int) -> None:
    """SIGKILL when the agent's forking thread ends; and now, if the agent is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the job's business


def await_setup(agent: Channel, selector: selectors.BaseSelector) -> dict[str, Any]:
    while agent.closed is None:
        for message in agent.receive():
            if message["kind"] == "setup":
                return message
        dispatch(selector, None)
    os._exit(0)


def work(setup: Mapping[str, Any], agent: Channel, selector: selectors.BaseSelector) -> None:
    if ahead_seconds := setup.get("clock_ahead_seconds"):
        wall_clock.jump(ahead_seconds)
    job, run_dir = setup["job"], Path(setup["run_dir"])
    train = TrainConfig.model_validate(job["train"])
    built = build(job, train)
    instance = os.urandom(16)
    mesh = open_mesh(setup, instance, selector)
    wake = Wake(selector)
    store = LocalStore(run_dir / "checkpoints")
    arithmetic = TensorArithmetic(
        built.layout, built.recipe.optimizer, built.options, CheckpointReader(run_dir / "checkpoints")
    )

    buffers = dict(built.micro_batches.buffers())

    def install() -> None:
        while buffers:  # once: they were computed by one worker, and are taken from there by all
            for name, tensor in shipped_buffers(run_dir / "checkpoints").items():
                buffers[name].copy_(tensor)
            buffers.clear()
        built.micro_batches.install(*arithmetic.staged_pieces())

    def write_first() -> None:
        flat = built.micro_batches.parameters()
        facts = {"run": job["run"]["name"]}
        write_initial(store, built.layout, arithmetic.optimizer, flat, built.micro_batches.buffers(), facts)

    compute = ComputeThread(
        built.micro_batches.run_rank,
        install,
        arithmetic.take_buffer,
        arithmetic.give_back,
        wake.set,
        functools.partial(pin, train),
        functools.partial(built.micro_batches.gradient_of, first_tokens(built.micro_batches)),
        train.pad_micro_batch_seconds,
    )
    saver = Saver(store, run_dir / "weights" / "model.safetensors", built.layout, write_first, wake.set)
    transaction = StepTransaction(setup["worker"], job_facts(job, train), arithmetic, make_judge(job, train, built))
    info = {
        "worker": setup["worker"],
        "pid": os.getpid(),
        "address": list(mesh.address),
        "numerics": built.numerics,
        "probe": built.probe,
        "linked": False,
        "optimizer_bytes": 0,
    }
    agent.send({"kind": "WorkerUp", "info": info})
    gc.freeze()  # some 300,000 objects that live as long as the process: going through them takes 0.2 s each time
    compute.start()
    answer_first()
    Driver(transaction, arithmetic, mesh, agent, compute, saver, built.micro_batches.sabotage).run()
    mesh.shut()
    wake.close()


def open_mesh(setup: Mapping[str, Any], instance: bytes, selector: selectors.BaseSelector) -> ImpairedMesh:
    links = LinksConfig.model_validate(setup["job"]["links"])
    tcp = TcpMesh(
        setup["worker"],
        instance=instance,
        secret=setup["secret"],
        selector=selector,
        host=setup["host"],
        silence_seconds=links.silence_seconds,
    )
    return ImpairedMesh(tcp, silence_seconds=links.silence_seconds)


def build(job: Mapping[str, Any], train: TrainConfig) -> Built:
    """Everything of the user's, checked; the model holds the initial weights afterwards."""
    pin(train)
    shards = TokenShards(Path(job["data"]["path"]), "train")
    seed = job["data"].get("shuffle_seed")
    stream = SampleStream(shards, job["data"]["seq_len"], train.seed if seed is None else seed)
    if job["recipe"] is None:
        job = {**job, "model": with_vocabulary(job["model"], shards)}
    recipe = build_recipe(job["recipe"], job)
    model = recipe.build_model()
    groups = recipe.param_groups(model)
    layout = flat_layout(group_names(model, groups), train.shards)
    batch = {"tokens": torch.from_numpy(stream.tokens(0, train.micro_batch))}
    state_bytes = check_recipe(recipe, model, batch, train.seed)
    check_payloads(layout, train.logical_ranks, state_bytes, PAYLOAD_LIMIT_BYTES)
    options = group_options(groups)
    guard, sabotage = GuardRules(**job.get("guard", {})), Sabotage(poisoned_steps(job["faults"]))
    micro_batches = MicroBatches(recipe, model, layout, stream, train, guard, sabotage)
    numerics = numerics_class(train, optimizer_variant(recipe.optimizer, options))
    return Built(recipe, layout, micro_batches, options, numerics, probe(micro_batches, layout))


def first_tokens(micro_batches: MicroBatches) -> NDArray[np.int64]:
    return micro_batches.stream.tokens(0, micro_batches.train.micro_batch)


def with_vocabulary(model: Mapping[str, Any], shards: TokenShards) -> dict[str, Any]:
    """The built-in model's section, its vocabulary the tokenizer's if it names none."""
    size = model.get("vocab_size")
    if size is not None and size < shards.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {size} is less than the {shards.vocab_size} of {shards.directory}; leave it away"
        )
    return {**model, "vocab_size": size if size is not None else shards.vocab_size}


def shipped_buffers(checkpoints: Path) -> dict[str, torch.Tensor]:
    """As the newest checkpoint names them; that one may be pruned meanwhile, their file stays."""
    manifest = newest(checkpoints)
    return {} if manifest is None else CheckpointReader(checkpoints).load_buffers(manifest)


def job_facts(job: Mapping[str, Any], train: TrainConfig) -> JobFacts:
    checkpoint = CheckpointConfig.model_validate(job["checkpoint"])
    return JobFacts(
        logical_ranks=train.logical_ranks,
        shards=train.shards,
        global_batch=train.global_batch,
        save_every=checkpoint.full_every,
        guard=GuardRules(**job.get("guard", {})),
        gates=frozenset(fault["at_step"] for fault in job["faults"] if fault["wait"]),
    )


def make_judge(job: Mapping[str, Any], train: TrainConfig, built: Built) -> Any:
    """The verdict of a certificate: the schedule's rate at its step, and clipping."""
    schedule = ScheduleConfig.model_validate(job["schedule"])
    tiny = [{**options, "params": [torch.nn.Parameter(torch.zeros(UNIT))]} for options in built.options]
    base_lr = float(built.recipe.optimizer(tiny).param_groups[0].get("lr", 0.0))

    @functools.lru_cache(maxsize=4)
    def verdict(certificate: Certificate) -> Verdict:
        ratio = lr_ratio(schedule, certificate.step, train.steps)
        return judge(certificate, ratio, base_lr, train.grad_clip)

    return verdict


if __name__ == "__main__":
    main()
