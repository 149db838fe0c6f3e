"""The worker's sections: defaults, derived numbers, and messages that name the field and the cure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from runtime.comm.frames import pack_plain, unpack_plain
from runtime.config import CheckpointConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig

TRAIN = {"steps": 3, "global_batch": 32, "micro_batch": 2, "logical_ranks": 8}


def test_shards_are_as_many_as_logical_ranks_unless_given() -> None:
    assert TrainConfig(**TRAIN).shards == 8
    assert TrainConfig(**TRAIN, shards=None).shards == 8  # type: ignore[arg-type]
    assert TrainConfig(**TRAIN, shards=3).shards == 3


def test_micro_batches_tile_the_global_batch_in_order() -> None:
    train = TrainConfig(**TRAIN)
    assert (train.micro_batches_per_rank, train.micro_batches) == (2, 16)
    firsts = [train.first_sample(5, m) for m in range(train.micro_batches)]
    assert firsts == list(range(5 * 32, 6 * 32, 2))


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    message = _refusal(TrainConfig, **{**TRAIN, "global_batch": 40})
    assert "global_batch is 40" in message
    assert "micro_batch x logical_ranks = 2 x 8 = 16" in message
    assert "set it to 32 or 48" in message
    assert "set it to 16 (a multiple of 16)" in _refusal(TrainConfig, **{**TRAIN, "global_batch": 4})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 250, "heads": 8}, ["hidden_size is 250", "8 heads don't divide", "set it to 248 or 256"]),
        ({"hidden_size": 240, "heads": 6, "kv_heads": 4}, ["kv_heads is 4", "heads (6)", "one of 1, 2, 3, 6"]),
        ({"hidden_size": 24, "heads": 8}, ["24 / 8 = 3", "even", "set hidden_size to 16 or 32"]),
        ({"dropout": 1.0}, ["dropout", "less than 1"]),
        ({"hiden_size": 64}, ["hiden_size", "Extra inputs"]),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(values: dict[str, Any], words: list[str]) -> None:
    message = _refusal(ModelConfig, **values)
    assert all(word in message for word in words), message


def test_model_defaults_follow_from_what_is_given() -> None:
    model = ModelConfig(hidden_size=256, heads=8)
    assert (model.kv_heads, model.intermediate_size, model.head_size) == (8, 688, 32)
    assert ModelConfig(heads=4, kv_heads=2).kv_heads == 2


def test_sections_are_frozen_and_finite() -> None:
    with pytest.raises(ValidationError):
        ModelConfig().layers = 3  # type: ignore[misc]
    assert "finite" in _refusal(OptimizerConfig, lr=float("nan"))
    assert "greater than 0" in _refusal(OptimizerConfig, lr=0.0)
    assert "keep" in _refusal(CheckpointConfig, keep=0)


@pytest.mark.parametrize(
    ("section", "values"),
    [(TrainConfig, {**TRAIN, field: 2**70}) for field in ("seed", "steps", "shards", "threads_per_worker")]
    + [(TrainConfig, {**TRAIN, "global_batch": 2**70, "micro_batch": 2**67})]
    + [(ModelConfig, {field: 2**70}) for field in ("vocab_size", "layers", "intermediate_size", "max_seq_len")]
    + [(ScheduleConfig, {"warmup_steps": 2**70}), (ScheduleConfig, {"decay_steps": 2**70})]
    + [(CheckpointConfig, {"full_every": 2**63}), (CheckpointConfig, {"keep": 2**63})],
)
def test_numbers_fit_the_messages_that_carry_them(section: Any, values: dict[str, Any]) -> None:
    message = _refusal(section, **values)
    assert next(field for field, value in values.items() if value >= 2**63) in message
    assert "less than 9223372036854775808" in message


def test_the_largest_seed_fits_a_message() -> None:
    seed = TrainConfig(**TRAIN, seed=2**63 - 1).seed  # type: ignore[arg-type]
    assert unpack_plain(pack_plain({"seed": seed})) == {"seed": seed}


def test_a_cooldown_has_no_warm_up() -> None:
    assert "set it to 0, or choose kind: wsd" in _refusal(ScheduleConfig, kind="cooldown", warmup_steps=3)


def _refusal(section: Any, **values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(**values)
    return str(caught.value)
