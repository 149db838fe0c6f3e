"""The decoder against a plain restatement of Llama's arithmetic, and its tensors' names and shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config import ModelConfig
from runtime.model.causal_lm import CausalLM
from runtime.model.decoder import Decoder, Dropout, initialise

JOB: dict[str, Any] = {
    "train": {"seed": 5},
    "data": {"seq_len": 24},
    "model": {
        "vocab_size": 61,
        "hidden_size": 48,
        "layers": 2,
        "heads": 6,
        "kv_heads": 3,
        "intermediate_size": 80,
        "tie_embeddings": False,
    },
    "optimizer": {},
}


def job(**model: Any) -> dict[str, Any]:
    return {**JOB, "model": {**JOB["model"], **model}}


def decoder(**model: Any) -> Decoder:
    built = CausalLM(job(**model)).build_model()
    assert isinstance(built, Decoder)
    return built


def plain_llama(weights: dict[str, Tensor], config: ModelConfig, tokens: Tensor) -> Tensor:
    """Logits [seq_len, vocab] of one sequence, in float64, head by head."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    size, group = config.head_size, config.heads // config.kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[name]

    def turn(x: Tensor) -> Tensor:  # [seq_len, head_size]
        out = torch.empty_like(x)
        for i in range(size // 2):
            angle = torch.arange(len(x), dtype=torch.float64) * config.rope_theta ** (-2 * i / size)
            a, b = x[:, i], x[:, i + size // 2]
            out[:, i] = a * angle.cos() - b * angle.sin()
            out[:, i + size // 2] = b * angle.cos() + a * angle.sin()
        return out

    x = w["model.embed_tokens.weight"][tokens]
    for n in range(config.layers):
        at = f"model.layers.{n}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (h @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for head in range(config.heads):
            own, shared = (slice(i * size, (i + 1) * size) for i in (head, head // group))
            scores = turn(q[:, own]) @ turn(k[:, shared]).T / math.sqrt(size)
            scores += torch.full_like(scores, -math.inf).triu(1)
            heads.append(scores.softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_plain_llama(tied: bool) -> None:
    model = decoder(tie_embeddings=tied, rope_theta=100.0)
    config = CausalLM(job(tie_embeddings=tied, rope_theta=100.0)).config
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that attention isn't flat and norms count
    tokens = torch.arange(2 * 20).view(2, 20) * 7 % 61
    got = model(tokens).view(2, 20, 61)
    for row in range(2):
        want = plain_llama(model.state_dict(), config, tokens[row])
        torch.testing.assert_close(got[row].double(), want, rtol=1e-4, atol=1e-4)


def test_tensors_have_the_names_and_shapes_of_hugging_face_llama() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder(layers=1).state_dict().items()}
    at = "model.layers.0."
    assert shapes == {
        "model.embed_tokens.weight": (61, 48),
        at + "self_attn.q_proj.weight": (48, 48),
        at + "self_attn.k_proj.weight": (24, 48),
        at + "self_attn.v_proj.weight": (24, 48),
        at + "self_attn.o_proj.weight": (48, 48),
        at + "mlp.gate_proj.weight": (80, 48),
        at + "mlp.up_proj.weight": (80, 48),
        at + "mlp.down_proj.weight": (48, 80),
        at + "input_layernorm.weight": (48,),
        at + "post_attention_layernorm.weight": (48,),
        "model.norm.weight": (48,),
        "lm_head.weight": (61, 48),
    }
    assert "lm_head.weight" not in decoder(tie_embeddings=True).state_dict()


def test_loss_is_the_summed_cross_entropy_of_the_next_tokens() -> None:
    recipe = CausalLM(JOB)
    model = recipe.build_model()
    tokens = torch.arange(2 * 25).view(2, 25) * 11 % 61
    loss, counted = recipe.loss(model, {"tokens": tokens})
    logits = model(tokens[:, :-1]).view(2, 24, 61).log_softmax(-1)
    want = -torch.stack([logits[row, t, tokens[row, t + 1]] for row in range(2) for t in range(24)]).sum()
    assert counted == 48
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = decoder()
    torch.manual_seed(2)
    again, other = decoder(), CausalLM({**JOB, "train": {"seed": 6}}).build_model()
    state, same, different = (m.state_dict() for m in (first, again, other))
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not torch.equal(state["lm_head.weight"], different["lm_head.weight"])


def test_initial_weights_have_their_spread() -> None:
    model = decoder(hidden_size=192, layers=8)
    initialise(model, 3)
    layer = model.model.layers[0]
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.03)  # type: ignore[union-attr]
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.005, rel=0.03)  # type: ignore[union-attr]
    assert bool((layer.input_layernorm.weight == 1).all())  # type: ignore[union-attr]


def test_only_matrices_decay() -> None:
    recipe = CausalLM(JOB)
    decayed, plain = recipe.param_groups(recipe.build_model())
    assert decayed["weight_decay"] > 0 == plain["weight_decay"]
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}


class TestDropout:
    def test_drops_at_its_rate_and_keeps_the_mean(self) -> None:
        torch.manual_seed(0)
        out = Dropout(0.25)(torch.ones(400_000))
        assert float((out == 0).float().mean()) == pytest.approx(0.25, abs=0.003)
        assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])

    def test_lanes_are_independent(self) -> None:
        torch.manual_seed(0)
        kept = (Dropout(0.5)(torch.ones(100_000, 4)) != 0).double()
        assert float((torch.corrcoef(kept.T) - torch.eye(4)).abs().max()) < 0.015

    def test_draws_from_the_default_generator_only(self) -> None:
        x, layer = torch.ones(1001), Dropout(0.5)
        torch.default_generator.manual_seed(9)
        first = layer(x)
        assert not torch.equal(first, layer(x))
        torch.default_generator.manual_seed(9)
        assert torch.equal(first, layer(x))

    @pytest.mark.parametrize("rate", [0.999999, 1 - 2**-53])
    def test_keeps_something_at_any_rate_below_one(self, rate: float) -> None:
        torch.manual_seed(0)
        out = Dropout(rate)(torch.ones(400_000))
        assert out.unique().tolist() == [0.0, 65536.0]

    def test_does_nothing_in_evaluation_or_at_rate_zero(self) -> None:
        x = torch.randn(7, 3)
        state = torch.get_rng_state()
        assert Dropout(0.0)(x) is x
        assert Dropout(0.5).eval()(x) is x
        assert torch.equal(state, torch.get_rng_state())
