"""The built-in decoder: RoPE, RMSNorm, SwiGLU, grouped-query attention; tensor names and layout of HF Llama.

Activations are [batch * seq_len, hidden] throughout; only attention looks at the sequence. Random numbers come
from torch's default generator alone, which the runtime sets before each micro-batch. The attention kernel is
fixed per device, since kernels differ in their last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dataloader.errors import InternalError
from runtime.config import ModelConfig
from runtime.model.rope import rope_tables, rotate

INITIAL_STD = 0.02
# On CPUs the flash kernel is the faster one, and has no atomics. On CUDA it refuses fp32.
ATTENTION_ON_CPU = SDPBackend.FLASH_ATTENTION
ATTENTION_ELSEWHERE = SDPBackend.MATH


class Dropout(nn.Module):
    """Dropout by 16-bit integer draws: a fifth of the time of torch's, and the same mask on every host.

    The rate is rounded to a multiple of 2**-16 below 1, and what is kept is scaled by the rounded rate.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropped = min(round(rate * 65536), 65535)  # of 65536 values

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped == 0:
            return x
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        lanes = words.view(torch.int16)[: x.numel()].view(x.shape)
        mask = (lanes >= self.dropped - 32768).to(x.dtype)
        return x * mask.mul_(65536 / (65536 - self.dropped))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        hidden, kv_size = config.hidden_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, batch: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [batch * seq_len, hidden] -> the same; every position sees itself and those before it."""
        q = rotate(self._heads(self.q_proj(x), batch, self.heads), *rope)
        k = rotate(self._heads(self.k_proj(x), batch, self.kv_heads), *rope)
        v = self._heads(self.v_proj(x), batch, self.kv_heads)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(x.shape))
        return out

    def _heads(self, x: Tensor, batch: int, heads: int) -> Tensor:
        return x.view(batch, -1, heads, self.head_size)


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, batch: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), batch, rope))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Trunk(nn.Module):
    """Everything but the output projection; named ``model`` in the tensor names."""

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.dropout = Dropout(config.dropout)
        cosines, sines = rope_tables(config.head_size, max_seq_len, config.rope_theta)
        self.register_buffer("rope_cosines", cosines, persistent=False)
        self.register_buffer("rope_sines", sines, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq_len] -> hidden states [batch * seq_len, hidden]."""
        batch, seq_len = tokens.shape
        rope = self.get_buffer("rope_cosines")[:seq_len], self.get_buffer("rope_sines")[:seq_len]
        if len(rope[0]) < seq_len:
            raise InternalError(f"{seq_len} tokens went to a model that was built for {len(rope[0])}")
        x = self.dropout(self.embed_tokens(tokens.reshape(-1)))
        for layer in self.layers:
            x = layer(x, batch, rope)
        normed: Tensor = self.norm(x)
        return normed


class Decoder(nn.Module):
    """A causal language model. ``lm_head.weight`` exists only where embeddings aren't tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None or config.max_seq_len is None:
            raise InternalError("the decoder needs vocab_size and max_seq_len filled in")
        self.model = Trunk(config, config.vocab_size, config.max_seq_len)
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq_len], int64 -> logits [batch * seq_len, vocab], fp32."""
        kernel = ATTENTION_ON_CPU if tokens.device.type == "cpu" else ATTENTION_ELSEWHERE
        with sdpa_kernel(kernel):
            x = self.model(tokens)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(x, head.weight)


def initialise(model: Decoder, seed: int) -> None:
    """Fresh weights from one seed: normal with std 0.02, what writes to the residual less by sqrt(2 * layers)."""
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * len(model.model.layers)) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)  # the norms
            else:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, INITIAL_STD * (shrink if last else 1.0), generator=generator)
