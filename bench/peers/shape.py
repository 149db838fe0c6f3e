"""How large the workload is. Standard library only."""

from __future__ import annotations

WORKERS = 4
MICRO_BATCH = 2  # samples
MICRO_BATCHES_PER_WORKER = 2  # in a step
WORKER_BATCH = MICRO_BATCH * MICRO_BATCHES_PER_WORKER
GLOBAL_BATCH = WORKERS * WORKER_BATCH
MICRO_BATCH_SECONDS = 0.2
SEQ_LEN = 32
VOCABULARY = 257  # bytes, and an end-of-text token that doesn't occur in a sample
SAMPLES = 2**16  # more than any run uses
LEARNING_RATE = 1e-3
SEED = 1
WARM_STEPS = 10  # before the clock starts
