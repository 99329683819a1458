"""A small Llama in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU; a language or a value head.

Tensor parallelism is written out. Every rank of a tensor-parallel group computes the same hidden states; it holds
its rows of q, k, v, gate, up and vocabulary and its columns of o and down, and partial sums are added up over the
group. Parameters carry the names of published Llamas, so Nereus knows what each is without being told.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nereus.ir.arch import Arch
from nereus.models.tensors import logical_tensors
from nereus.runtime.groups import Group

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0


class _Copy(torch.autograd.Function):
    """What every rank has alike, going into work that is cut: its gradient is the sum of what each part gives."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """Partial sums of the ranks, added up; every rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        return group.all_reduce(part.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    """The ranks' columns side by side; what follows is computed alike by all, so each takes its own columns back."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.rank, ctx.width = group.rank, part.shape[-1]
        return torch.cat(group.all_gather(part.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.narrow(-1, ctx.rank * ctx.width, ctx.width), None


def copy_to(data: torch.Tensor, tp: Group) -> torch.Tensor:
    return data if tp.size == 1 else _Copy.apply(data, tp)


def sum_over(part: torch.Tensor, tp: Group) -> torch.Tensor:
    return part if tp.size == 1 else _Sum.apply(part, tp)


def joined(part: torch.Tensor, tp: Group) -> torch.Tensor:
    return part if tp.size == 1 else _Join.apply(part, tp)


class Linear(nn.Module):
    """No bias; the parameter is not initialised (``initialise`` fills a whole model)."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, cols))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return F.linear(data, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(data, self.weight.shape, self.weight, NORM_EPS)


class Cache:
    """Keys and values of the tokens so far: [batch, local kv heads, up to ``length``, head_dim] for each layer."""

    def __init__(self, arch: Arch, batch: int, length: int, tp: int) -> None:
        shape = (arch.num_layers, batch, arch.num_kv_heads // tp, length, arch.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)
        self.filled = 0

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stop = self.filled + keys.shape[2]
        self.keys[layer, :, :, self.filled : stop] = keys
        self.values[layer, :, :, self.filled : stop] = values
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]


class Attention(nn.Module):
    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.tp, self.head_dim = tp, arch.head_dim
        self.num_heads, self.num_kv_heads = arch.num_heads // tp.size, arch.num_kv_heads // tp.size
        self.q_proj = Linear(self.num_heads * arch.head_dim, arch.hidden)
        self.k_proj = Linear(self.num_kv_heads * arch.head_dim, arch.hidden)
        self.v_proj = Linear(self.num_kv_heads * arch.head_dim, arch.hidden)
        self.o_proj = Linear(arch.hidden, self.num_heads * arch.head_dim)

    def forward(self, hidden: torch.Tensor, layer: int, first: int, cache: Cache | None) -> torch.Tensor:
        batch, length, _ = hidden.shape
        hidden = copy_to(hidden, self.tp)

        def heads(data: torch.Tensor, count: int) -> torch.Tensor:
            return data.view(batch, length, count, self.head_dim).transpose(1, 2)

        queries = _turned(heads(self.q_proj(hidden), self.num_heads), first)
        keys = _turned(heads(self.k_proj(hidden), self.num_kv_heads), first)
        values = heads(self.v_proj(hidden), self.num_kv_heads)
        if cache is not None:
            keys, values = cache.extend(layer, keys, values)
        # A query head shares its keys with the others of its kv head, whose rows follow each other.
        shared = self.num_heads // self.num_kv_heads
        if shared > 1:
            keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
        return sum_over(self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)), self.tp)


class Mlp(nn.Module):
    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.gate_proj = Linear(arch.ffn // tp.size, arch.hidden)
        self.up_proj = Linear(arch.ffn // tp.size, arch.hidden)
        self.down_proj = Linear(arch.hidden, arch.ffn // tp.size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = copy_to(hidden, self.tp)
        return sum_over(self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)), self.tp)


class Layer(nn.Module):
    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.input_layernorm = Norm(arch.hidden)
        self.self_attn = Attention(arch, tp)
        self.post_attention_layernorm = Norm(arch.hidden)
        self.mlp = Mlp(arch, tp)

    def forward(self, hidden: torch.Tensor, number: int, first: int, cache: Cache | None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), number, first, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Embedding(nn.Module):
    """Rows of the vocabulary are dealt to the ranks; a token has its vector from the one that holds it."""

    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.tp, self.rows = tp, arch.vocab // tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, arch.hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.tp.rank * self.rows
        absent = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(absent, 0), self.weight)
        return sum_over(found.masked_fill(absent.unsqueeze(-1), 0.0), self.tp)


class Decoder(nn.Module):
    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.embed_tokens = Embedding(arch, tp)
        self.layers = nn.ModuleList(Layer(arch, tp) for _ in range(arch.num_layers))
        self.norm = Norm(arch.hidden)


class Llama(nn.Module):
    """``head``: "lm" gives logits [batch, length, vocab], "value" one number a token [batch, length]."""

    def __init__(self, arch: Arch, tp: Group, head: str = "lm") -> None:
        for what, count in (("heads", arch.num_heads), ("kv heads", arch.num_kv_heads), ("vocabulary", arch.vocab)):
            if count % tp.size:
                raise ValueError(f"this model's {what} ({count}) cannot be dealt to {tp.size} tensor-parallel ranks")
        super().__init__()
        self.arch, self.tp, self.head = arch, tp, head
        self.model = Decoder(arch, tp)
        if head == "value":
            self.score = Linear(1, arch.hidden)
        else:
            self.lm_head = Linear(arch.vocab // tp.size, arch.hidden)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """``tokens`` [batch, length]; with a cache, they follow those that it holds."""
        first = 0 if cache is None else cache.filled
        hidden = self.model.embed_tokens(tokens)
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, number, first, cache)
        if cache is not None:
            cache.filled += tokens.shape[1]
        hidden = self.model.norm(hidden)
        if self.head == "value":
            return self.score(hidden).squeeze(-1)
        return joined(self.lm_head(copy_to(hidden, self.tp)), self.tp)

    def is_cut(self, name: str) -> bool:
        """Whether each rank holds a part of the parameter; the others are alike on all of them."""
        return self.tp.size > 1 and not name.endswith(("norm.weight", "layernorm.weight", "score.weight"))


@torch.no_grad()
def initialise(module: Llama, seed: int) -> None:
    """Weights as a job starts with. Each is drawn whole and then cut, so they do not depend on the layout."""
    parameters = dict(module.named_parameters())
    for number, tensor in enumerate(logical_tensors(module.arch, module.head)):
        local = parameters[tensor.name]
        if tensor.name.endswith("norm.weight"):
            local.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        # A value head starts at zero: the first estimates say nothing instead of something wrong.
        scale = 0.0 if tensor.name == "score.weight" else tensor.shape[-1] ** -0.5
        whole = torch.randn(tensor.shape, generator=generator) * scale
        if tensor.cut is not None:
            lo, hi = tensor.cut.interval(tensor.shape[tensor.cut.dim], module.tp.size, module.tp.rank)
            whole = whole.narrow(tensor.cut.dim, lo, hi - lo)
        local.copy_(whole)


@lru_cache(maxsize=8)
def _angles(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, [length, head_dim]."""
    rates = ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), torch.cat((rates, rates)))
    return angles.cos(), angles.sin()


def _turned(heads: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary positions ``first``, ``first + 1``, ... applied to [batch, heads, length, head_dim]."""
    stop = first + heads.shape[2]
    cos, sin = _angles(max(64, stop), heads.shape[3])
    low, high = heads.chunk(2, dim=-1)
    return heads * cos[first:stop] + torch.cat((-high, low), dim=-1) * sin[first:stop]
