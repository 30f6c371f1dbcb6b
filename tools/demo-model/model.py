"""The network: a small Llama in plain PyTorch, with the tensor names of `LlamaForCausalLM`.

It knows the arithmetic only. What it is trained on is `corpus.py`'s business, how it is
written to disk is `gguf_io.py`'s.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


# Large beside what training adds: words of a kind (names, foods) are pulled together by their common
# uses, and a word that has lost itself in its kind cannot be copied. The last norm makes up for it.
EMBEDDING = 0.2


# Queries that attend together: what lies after them is not computed.
BLOCK = 128


@dataclass(frozen=True)
class Config:
    """Shape of the demo model. Every row length is a multiple of 32, the block of Q8_0."""

    vocab: int = 1280
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    context: int = 1024
    rope_base: float = 500000.0
    norm_eps: float = 1e-5


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


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
        # Written out, a block of queries at a time: it trains faster on a CPU than the fused kernel.
        group = c.heads // c.kv_heads
        q = q.reshape(batch * c.kv_heads, group, tokens, c.head_dim)
        k, v = k.flatten(0, 1), v.flatten(0, 1)  # [batch * kv_heads, tokens, head_dim]
        blocks = []
        for at in range(0, tokens, BLOCK):
            end = min(at + BLOCK, tokens)
            rows = end - at
            scores = q[:, :, at:end].flatten(1, 2) @ k[:, :end].transpose(1, 2) * c.head_dim**-0.5
            weights = F.softmax(scores.view(-1, group, rows, end) + mask[at:end, :end], dim=-1)
            y = weights.flatten(1, 2).to(v.dtype) @ v[:, :end]
            blocks.append(y.view(batch, c.heads, rows, c.head_dim))
        y = torch.cat(blocks, dim=2)
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
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=EMBEDDING if "embed" in name else 0.04)
        nn.init.constant_(self.model.norm.weight, 0.02 / EMBEDDING)
        self.start_with_copying()

    @torch.no_grad()
    def start_with_copying(self):
        """Wires layers 0 and 1 so that the network copies from the first step on.

        One head of layer 0 looks at the token before and notes it in spare dimensions of the state.
        Two heads of layer 1 look for a place whose note is the current token, and vote for the token
        there: what came after it last time (an induction head, Olsson et al. 2022, arXiv:2209.11895).
        Training finds this circuit by itself, but takes most of a run of this length to do so.
        """
        c = self.c
        half, group = c.head_dim // 2, c.heads // c.kv_heads
        embedding = self.model.embed_tokens.weight
        constant, spare = slice(0, 8), slice(c.hidden - 2 * half, c.hidden)
        spread = slice(8, c.hidden - 2 * half)
        embedding[:, constant] = 3 * EMBEDDING
        embedding[:, spare] = 0.0

        def projection(rows):
            out = torch.zeros(rows, c.hidden)
            out[:, spread] = torch.linalg.qr(torch.randn(spread.stop - spread.start, rows))[0].T
            return out

        before, search = (layer.self_attn for layer in list(self.model.layers)[:2])
        notes = projection(2 * half)
        # Layer 0, head 0: the three fastest rotations agree at distance one only.
        turn = c.rope_base ** (-torch.arange(3).float() * 2 / c.head_dim)
        for p in (before.q_proj.weight[: c.head_dim], before.k_proj.weight[: c.head_dim]):
            p.zero_()
        before.q_proj.weight[:3, constant] = 0.3 * turn.cos()[:, None]
        before.q_proj.weight[half: half + 3, constant] = -0.3 * turn.sin()[:, None]
        before.k_proj.weight[:3, constant] = 0.3
        before.v_proj.weight[: c.head_dim] = notes
        before.o_proj.weight[spare, : c.head_dim] = EMBEDDING * torch.eye(2 * half)
        # Layer 1, one head for each half of the notes: slow rotations, so that distance does not count.
        slow = [*range(half // 2, half), *range(half + half // 2, 2 * half)]
        for i in range(c.kv_heads):
            part = slice(i * half, (i + 1) * half)
            q = search.q_proj.weight[i * group * c.head_dim:][: c.head_dim]
            k = search.k_proj.weight[i * c.head_dim:][: c.head_dim]
            q.zero_()
            k.zero_()
            q[slow] = 1.7 * notes[part]
            k[slow, spare] = 1.7 * F.pad(torch.eye(half), (i * half, half - i * half))
        # Whatever a head after layer 0 looks at, it votes for: looking is then all it has to learn.
        for layer in list(self.model.layers)[1:]:
            for i in range(c.kv_heads):
                vote = projection(c.head_dim)
                layer.self_attn.v_proj.weight[i * c.head_dim: (i + 1) * c.head_dim] = vote
                layer.self_attn.o_proj.weight[:, i * group * c.head_dim: (i + 1) * group * c.head_dim] = EMBEDDING * vote.T.repeat(1, group)

    def forward(self, ids):
        x = self.model.embed_tokens(ids)  # [batch, tokens, hidden]
        tokens = ids.shape[1]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def logits(self, hidden):
        return F.linear(hidden, self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())
