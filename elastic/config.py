"""The job file: its sections, the rules between them, and the one way to read it.

Rules of this room:
- `load_job` and `stored_job` are the doors; both raise ConfigError, one line that names the file, the key and the cure.
- Unknown keys and wrong types are refused everywhere. A number in quotes is text.
- Each section checks itself (runtime/config.py, dataloader/config.py); what two sections must agree in is checked here.
- A job says what is trained and on how many workers; which machine and which address is the command line's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from dataloader.config import DataConfig
from dataloader.errors import ConfigError, UsageError
from elastic.balance import Terms
from elastic.faults import Fault, FaultKind, parse_fault
from elastic.wording import one_line
from elastic.yaml_text import dump, parse
from runtime.config import (
    CheckpointConfig,
    Count,
    GuardConfig,
    LinksConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    Section,
    TrainConfig,
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
NOTES = {
    "run.name": "use letters, digits, '.', '_' and '-' only",
    "recipe": "write it as module:Class, as in my_recipe:MyRecipe",
}
# What --resume may change, as prefixes of dotted keys; and the keys that say where things lie, not what they are.
MAY_CHANGE_SECTIONS = ("cluster", "balance", "guard", "metrics", "policy", "links")
RESUME_MAY_CHANGE = (*(f"{name}." for name in MAY_CHANGE_SECTIONS), "train.pad_micro_batch_seconds", "faults")
PLACES = ("run.dir", "recipe_dir")


class RunConfig(Section):
    """What the run is called and where it is kept."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
    dir: Path | None = None  # the run directory itself; absent: runs/{name} where the command was given


class ClusterConfig(Section):
    """How many workers. The bits don't depend on any of this."""

    nodes: Count = 1
    workers_per_node: Count = 1
    standbys: Annotated[int, Field(ge=0)] = 0  # warm processes beside the workers, for the whole job
    min_workers: Count = 1  # with fewer, the job waits
    preemption_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0  # that a node's bare SIGTERM gives

    @property
    def workers(self) -> int:
        """Workers that the job starts with."""
        return self.nodes * self.workers_per_node


class MetricsConfig(Section):
    """Where each node agent serves its Prometheus metrics."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class PolicyConfig(Section):
    """With which response a kind of fault begins (elastic/policy.py). The bits don't depend on any of this."""

    worker_lost: Literal["standby", "redistribute", "stop"] = "standby"
    node_lost: Literal["standby", "redistribute", "stop"] = "standby"
    holders_lost: Literal["checkpoint", "stop"] = "checkpoint"  # of some shard, all at once
    restarts: Count = 4  # per worker of the job, at one step, before the job is taken for hopeless


class BalanceConfig(Section):
    """When work moves away from slow workers, and back; see elastic/balance.py. No bit depends on it."""

    enabled: bool = Terms.enabled
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = Terms.threshold  # of a step's seconds that it has to save
    every: Count = Terms.every  # steps between two changes, at least
    patience_seconds: Annotated[float, Field(ge=0.0)] = Terms.patience_seconds  # for which it has to look so

    @property
    def terms(self) -> Terms:
        return Terms(self.enabled, self.threshold, self.every, self.patience_seconds)


class FaultConfig(Section):
    """A fault that the job does to itself at the boundary before a step."""

    at_step: Annotated[int, Field(ge=0)]
    fault: str
    wait: bool = False  # hold that boundary until the fault's effect is complete

    @field_validator("fault")
    @classmethod
    def _known_fault(cls, value: str) -> str:
        try:
            return str(parse_fault(value))
        except UsageError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _can_be_waited_for(self) -> FaultConfig:
        if self.wait and self.parsed.during is not None:
            raise ValueError(f"{self.fault} happens within a step, so no boundary can wait for it; leave wait away")
        return self

    @property
    def parsed(self) -> Fault:
        return parse_fault(self.fault)


class JobConfig(Section):
    """A whole job. Read one with `load_job`: with a recipe of the user's own, `model` and `optimizer` are free-form
    mappings that Everstep hands to it; without one they are the built-in recipe's sections."""

    run: RunConfig
    train: TrainConfig
    cluster: ClusterConfig = ClusterConfig()
    recipe: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    recipe_dir: Path | None = None  # the recipe's module is looked for here first; absent: the job file's folder
    model: ModelConfig | dict[str, Any]
    data: DataConfig
    optimizer: OptimizerConfig | dict[str, Any]
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    metrics: MetricsConfig = MetricsConfig()
    policy: PolicyConfig = PolicyConfig()
    links: LinksConfig = LinksConfig()
    balance: BalanceConfig = BalanceConfig()
    faults: tuple[FaultConfig, ...] = ()

    @model_validator(mode="after")
    def _sections_agree(self) -> JobConfig:
        _check_workers(self.train, self.cluster)
        if isinstance(self.model, ModelConfig):
            _check_model(self.model, self.data)
        _check_faults(self.faults, self.train.steps)
        return self

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute in a job that was read by `load_job`."""
        return self.run.dir if self.run.dir is not None else Path("runs") / self.run.name

    @property
    def shuffle_seed(self) -> int:
        """Seed of the sample order."""
        return self.train.seed if self.data.shuffle_seed is None else self.data.shuffle_seed


class BuiltInJob(JobConfig):
    """A job of the built-in recipe."""

    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


class RecipeJob(JobConfig):
    """A job with a recipe of the user's own."""

    model: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)


# --- rules between sections ----------------------------------------------------------------------------------


def _check_workers(train: TrainConfig, cluster: ClusterConfig) -> None:
    workers = cluster.workers
    if train.logical_ranks < workers:
        raise ValueError(
            f"train.logical_ranks: {train.logical_ranks} is fewer than the {workers} workers of cluster.nodes x "
            f"cluster.workers_per_node = {cluster.nodes} x {cluster.workers_per_node}; set it to {workers} or more, "
            "or start fewer workers"
        )
    if cluster.min_workers > workers:
        raise ValueError(
            f"cluster.min_workers: {cluster.min_workers} is more than the {workers} workers that the job starts with; "
            f"set it to {workers} or less, or start more workers"
        )


def _check_model(model: ModelConfig, data: DataConfig) -> None:
    if model.max_seq_len is not None and model.max_seq_len < data.seq_len:
        raise ValueError(
            f"model.max_seq_len: {model.max_seq_len} is less than data.seq_len ({data.seq_len}); "
            f"set it to {data.seq_len} or more, or leave it away"
        )
    if data.source is not None and model.vocab_size is not None and model.vocab_size < data.vocab_size:
        raise ValueError(
            f"model.vocab_size: {model.vocab_size} is less than data.vocab_size ({data.vocab_size}); "
            "leave it away, and it is the tokenizer's"
        )


def _check_faults(faults: Sequence[FaultConfig], steps: int) -> None:
    seen: set[tuple[int, str]] = set()
    for number, entry in enumerate(faults):
        if entry.at_step >= steps:
            raise ValueError(
                f"faults[{number}].at_step: {entry.at_step} is not a step of this job; "
                f"train.steps is {steps}, so set it to {steps - 1} or less"
            )
        if (entry.at_step, entry.fault) in seen and entry.parsed.kind is not FaultKind.ADD_NODE:
            raise ValueError(f"faults[{number}]: {entry.fault} at step {entry.at_step} is there twice; remove one")
        seen.add((entry.at_step, entry.fault))


# --- reading and writing -------------------------------------------------------------------------------------


def load_job(path: Path, settings: Sequence[str] = ()) -> JobConfig:
    """Read a job file, put `settings` (`a.b=YAML value`) over it, and fill in what depends on where it lies.

    `run.dir` becomes absolute (relative to where the command is given), `data.path` and `data.cache_dir` too
    (relative to the job file), and `recipe_dir` the job file's folder. Raises ConfigError.
    """
    given = _read(path)
    for setting in settings:
        _put(given, setting)
    return _place(parse_job(given, str(path)), path.resolve().parent)


def stored_job(path: Path) -> JobConfig:
    """Read the `job.yaml` of a run directory, which has everything filled in. Raises ConfigError."""
    return parse_job(_read(path), str(path))


def parse_job(given: Mapping[str, Any], where: str) -> JobConfig:
    """Check the plain values of a job. Raises ConfigError `where: key: what is wrong; what to do`."""
    model = RecipeJob if given.get("recipe") is not None else BuiltInJob
    try:
        # By way of JSON: there, strict means what it should (no number out of text, but a path or a tuple).
        return model.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{where}: {one_line(error, model, NOTES)}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def dump_job(job: JobConfig) -> str:
    """The text of a `job.yaml` that `stored_job` reads back."""
    return dump(job.model_dump(mode="json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name a job file, such as examples/stdlib.yaml") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text; a job file is YAML in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    given = parse(text, str(path))
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values; see examples/stdlib.yaml")
    return given


def _put(given: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {setting!r}: write it as section.key=value, as in --set train.steps=100")
    value = parse(text, f"--set {key}")
    section = given
    for depth, part in enumerate(parts[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {key}: {'.'.join(parts[:depth])} is not a section; set it as a whole")
    section[parts[-1]] = value


def _place(job: JobConfig, folder: Path) -> JobConfig:
    data = {
        name: (folder / value.expanduser()).resolve()
        for name in ("path", "cache_dir")
        if (value := getattr(job.data, name)) is not None
    }
    recipe_dir = job.recipe_dir
    if job.recipe is not None:
        recipe_dir = (folder / (recipe_dir or ".")).resolve()
    run = job.run.model_copy(update={"dir": job.run_dir.expanduser().resolve()})
    return job.model_copy(update={"run": run, "data": job.data.model_copy(update=data), "recipe_dir": recipe_dir})


# --- resuming ------------------------------------------------------------------------------------------------


def refuse_changes(stored: JobConfig, wanted: JobConfig, where: Path) -> None:
    """Raises ConfigError that names the first key in which `wanted` is another job than the one begun at `where`."""
    if (change := first_change(stored, wanted, RESUME_MAY_CHANGE)) is not None:
        key, before, now = change
        raise ConfigError(
            f"{where}: {key}: was {before!r} when this run began and is {now!r} now; "
            f"--resume may change {', '.join(f'{name}.*' for name in MAY_CHANGE_SECTIONS)} and faults only: "
            "set it back, or begin a new run"
        )


def first_change(stored: JobConfig, wanted: JobConfig, apart_from: tuple[str, ...]) -> tuple[str, Any, Any] | None:
    """The first key in which two jobs differ, and both values. `apart_from`: prefixes of keys that may."""
    before, now = _flat(stored), _flat(wanted)
    for key in sorted(before.keys() | now.keys()):
        if key not in PLACES and not key.startswith(apart_from) and before.get(key) != now.get(key):
            return key, before.get(key), now.get(key)
    return None


def _flat(job: JobConfig) -> dict[str, Any]:
    out: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            out[prefix] = value

    walk("", job.model_dump(mode="json"))
    return out
