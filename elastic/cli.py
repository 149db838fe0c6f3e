"""The command `everstep`.

    0    done                              3    the job failed
    1    the check says no (audit, diff)   130  stopped by Ctrl-C, with a checkpoint
    2    usage or config

Rules of this room: an error on purpose is one line on stderr, never a traceback; each command imports what it needs
when it runs, so that asking for help or a status is quick and needs neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from dataloader.errors import EverstepError, UsageError

Command: TypeAlias = Callable[[argparse.Namespace], int]
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    parsed = _parser().parse_args(arguments)
    command: Command = parsed.command
    try:
        code = command(parsed)
        sys.stdout.flush()
        return code
    except EverstepError as error:
        print(f"everstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("everstep: interrupted; no job of this command is running", file=sys.stderr, flush=True)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        # Whoever read our output, or the terminal, is gone; a job goes on by itself.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _parser() -> _Parser:
    parser = _Parser(prog="everstep", description="Elastic training for PyTorch: any failure, the same bits.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, command: Command, about: str) -> _Parser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=command)
        return sub

    demo = add("demo", _demo, "train the example job twice, undisturbed and through failures, and compare the bits")
    demo.add_argument("--dir", type=Path, default=Path("runs"), help="where the two run directories go (runs)")

    run = add("run", _run, "run a job and watch it; Ctrl-C stops it with a checkpoint, a second one ends it at once")
    run.add_argument("job", type=Path, metavar="JOB.yaml")
    run.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="change a key; VALUE is YAML")
    run.add_argument("--resume", action="store_true", help="go on with the run in the run directory")
    run.add_argument("--detach", action="store_true", help="return as soon as the job is up")
    run.add_argument("--address", default="local", help="local (its own Ray), auto, or a Ray cluster's address")

    for name, command, about in (
        ("attach", _attach, "watch a running job; Ctrl-C only detaches"),
        ("status", _status, "say where a run stands and who its members are"),
        ("inject", _inject, "make a running job suffer a fault"),
        ("audit", _audit, "prove from the records and the data that every sample was used once and in its place"),
    ):
        add(name, command, about).add_argument("run", type=Path, metavar="RUN", help="a run directory")
    commands.choices["status"].add_argument("--json", action="store_true", help="as one JSON object")
    commands.choices["inject"].add_argument("faults", nargs="+", metavar="FAULT", help=_grammar())

    chaos = add("chaos", _chaos, "disturb a job with faults, and check that every promise held; exit 1 if one didn't")
    chaos.add_argument("job", type=Path, metavar="JOB.yaml")
    chaos.add_argument("--minutes", type=_positive, default=1.0, metavar="M", help="of faults, from the first step (1)")
    chaos.add_argument("--seed", type=int, default=1, metavar="N", help="what the schedule is drawn from (1)")
    chaos.add_argument(
        "--mtbf", type=_positive, default=5.0, metavar="SECONDS", help="mean time between the faults that are drawn (5)"
    )
    chaos.add_argument(
        "--faults", type=Path, metavar="FILE", help="a YAML list of {at_seconds|at_step: ..., fault: FAULT}, not drawn"
    )
    chaos.add_argument(
        "--reference", type=Path, metavar="RUN", help="an undisturbed run of the same job, in place of making one"
    )
    chaos.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="change a key; VALUE is YAML")

    replay = add("replay", _replay, "train while nodes come and go as a spot-availability trace says, and check it")
    replay.add_argument("trace", type=Path, metavar="TRACE.json")
    replay.add_argument("job", type=Path, metavar="JOB.yaml")
    replay.add_argument(
        "--tick", type=_positive, required=True, metavar="SECONDS", help="that a tick of the trace takes"
    )
    replay.add_argument("--nodes", type=_count, metavar="N", help="that stand for the trace's capacity (as many)")
    replay.add_argument("--ticks", type=_part, metavar="A:B", help="only these ticks of the trace")
    replay.add_argument(
        "--notice", type=_seconds, default=0.0, metavar="SECONDS", help="that a node is told before it goes (0: none)"
    )
    replay.add_argument(
        "--reference", type=Path, metavar="RUN", help="an undisturbed run of the same job, in place of making one"
    )
    replay.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="change a key; VALUE is YAML")

    _add_data(add("data", _data, "look at token files, check them, write them in another format"))

    two = add("diff", _diff, "compare two runs step by step, and their weights")
    two.add_argument("run_a", type=Path, metavar="RUN_A")
    two.add_argument("run_b", type=Path, metavar="RUN_B")
    return parser


def _add_data(data: _Parser) -> None:
    actions = data.add_subparsers(metavar="ACTION", required=True, dest="action", parser_class=_Parser)
    for name, about in (
        ("inspect", "say what a token file is, from its head and sizes"),
        ("verify", "read all of it, and say the first thing that doesn't fit"),
        ("convert", "write it in another format"),
    ):
        action = actions.add_parser(name, help=about, description=about)
        action.add_argument("path", type=Path, metavar="PATH", help="a token file, or a directory of MDS")
        action.add_argument("--type", metavar="TYPE", help="of bare ids, which don't say it: u16, u32, ...")
        action.add_argument("--column", metavar="NAME", help="of an MDS dataset (tokens or input_ids)")
    convert = actions.choices["convert"]
    convert.add_argument("--to", required=True, choices=("megatron", "llm.c", "datatrove", "raw"))
    convert.add_argument("--out", required=True, type=Path, metavar="PATH", help="that isn't there yet")
    convert.add_argument("--to-type", metavar="TYPE", help="of the ids that are written (as narrow as the source's)")
    convert.add_argument("--end-of-text", type=int, metavar="ID", help="ends a document, where the format knows none")


def _grammar() -> str:
    from elastic.faults import GRAMMAR

    return GRAMMAR


# --- commands ------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from elastic.demo import demo

    return demo(arguments.dir)


def _run(arguments: argparse.Namespace) -> int:
    from elastic.config import load_job
    from elastic.launch import run_job
    from elastic.record_lines import read_ledger
    from elastic.watch import complain

    job = load_job(arguments.job, arguments.set)
    run, outcome = run_job(job, arguments.resume, arguments.detach, arguments.address)
    place = _shown(run.path)
    if outcome.state == "failed":
        complain(outcome.reason)
    elif outcome.state == "done":
        skipped = sum(record.verdict != "commit" for record in read_ledger(run.ledger))
        bad = f", {skipped} of {job.train.steps} steps skipped for a bad gradient" if skipped else ""
        print(f"done{bad}: weights in {_shown(run.weights)}; check them with `everstep audit {place}`")
    elif outcome.state == "stopped":
        settings = "".join(f" --set {shlex.quote(setting)}" for setting in arguments.set)
        print(f"stopped: go on with `everstep run {shlex.quote(str(arguments.job))}{settings} --resume`")
    elif arguments.detach:
        print(f"running in {place}; watch it with `everstep attach {place}`")
    return outcome.exit_code


def _attach(arguments: argparse.Namespace) -> int:
    from elastic.config import stored_job
    from elastic.rundir import open_run
    from elastic.view import RunView
    from elastic.watch import Signals, attend, complain

    run = open_run(arguments.run)
    job = stored_job(run.job)
    with Signals() as signals:
        outcome = attend(run, RunView(job.run.name, job.train.steps), signals)
    if outcome.state == "failed":
        complain(outcome.reason)
    else:
        print(f"{outcome.state}: {_shown(run.path)}")
    return outcome.exit_code


def _status(arguments: argparse.Namespace) -> int:
    from elastic.rundir import open_run
    from elastic.status import read, show

    status = read(open_run(arguments.run))
    if arguments.json:
        print(json.dumps(status))
    else:
        show(status)
    return 0


def _inject(arguments: argparse.Namespace) -> int:
    from elastic.faults import parse_fault
    from elastic.rundir import holder, open_run

    faults = [str(parse_fault(text)) for text in arguments.faults]
    run = open_run(arguments.run)
    if holder(run) is None:
        raise UsageError(f"{arguments.run}: no job is running here; start one with `everstep run`")
    from elastic.cluster.attach import inject  # brings in Ray

    for line in inject(run.path, faults):
        print(line)
    return 0


def _chaos(arguments: argparse.Namespace) -> int:
    from elastic.chaos.command import chaos, wanted_of

    return chaos(wanted_of(arguments))


def _replay(arguments: argparse.Namespace) -> int:
    from elastic.chaos.replay import replay, wanted_of

    return replay(wanted_of(arguments))


def _data(arguments: argparse.Namespace) -> int:
    from elastic import data_files

    actions = {"inspect": data_files.inspect, "verify": data_files.verify, "convert": data_files.convert_to}
    return actions[arguments.action](arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def _part(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be two ticks as in 100:250, got {text}")
    return int(first), int(end)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number more than 0, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # which every bound refuses


def _audit(arguments: argparse.Namespace) -> int:
    from elastic.checks import audit_run
    from elastic.rundir import open_run

    return 0 if audit_run(open_run(arguments.run)) else 1


def _diff(arguments: argparse.Namespace) -> int:
    from elastic.checks import diff_runs
    from elastic.rundir import open_run

    return 0 if diff_runs(open_run(arguments.run_a), open_run(arguments.run_b)) else 1


def _shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


if __name__ == "__main__":
    raise SystemExit(main())
