"""safetensors: our bytes are what the library would write, and the library reads them."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from dataloader.errors import DataError
from runtime.checkpoint.format import decode, decode_state, encode, encode_state
from runtime.checkpoint.weights import write_weights
from runtime.shards.layout import flat_layout
from runtime.shards.state import DTYPES, HoldingState, PieceState

TENSORS = {
    **{f"t.{name}": torch.ones(3, 5).to(dtype) for name, dtype in DTYPES.items()},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "transposed é": torch.arange(6.0).view(2, 3).t(),
}


def joined(chunks):
    return b"".join(chunks)


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"x": 'a "quoted" é\n'}])
def test_the_bytes_are_the_librarys(metadata):
    theirs = safetensors.torch.save({k: v.contiguous() for k, v in TENSORS.items()}, metadata or None)
    assert joined(encode(TENSORS, metadata)) == theirs
    tensors, found = decode(theirs, "x")
    assert found == metadata
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[k], v) and tensors[k].dtype == v.dtype for k, v in TENSORS.items())


def test_tensors_go_out_without_a_copy():
    tensor = torch.zeros(1000)
    *_, data = encode({"x": tensor}, {})
    tensor[0] = 1.0
    assert bytes(data[:4]) == b"\x00\x00\x80\x3f"


def test_a_state_keeps_all_its_parts():
    state = HoldingState(
        9,
        torch.arange(48.0),
        (
            PieceState({"step": torch.tensor(3.0), "a.b": torch.ones(2, dtype=torch.bfloat16)}, {"n": 1}, {"calls": 2}),
            PieceState(),
        ),
    )
    shard, back = decode_state(joined(encode_state(5, state)), "x")
    assert (shard, back.version, back.digest()) == (5, 9, state.digest())
    assert back.pieces[0].plain == {"n": 1}
    assert back.pieces[1] == PieceState()
    assert joined(encode_state(5, back)) == joined(encode_state(5, state))


@pytest.mark.parametrize(
    "data", [b"", b"\x08" + b"\0" * 7 + b"not json", b"\xff" * 64, joined(encode(TENSORS, {}))[:-1]]
)
def test_what_is_no_safetensors_file_is_refused(data):
    with pytest.raises(DataError, match="some/file: not a safetensors file"):
        decode(data, "some/file")


@pytest.mark.parametrize("metadata", [{}, {"everstep": "[]"}, {"everstep": '{"shard": 0, "version": 1, "pieces": []}'}])
def test_another_safetensors_file_is_no_shard(metadata):
    with pytest.raises(DataError, match="some/file: not a shard"):
        decode_state(joined(encode({"parameters": torch.zeros(16), "w": torch.zeros(1)}, metadata)), "some/file")


def test_weights_have_the_models_names_and_always_the_same_bytes(tmp_path):
    layout = flat_layout([[("model.w", (3, 7))], [("model.norm", (5,))]], 2)
    flat = torch.arange(float(layout.total))
    write_weights(tmp_path / "weights" / "model.safetensors", flat, layout)
    loaded = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    assert loaded.keys() == {"model.w", "model.norm"}
    assert torch.equal(loaded["model.w"], torch.arange(21.0).view(3, 7))
    assert torch.equal(loaded["model.norm"], torch.arange(32.0, 37.0))
    flat[21:32] = -1.0  # padding is no part of the model
    write_weights(tmp_path / "again", flat, flat_layout([[("model.w", (3, 7))], [("model.norm", (5,))]], 1))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "weights" / "model.safetensors").read_bytes()
    with safetensors.safe_open(tmp_path / "again", "pt") as file:
        assert file.metadata() == {"format": "pt"}
