"""Everstep's real step on real tensors, all workers in one process: transactions, arithmetic and micro-batches as in
production, frames handed over in an order that a seed decides. No process, socket or Ray."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dataloader.shards import TokenShards
from dataloader.stream import SampleStream
from elastic.plan import Order, make_plan
from runtime import actions as a
from runtime.checkpoint.reader import CheckpointReader
from runtime.checkpoint.store import LocalStore
from runtime.checkpoint.writer import write_initial
from runtime.compute import MicroBatches
from runtime.config import TrainConfig
from runtime.numerics import pin
from runtime.protocol import Ballot, Frame, Report, StepRecord
from runtime.recipe import build_recipe
from runtime.recipe_checks import group_names, group_options
from runtime.sabotage import Sabotage, poisoned_steps
from runtime.shards.layout import flat_layout
from runtime.shards.tensors import TensorArithmetic
from runtime.step import StepTransaction
from runtime.worker import Built, job_facts, make_judge


class Inmate:
    """One worker."""

    def __init__(self, number: int, house: House) -> None:
        self.number, self.house = number, house
        built = house.built
        self.arithmetic = TensorArithmetic(
            built.layout, built.recipe.optimizer, built.options, CheckpointReader(house.checkpoints)
        )
        facts = job_facts(house.job, house.train)
        self.tx = StepTransaction(number, facts, self.arithmetic, make_judge(house.job, house.train, built))
        self.wanted: list[tuple[int, int]] = []
        self.report: Report | None = None
        self.ended = False
        self.bytes_sent = 0

    def do(self, actions: list[a.Action]) -> None:
        for action in actions:
            match action:
                case a.Send(to, frame):
                    self.bytes_sent += size(frame)
                    self.house.queues.setdefault((self.number, to), []).append(copied(frame))
                case a.Compute(step, ranks):
                    self.wanted = [(step, rank) for rank in ranks]
                case a.SendReport(report):
                    self.report = report
                case a.Decided(record):
                    known = self.house.records.setdefault(record.step, record)
                    assert known.digest == record.digest
                case a.Doubted():
                    self.house.doubted = True
                case a.Ended():
                    self.ended = True
                case _:
                    pass

    def compute_one(self) -> None:
        step, rank = self.wanted.pop(0)
        self.house.built.micro_batches.install(self.arithmetic.staged)
        gradient = self.arithmetic.take_buffer()
        work = self.house.built.micro_batches.run_rank(step, rank, gradient, lambda: False, lambda: None)
        assert work is not None
        self.house.computed += 1
        if self.tx.wants(step, rank):
            self.arithmetic.keep(rank, gradient)
            self.do(self.tx.on_computed(step, rank, work))


class House:
    def __init__(self, job: dict[str, Any], directory: Path, seed: int = 0) -> None:
        self.job, self.train = job, TrainConfig.model_validate(job["train"])
        pin(self.train)
        self.checkpoints = directory
        self.random = random.Random(seed)
        self.built = build(job, self.train)
        self.queues: dict[tuple[int, int], list[Frame]] = {}
        self.records: dict[int, StepRecord] = {}
        self.workers: dict[int, Inmate] = {}
        self.number = 0
        self.computed = 0
        self.doubted = False  # somebody asks for another attempt
        flat = self.built.micro_batches.parameters()
        probe = Inmate(-1, self)
        write_initial(LocalStore(directory), self.built.layout, probe.arithmetic.optimizer, flat, {}, {})

    def change(self, members: list[int]) -> None:
        """One ballot: these are the members from now on; who isn't among them is dead."""
        self.workers = {w: self.workers.get(w) or Inmate(w, self) for w in members}
        self.queues = {k: q for k, q in self.queues.items() if k[0] in self.workers and k[1] in self.workers}
        self.number += 1
        ballot = Ballot(1, self.number)
        for worker in self.workers.values():
            worker.do(worker.tx.on_ask(ballot))
        reports = {w.number: w.report for w in self.workers.values() if w.report is not None}
        order = Order(
            ballot, {w: w % 2 for w in members}, self.train.logical_ranks, self.train.shards, self.train.steps, 0
        )
        plan = make_plan(order, reports)
        for worker in self.workers.values():
            worker.do(worker.tx.on_plan(plan))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Anything that can happen happens in random order, until all have ended or `until` says so."""
        while not until():
            queues = [key for key, frames in self.queues.items() if frames]
            busy = [w for w in self.workers.values() if w.wanted]
            lazy = [w for w in self.workers.values() if w.tx.unsettled]
            choices: list[Any] = [*queues, *busy, *lazy]
            if not choices and self.doubted:
                self.doubted = False
                self.change(list(self.workers))
                continue
            if not choices:
                assert all(w.ended for w in self.workers.values()), "stuck"
                return
            choice = self.random.choice(choices)
            if isinstance(choice, tuple):
                sender, receiver = choice
                worker = self.workers[receiver]
                worker.do(worker.tx.on_frame(sender, self.queues[choice].pop(0)))
            elif choice in busy:
                choice.compute_one()
            else:
                choice.do(choice.tx.settle())

    def parameters(self) -> torch.Tensor:
        return next(iter(self.workers.values())).arithmetic.staged.clone()

    def moments(self, name: str) -> torch.Tensor:
        """An optimizer state of all shards, flat, fp32 [layout.total]."""
        flat = torch.zeros(self.built.layout.total)
        for worker in self.workers.values():
            for shard, holding in worker.arithmetic.holdings.items():
                pieces = self.built.layout.pieces(shard)
                for piece, state in zip(pieces, holding.state().pieces, strict=True):
                    flat[piece.start : piece.stop] = state.tensors[name]
        return flat


def build(job: dict[str, Any], train: TrainConfig) -> Built:
    stream = SampleStream(TokenShards(Path(job["data"]["path"]), "train"), job["data"]["seq_len"], train.seed)
    recipe = build_recipe(job["recipe"], job)
    model = recipe.build_model()
    groups = recipe.param_groups(model)
    layout = flat_layout(group_names(model, groups), train.shards)
    sabotage = Sabotage(poisoned_steps(job["faults"]))
    micro_batches = MicroBatches(recipe, model, layout, stream, train, sabotage=sabotage)
    return Built(recipe, layout, micro_batches, group_options(groups), {}, "")


def copied(frame: Frame) -> Frame:
    """As a link hands it over: one contiguous buffer of the receiver's own."""
    payload = frame.payload
    if isinstance(payload, list):
        payload = b"".join(bytes(part) for part in payload)
    whole = None if payload is None else memoryview(bytearray(payload))
    return Frame(frame.kind, frame.ballot, frame.step, frame.shard, frame.meta, whole)


def size(frame: Frame) -> int:
    parts = frame.payload if isinstance(frame.payload, list) else [frame.payload] if frame.payload is not None else []
    return sum(memoryview(part).nbytes for part in parts)
