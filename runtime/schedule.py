"""The learning rate as a pure function of the step: the same bits on every worker and after every change.

Only integer division, products, square roots and a decimal cosine, which round alike on every host.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

from runtime.config import ScheduleConfig
from runtime.exact import DIGITS, PI, cosine_and_sine


def lr_ratio(config: ScheduleConfig, step: int, steps: int) -> float:
    """What to multiply every group's own rate with.

    ``step`` counts from 0 and is the step about to be applied; ``steps`` is the job's number of steps.

    =============  ================================================================  =======================
    kind           curve                                                             decay_steps, if absent
    =============  ================================================================  =======================
    constant       warm-up, then 1                                                   (unused)
    warmup_cosine  warm-up, then half a cosine to final_ratio, which then stays      all after the warm-up
    wsd            warm-up, then 1, then a line to final_ratio over the last steps   a tenth of all steps
    cooldown       from 1 to final_ratio as 1 - sqrt(x), over the last steps         all steps
    =============  ================================================================  =======================

    Warm-up goes in equal parts from 1/warmup_steps to 1, and where it overlaps a decay the lower of both counts.
    """
    return min(_warmup(config, step), _decay(config, step, steps))


def _warmup(config: ScheduleConfig, step: int) -> float:
    return 1.0 if step >= config.warmup_steps else (step + 1) / config.warmup_steps


def _decay(config: ScheduleConfig, step: int, steps: int) -> float:
    if config.kind == "constant":
        return 1.0
    if config.kind == "warmup_cosine":
        length = config.decay_steps or max(1, steps - config.warmup_steps)
        kept = _half_cosine(min(max(0, step - config.warmup_steps), length), length)
    else:
        default = max(1, steps // 10) if config.kind == "wsd" else steps
        length = config.decay_steps or default
        done = min(max(0, step - (steps - length)), length) / length
        kept = 1.0 - (done if config.kind == "wsd" else math.sqrt(done))
    return config.final_ratio + (1.0 - config.final_ratio) * kept


def _half_cosine(done: int, length: int) -> float:
    with localcontext() as context:
        context.prec = DIGITS
        cosine = cosine_and_sine(PI * Decimal(done) / Decimal(length))[0]
        return float(max(Decimal(0), (1 + cosine) / 2))  # the last digit may lie below -1
