"""One shard's whole state as a value: parameters, and per piece what the optimizer keeps.

    digest    xxh3_128 over the parameters' bytes, then per piece over its state tensors in sorted key order (0-dim
              ones too); what isn't a tensor follows as JSON, and is left out where there is none
    packed    (plain meta, payload): the same tensors in the same order, back to back, for links and snapshots

Works for any elementwise torch optimizer, also before its first step, when it keeps nothing yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from dataloader.errors import PeerError

Bytes = NDArray[np.uint8]

# All that a link or a checkpoint can hold, with its name in safetensors. In the order in which tensors lie in a file:
# wide ones first, so that all are aligned.
STORABLE: dict[torch.dtype, str] = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# by name, so that no other attribute of torch can be asked for by what a peer or a file says
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in STORABLE}


@dataclass(frozen=True, slots=True)
class PieceState:
    """What the optimizer keeps for one piece, by its own names."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)  # numbers and strings in its state
    options: Mapping[str, Any] = field(default_factory=dict)  # group options that it has changed by itself

    def in_order(self) -> list[tuple[str, torch.Tensor]]:
        return sorted(self.tensors.items())


@dataclass(frozen=True, slots=True)
class HoldingState:
    """A shard at one version. ``parameters``: fp32 [shard's elements]; tensors may be views of live ones."""

    version: int
    parameters: torch.Tensor
    pieces: tuple[PieceState, ...]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.parameters
        for piece in self.pieces:
            for _, tensor in piece.in_order():
                yield tensor

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def digest(self) -> bytes:
        """16 bytes; see the head of this file."""
        hasher = xxhash.xxh3_128(raw(self.parameters).data)
        for piece in self.pieces:
            for _, tensor in piece.in_order():
                hasher.update(raw(tensor).data)
            if piece.plain or piece.options:
                hasher.update(json.dumps([piece.plain, piece.options], sort_keys=True).encode())
        return hasher.digest()

    def pack(self) -> tuple[Any, memoryview]:
        """A copy: plain meta and one contiguous buffer. Later changes of the live tensors don't reach it."""
        payload = np.empty(self.nbytes(), np.uint8)
        at = 0
        for tensor in self.tensors():
            source = raw(tensor)
            payload[at : at + source.size] = source
            at += source.size
        pieces = [
            [[[key, _dtype_name(t), list(t.shape)] for key, t in p.in_order()], dict(p.plain), dict(p.options)]
            for p in self.pieces
        ]
        return [self.version, self.parameters.numel(), pieces], payload.data


def unpack(meta: Any, payload: Any) -> HoldingState:
    """The inverse of ``pack``, into tensors of its own. PeerError if meta and payload don't fit."""
    try:
        version, elements, pieces = meta
        source = _Source(np.frombuffer(payload, np.uint8))
        parameters = source.take("float32", [elements])
        states = tuple(
            PieceState({key: source.take(dtype, shape) for key, dtype, shape in tensors}, plain, options)
            for tensors, plain, options in pieces
        )
    except (ValueError, TypeError, KeyError) as error:
        raise PeerError(f"a shard's snapshot is malformed: {error}") from error
    if source.left:
        raise PeerError(f"a shard's snapshot has {source.left} bytes too many")
    return HoldingState(version, parameters, states)


def raw(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes, uint8 [numel * element size]; no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class _Source:
    """Takes tensors off a buffer, one after another."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    @property
    def left(self) -> int:
        return self.data.size

    def take(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        wanted = DTYPES[dtype].itemsize
        for extent in shape:
            wanted *= extent
        if not 0 <= wanted <= self.data.size:  # before anything is allocated on a peer's word
            raise ValueError(f"{wanted} bytes wanted, {self.data.size} left")
        tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype])
        raw(tensor)[:] = self.data[:wanted]
        self.data = self.data[wanted:]
        return tensor


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
