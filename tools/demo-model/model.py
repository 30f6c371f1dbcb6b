"""The network: a small Llama in plain PyTorch, with the tensor names of `LlamaForCausalLM`.

It knows the arithmetic only. What it is trained on is `corpus.py`'s business, how it is
written to disk is `gguf_io.py`'s.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """Shape of the demo model. Every row length is a multiple of 32, the block of Q8_0."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    context: int = 1024
    rope_base: float = 10000.0
    norm_eps: float = 1e-5


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


def rotate(x, cos, sin):
    """RoPE in the half-split order of Hugging Face: `x` is [batch, heads, tokens, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def forward(self, x, cos, sin, mask):
        batch, tokens, _ = x.shape
        c = self.c
        # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
        q = self.q_proj(x).view(batch, tokens, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if tokens > 256:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:  # Written out: at these lengths it trains twice as fast on a CPU as the fused kernel.
            group = c.heads // c.kv_heads
            q = q.reshape(batch * c.kv_heads, group * tokens, c.head_dim)
            k, v = k.flatten(0, 1), v.flatten(0, 1)  # [batch * kv_heads, tokens, head_dim]
            scores = (q @ k.transpose(1, 2)).view(-1, group, tokens, tokens) * c.head_dim**-0.5
            weights = F.softmax(scores + mask, dim=-1).view(-1, group * tokens, tokens)
            y = (weights @ v).view(batch, c.heads, tokens, c.head_dim)
        return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, c.heads * c.head_dim))


class Mlp(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RmsNorm(c.hidden, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RmsNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RmsNorm(c.hidden, c.norm_eps)


class DemoModel(nn.Module):
    """Decoder with tied embeddings; `forward` gives the hidden states, `logits` the scores."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.model = Backbone(c)
        inverse = c.rope_base ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(c.context).float(), inverse)  # [context, head_dim / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * c.layers) ** 0.5 if last else 0.02)

    def forward(self, ids, dtype=torch.float32):
        x = self.model.embed_tokens(ids).to(dtype)  # [batch, tokens, hidden]
        cos = self.cos[: ids.shape[1]].to(dtype)
        sin = self.sin[: ids.shape[1]].to(dtype)
        tokens = ids.shape[1]
        mask = torch.full((tokens, tokens), float("-inf"), dtype=dtype).triu(1)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def logits(self, hidden):
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())
