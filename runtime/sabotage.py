"""Injected faults of the arithmetic: a bit of a gradient or of the model's parameters, a poisoned micro-batch.

    poison               the gradient of the first micro-batch of a step, whoever computes it and however often: the
                         data's doing, so a poisoned step of the job file is known to each worker from its start
    corrupt, gradient    the top exponent bit of an element of the next logical rank's gradient, once: it gets huge
    corrupt, parameter   the lowest mantissa bit of one of the model's own copy of the parameters, once

Armed on the control thread, done on the compute thread; each is one assignment, so they need no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

SPIKE = 1.0e4  # times as large
_TOP_EXPONENT_BIT, _LOWEST_MANTISSA_BIT = np.int32(1 << 30), np.int32(1)


class Sabotage:
    def __init__(self, poisoned: Iterable[tuple[int, str]] = ()) -> None:
        self._poisoned = dict(poisoned)  # step -> nan | spike
        self._gradient = self._parameter = False

    def arm(self, fault: Mapping[str, Any]) -> None:
        """`fault`: the fields of elastic/faults.py; of a poison also the `step`."""
        if fault["kind"] == "poison":
            self._poisoned = {**self._poisoned, fault["step"]: fault["what"]}
        elif fault["what"] == "gradient":
            self._gradient = True
        else:
            self._parameter = True

    # --- on the compute thread ----------------------------------------------------------------------------------

    def micro_batch_done(self, step: int, micro_batch: int, gradient: torch.Tensor) -> None:
        """`gradient` holds that of the rank's micro-batches so far."""
        if micro_batch == 0 and (what := self._poisoned.get(step)) is not None:
            if what == "nan":
                gradient[0] = torch.nan
            else:
                gradient.mul_(SPIKE)

    def rank_done(self, gradient: torch.Tensor) -> None:
        if self._gradient:
            self._gradient = False
            size = gradient.abs()
            size[size >= 2.0] = 0.0  # these the flip would make small, which nothing shows
            _flip(gradient, int(size.argmax()), _TOP_EXPONENT_BIT)

    def installed(self, flat: torch.Tensor) -> None:
        """The model has the parameters of the version that it is about to compute with."""
        if self._parameter:
            self._parameter = False
            _flip(flat, int(flat.abs().argmax()), _LOWEST_MANTISSA_BIT)


def poisoned_steps(faults: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """(step, what) of the job file's `faults` in plain form."""
    found = []
    for entry in faults:
        kind, _, what = entry["fault"].partition(",what=")
        if kind == "poison":
            found.append((entry["at_step"], what))
    return found


def _flip(flat: torch.Tensor, place: int, bit: np.int32) -> None:
    flat.numpy().view(np.int32)[place] ^= bit
