"""The `data` section of a job file: which tokens, in windows of what length.

Rules of this room (dataloader/): numpy, pydantic and `tokenizers`; no torch, no pickle, no clock, no random call.
Which sample comes when is arithmetic on integers, so nothing here has a state that must be saved or moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# 256 bytes and the end-of-text token: the smallest vocabulary in which every text can be written.
SMALLEST_VOCAB_SIZE = 257


class DataConfig(BaseModel):
    """Exactly one of `source` and `path` says where the tokens come from.

    source         a corpus that Everstep builds and caches itself; a given `path` switches the default off
    path           a directory that was prepared before, that is, one with a `dataset.json`
    seq_len        tokens that a sample predicts; a sample is `seq_len + 1` tokens
    vocab_size     size of the BPE vocabulary that is trained for `source`; a prepared `path` brings its own
    cache_dir      where `source` is built; None: $XDG_CACHE_HOME/everstep, or else ~/.cache/everstep
    shuffle_seed   seed of the sample order; None: the job's `train.seed`
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["stdlib"] | None = "stdlib"
    path: Path | None = None
    seq_len: int = Field(ge=1, lt=2**63)
    vocab_size: int = Field(default=4096, ge=SMALLEST_VOCAB_SIZE, le=2**20)
    cache_dir: Path | None = None
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def _path_replaces_the_default_source(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("path") is not None and "source" not in given:
            return {**given, "source": None}
        return given

    @model_validator(mode="after")
    def _exactly_one_place(self) -> DataConfig:
        if self.source is not None and self.path is not None:
            raise ValueError("data.source and data.path are both given; keep one of them")
        if self.source is None and self.path is None:
            raise ValueError("neither data.source nor data.path is given; set data.source: stdlib")
        return self
