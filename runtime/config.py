"""The job file's sections that a worker reads: train, model, optimizer, schedule, checkpoint, links.

Values only, checked once and frozen. A message names the field and the cure; whoever loads the job file puts
the section's name in front. Batches are counted in samples, lengths in tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

# Bounded, as what is over 64 bits breaks the first message that carries it.
Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """One section of the job file: unknown keys are refused, nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TrainConfig(Section):
    """What a run computes. Everything here decides bits, so a resumed run can't change it."""

    steps: Count
    seed: Natural = 0
    global_batch: Count
    micro_batch: Count
    logical_ranks: Count
    shards: Count = Field(default=None, validate_default=True)  # absent: one per logical rank
    threads_per_worker: Count = 1
    numerics: Literal["native", "portable"] = "native"
    grad_clip: Annotated[float, Field(gt=0.0)] | None = 1.0  # of the global norm of the mean gradient
    # For benchmarks: a micro-batch takes at least this long, the rest is slept. Decides no bit.
    pad_micro_batch_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0

    @field_validator("shards", mode="before")
    @classmethod
    def _shards_default(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("logical_ranks", 1) if value is None else value

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        unit = self.micro_batch * self.logical_ranks
        if self.global_batch % unit:
            nearest = _multiples_around(self.global_batch, unit)
            raise ValueError(
                f"global_batch is {self.global_batch}, which is not a multiple of micro_batch x logical_ranks"
                f" = {self.micro_batch} x {self.logical_ranks} = {unit}; set it to {nearest}"
            )
        return self

    @property
    def micro_batches_per_rank(self) -> int:
        """k: how many micro-batches each logical rank runs in a step."""
        return self.global_batch // (self.micro_batch * self.logical_ranks)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has in all."""
        return self.global_batch // self.micro_batch

    def first_sample(self, step: int, micro_batch: int) -> int:
        """Global index of the first sample of a step's micro-batch (``rank * k + j``)."""
        return step * self.global_batch + micro_batch * self.micro_batch


class ModelConfig(Section):
    """The built-in decoder. ``vocab_size`` absent: the tokenizer's; ``max_seq_len`` absent: ``data.seq_len``."""

    vocab_size: Annotated[int, Field(ge=2, lt=2**63)] | None = None
    hidden_size: Count = 256
    layers: Count = 5
    heads: Count = 8
    kv_heads: Count = Field(default=None, validate_default=True)  # absent: as many as heads
    intermediate_size: Count = Field(default=None, validate_default=True)  # absent: 8/3 of hidden_size
    rope_theta: Annotated[float, Field(gt=1.0)] = 10000.0
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    tie_embeddings: bool = True
    max_seq_len: Count | None = None

    @field_validator("kv_heads", mode="before")
    @classmethod
    def _kv_heads_default(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("heads", 1) if value is None else value

    @field_validator("intermediate_size", mode="before")
    @classmethod
    def _intermediate_default(cls, value: Any, info: ValidationInfo) -> Any:
        return -(-info.data.get("hidden_size", 1) * 8 // 48) * 16 if value is None else value

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.heads:
            nearest = _multiples_around(self.hidden_size, self.heads)
            raise ValueError(
                f"hidden_size is {self.hidden_size}, which {self.heads} heads don't divide;"
                f" set it to {nearest}, or change heads"
            )
        if self.heads % self.kv_heads:
            divisors = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"kv_heads is {self.kv_heads}, which doesn't divide heads ({self.heads});"
                f" set it to one of {', '.join(divisors)}"
            )
        if self.head_size % 2:
            even = " or ".join(str(n) for n in _around(self.hidden_size, 2 * self.heads))
            raise ValueError(
                f"hidden_size / heads is {self.hidden_size} / {self.heads} = {self.head_size}, and rotary"
                f" positions need an even number; set hidden_size to {even}, or change heads"
            )
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads


class OptimizerConfig(Section):
    """AdamW of the built-in recipe. Weight decay acts on matrices only."""

    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1


class ScheduleConfig(Section):
    """How the learning rate moves; see runtime/schedule.py for the curves."""

    kind: Literal["warmup_cosine", "wsd", "constant", "cooldown"] = "warmup_cosine"
    warmup_steps: Natural = 0
    decay_steps: Count | None = None  # absent: the curve's own default
    final_ratio: Fraction = 0.1

    @model_validator(mode="after")
    def _cooldown_starts_high(self) -> ScheduleConfig:
        if self.kind == "cooldown" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, but a cooldown starts at the full rate;"
                " set it to 0, or choose kind: wsd"
            )
        return self


class CheckpointConfig(Section):
    """When a full checkpoint is written. There is always one at the end."""

    full_every: Natural = 0  # steps; 0: only at the end
    keep: Count = 2


class GuardConfig(Section):
    """What a bad step is, and what follows when the data give it. A loss or norm that isn't finite is always bad."""

    on_bad_data: Literal["skip", "stop"] = "skip"
    spike_window: Natural = 0  # committed steps that a spike is measured by; 0: none is looked for
    spike_factor: Annotated[float, Field(gt=0.0)] = 20.0  # usual distances from the median
    compare_every: Natural = 1  # steps between comparisons of what workers hold with what they should; 0: none


class LinksConfig(Section):
    """Links between workers."""

    # Without a sign of life from the peer's host a link is lost after so long. A busy or stopped process still has one,
    # but when its buffers are full perhaps no other than the kernel's keep-alive, once a second.
    silence_seconds: Annotated[float, Field(ge=1.2, le=60.0)] = 1.5


def _around(value: int, unit: int) -> list[int]:
    low = value // unit * unit
    return [n for n in (low, low + unit) if n > 0]


def _multiples_around(value: int, unit: int) -> str:
    return f"{' or '.join(str(n) for n in _around(value, unit))} (a multiple of {unit})"
