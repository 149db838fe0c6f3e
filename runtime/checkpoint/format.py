"""safetensors, and how a shard's state lies in it. Nothing here is ever unpickled.

Encoding is our own few lines: tensors go out as they lie in memory, without a copy, and the same bits always give
the same bytes (as the library's own would, with one metadata entry at most). Decoding is the library's.

A shard's file: ``parameters`` and ``state.<piece>.<name>``; what isn't a tensor is JSON in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from dataloader.errors import DataError
from runtime.shards.state import STORABLE, HoldingState, PieceState, raw

_METADATA = "__metadata__"
_PLACES = {dtype: place for place, dtype in enumerate(STORABLE)}


def encode(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """The file as buffers, in order; those of contiguous tensors are views of their memory."""
    ordered = sorted(tensors.items(), key=lambda item: (_PLACES[item[1].dtype], item[0]))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    data: list[memoryview] = []
    at = 0
    for name, tensor in ordered:
        buffer = raw(tensor).data
        offsets = [at, at + buffer.nbytes]
        header[name] = {"dtype": STORABLE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data.append(buffer)
        at += buffer.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *data]


def decode(data: bytes, where: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata). DataError, naming `where`, if it is no such file."""
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{where}: not a safetensors file: {error}") from error
    return tensors, dict(header.get(_METADATA, {}))


def encode_state(shard: int, state: HoldingState) -> list[memoryview]:
    tensors = {"parameters": state.parameters}
    for number, piece in enumerate(state.pieces):
        tensors |= {f"state.{number}.{key}": tensor for key, tensor in piece.tensors.items()}
    rest = [[dict(piece.plain), dict(piece.options)] for piece in state.pieces]
    facts = {"shard": shard, "version": state.version, "pieces": rest}
    return encode(tensors, {"everstep": json.dumps(facts, sort_keys=True)})


def decode_state(data: bytes, where: str) -> tuple[int, HoldingState]:
    """(shard, state). DataError if the file is of another kind."""
    tensors, metadata = decode(data, where)
    try:
        facts = json.loads(metadata["everstep"])
        parameters = tensors.pop("parameters")
        kept: list[dict[str, torch.Tensor]] = [{} for _ in facts["pieces"]]
        for name, tensor in tensors.items():
            _, number, key = name.split(".", 2)
            kept[int(number)][key] = tensor
        rest = zip(kept, facts["pieces"], strict=True)
        pieces = tuple(PieceState(own, plain, options) for own, (plain, options) in rest)
        return int(facts["shard"]), HoldingState(int(facts["version"]), parameters, pieces)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise DataError(f"{where}: not a shard of a checkpoint ({error!r})") from error
