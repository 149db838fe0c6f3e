"""What keeps bits equal: the settings of a worker process, the class of machine it is, and a probe of both.

    environment       what a worker's environment must hold before torch is imported; ignored if set later
    pin               the settings made in code, on the thread that computes
    numerics_class    what decides bits on this machine, each under a name; workers of a job must agree in all
    probe             the gradient digest of one real micro-batch on weights that any host makes alike

"portable" jobs give up speed so that machines of more kinds fall into one class.
"""

from __future__ import annotations

import math
import os
import platform
import re
import struct
from pathlib import Path

import numpy as np
import torch
import torch.utils.deterministic
import xxhash

from dataloader.errors import InternalError
from runtime.compute import MicroBatches
from runtime.config import TrainConfig
from runtime.model.decoder import ATTENTION_ON_CPU
from runtime.operations import operation_digests
from runtime.shards.layout import FlatLayout, Slot, views

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
BUILT_IN_OPTIMIZER = "torch.optim.adamw.AdamW fused=True"
_GIB = 2**30
_STEP = 2654435761  # odd, near 2**32 divided by the golden ratio: multiples of it spread evenly
_SIXTEEN_BITS = 65536


def environment(train: TrainConfig) -> dict[str, str]:
    """What to put into a worker's environment before it starts."""
    threads = str(train.threads_per_worker)
    values = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning costs tenfold as soon as one core is busy otherwise
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",  # a recipe may go through a set of names
        # Big buffers stay with the process: else each micro-batch gives them back and faults them in again.
        "MALLOC_MMAP_THRESHOLD_": str(_GIB),
        "MALLOC_TRIM_THRESHOLD_": str(8 * _GIB),
        # Huge pages where the kernel gives them to who asks: a killed worker's sockets close only after its memory is
        # torn down, in half the time then; and computing is a few percent faster.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    if train.numerics == "portable":
        values |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
    return values


def pin(train: TrainConfig) -> None:
    """Make the settings that code can make. Call it on the thread that computes, before any operation."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # its generators can't be set before
    torch.set_num_threads(train.threads_per_worker)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def numerics_class(train: TrainConfig, optimizer: str = BUILT_IN_OPTIMIZER) -> dict[str, str]:
    """Everything that decides bits here, by name; call after ``pin``. ``optimizer``: its name and kernel variant."""
    threads = torch.get_num_threads()
    if threads != train.threads_per_worker:
        raise InternalError(f"torch computes with {threads} threads, not {train.threads_per_worker}: not pinned")
    facts = {
        "numerics": train.numerics,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "libc": _libc(),
        "machine": platform.machine(),
        "threads per worker": str(threads),
        "compile mode": "eager",
        "attention": ATTENTION_ON_CPU.name.lower(),
        "optimizer": optimizer,
        **_cuda_facts(),
    }
    return facts | {f"operation: {name}": digest for name, digest in operation_digests().items()}


def probe(micro_batches: MicroBatches, layout: FlatLayout) -> str:
    """The digest (32 hex digits) of loss and gradient of one micro-batch of full shape, on weights made for it.

    Workers with equal data, recipe and layout get the same one if, and as good as only if, they compute alike.
    The model's parameters are afterwards as before.
    """
    shape = (micro_batches.train.micro_batch, -1)
    sample = micro_batches.stream.tokens(0, micro_batches.train.micro_batch)
    vocabulary = int(sample.max()) + 1  # ids that any model for this data must know
    tokens = (np.arange(sample.size, dtype=np.int64) * _STEP % 2**32 * vocabulary >> 32).reshape(shape)
    before = micro_batches.parameters()
    gradient = torch.empty(layout.total)
    micro_batches.install(probe_weights(layout))
    try:
        loss = micro_batches.gradient_of(tokens, gradient)
    finally:
        micro_batches.install(before)
    digest = xxhash.xxh3_128(gradient.numpy().data)
    digest.update(struct.pack("<d", loss))
    return digest.hexdigest()


def probe_weights(layout: FlatLayout) -> torch.Tensor:
    """Parameters, fp32 [layout.total], by exact integer arithmetic: the same on any host.

    Matrices spread evenly around 0, by a power of two near 1/sqrt(columns); vectors around 1, by 1/16.
    """
    flat = torch.zeros(layout.total)
    for slot, view in zip(layout.slots, views(flat, layout).values(), strict=True):
        places = torch.arange(slot.start, slot.start + slot.numel, dtype=torch.int64)
        bits = (places % 2**30 * _STEP >> 12) % _SIXTEEN_BITS - _SIXTEEN_BITS // 2
        view.copy_((bits.to(torch.float32) * _spread(slot) + _centre(slot)).view(slot.shape))
    return flat


def _centre(slot: Slot) -> float:
    return 1.0 if len(slot.shape) < 2 else 0.0


def _spread(slot: Slot) -> float:
    if len(slot.shape) < 2:
        return 2.0**-19
    columns = max(1, slot.numel // max(1, slot.shape[0]))
    return math.ldexp(1.0, -15 - columns.bit_length() // 2)


def _cuda_facts() -> dict[str, str]:
    """Empty where there is no CUDA. A recipe may compute there."""
    if not torch.cuda.is_available():
        return {}
    return {
        "GPU": ", ".join(sorted({torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())})),
        "GPU driver": _driver(),
        "CUDA": torch.version.cuda or "unknown",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),  # type: ignore[no-untyped-call]
    }


def _driver() -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)*)\s", DRIVER_VERSION.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (AttributeError, ValueError, OSError):  # another C library
        return " ".join(platform.libc_ver()).strip() or platform.platform()
