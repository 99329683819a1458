"""A small Llama in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU; a language or a value head.

Tensor parallelism is written out. Every rank of a tensor-parallel group computes the same hidden states; it holds
its rows of q, k, v, gate, up and vocabulary and its columns of o and down. Parameters carry the names of published
Llamas, so Nereus knows what each is without being told.

One thing is unusual. A cut matrix consists of as many *parts* as there are kv heads, and a rank computes its parts one
by one, whether it holds one of them or all; sums over parts are added up in their order. So no bit of a result depends
on the layout. That costs speed, and a real job would not pay it; here it means that a run whose layout was changed must
end exactly like one whose layout was not, and a single wrong byte would show.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class _Spread(torch.autograd.Function):
    """What every rank has alike, once for each part that this rank computes; the gradient is the sum over all parts."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: Group, num_local: int) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(data.view_as(data) for _ in range(num_local))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _added(gradients, ctx.group), None, None


class _Sum(torch.autograd.Function):
    """The sum over all parts, of which each rank gives its own."""

    @staticmethod
    def forward(ctx: Any, group: Group, *parts: torch.Tensor) -> torch.Tensor:
        ctx.num_local = len(parts)
        return _added(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(gradient for _ in range(ctx.num_local))


class _Join(torch.autograd.Function):
    """The ranks' columns side by side; what follows is computed alike by all, so each takes its own columns back."""

    @staticmethod
    def forward(ctx: Any, group: Group, data: torch.Tensor) -> torch.Tensor:
        ctx.rank, ctx.width = group.rank, data.shape[-1]
        return torch.cat(group.all_gather(data.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient.narrow(-1, ctx.rank * ctx.width, ctx.width)


class _Product(torch.autograd.Function):
    """``data`` [..., n] by ``weight`` [m, n]: [..., m]. Always of whole blocks of memory: how a library adds up the
    terms of a product may depend on its operands' strides, and those on how many parts lie side by side."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        data, weight = data.contiguous(), weight.contiguous()
        ctx.save_for_backward(data, weight)
        return (data.flatten(0, -2) @ weight.t()).view(*data.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, weight = ctx.saved_tensors
        flat = gradient.contiguous().flatten(0, -2)
        return (flat @ weight).view_as(data), flat.t() @ data.flatten(0, -2)


def _added(parts: Sequence[torch.Tensor], group: Group) -> torch.Tensor:
    """All ranks' parts, added up in their order."""
    every = torch.cat(group.all_gather(torch.stack(list(parts))))
    total = every[0].clone()
    for part in every[1:]:
        total += part
    return total


class Linear(nn.Module):
    """No bias; the parameter is not initialised (``initialise`` fills a whole model)."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, cols))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return _Product.apply(data, self.weight)

    def by_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each part's input times its rows."""
        return [_Product.apply(data, w) for data, w in zip(parts, self.weight.chunk(len(parts)), strict=True)]

    def by_columns(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each part's input times its columns: what they add up to is the product."""
        return [_Product.apply(data, w) for data, w in zip(parts, self.weight.chunk(len(parts), dim=1), strict=True)]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(data, self.weight.shape, self.weight, NORM_EPS)


class Cache:
    """Keys and values of the tokens so far, [batch, 1, up to ``length``, head_dim] for each layer and part."""

    def __init__(self, arch: Arch, batch: int, length: int, tp: int) -> None:
        shape = (arch.num_layers, arch.num_kv_heads // tp, batch, 1, length, arch.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)
        self.filled = 0

    def extend(
        self, layer: int, part: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stop = self.filled + keys.shape[2]
        self.keys[layer, part, :, :, self.filled : stop] = keys
        self.values[layer, part, :, :, self.filled : stop] = values
        return self.keys[layer, part, :, :, :stop], self.values[layer, part, :, :, :stop]


class Attention(nn.Module):
    """A part is a kv head with the query heads that share it."""

    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.tp, self.head_dim = tp, arch.head_dim
        self.num_parts = arch.num_kv_heads // tp.size
        self.num_shared = arch.num_heads // arch.num_kv_heads
        rows = self.num_parts * arch.head_dim
        self.q_proj = Linear(rows * self.num_shared, arch.hidden)
        self.k_proj = Linear(rows, arch.hidden)
        self.v_proj = Linear(rows, arch.hidden)
        self.o_proj = Linear(arch.hidden, rows * self.num_shared)

    def forward(self, hidden: torch.Tensor, layer: int, first: int, cache: Cache | None) -> torch.Tensor:
        batch, length, _ = hidden.shape

        def heads(data: torch.Tensor) -> torch.Tensor:
            return data.view(batch, length, -1, self.head_dim).transpose(1, 2)

        parts = _Spread.apply(hidden, self.tp, self.num_parts)
        mixed = []
        projected = zip(self.q_proj.by_rows(parts), self.k_proj.by_rows(parts), self.v_proj.by_rows(parts), strict=True)
        for part, (query, key, value) in enumerate(projected):
            queries, keys, values = _turned(heads(query), first), _turned(heads(key), first), heads(value)
            if cache is not None:
                keys, values = cache.extend(layer, part, keys, values)
            keys, values = keys.expand(-1, self.num_shared, -1, -1), values.expand(-1, self.num_shared, -1, -1)
            found = F.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
            mixed.append(found.transpose(1, 2).reshape(batch, length, -1))
        return _Sum.apply(self.tp, *self.o_proj.by_columns(mixed))


class Mlp(nn.Module):
    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.tp, self.num_parts = tp, arch.num_kv_heads // tp.size
        self.gate_proj = Linear(arch.ffn // tp.size, arch.hidden)
        self.up_proj = Linear(arch.ffn // tp.size, arch.hidden)
        self.down_proj = Linear(arch.hidden, arch.ffn // tp.size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = _Spread.apply(hidden, self.tp, self.num_parts)
        gated = zip(self.gate_proj.by_rows(parts), self.up_proj.by_rows(parts), strict=True)
        return _Sum.apply(self.tp, *self.down_proj.by_columns([F.silu(gate) * up for gate, up in gated]))


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
        # All summands but one are zero: no order to keep.
        return _Sum.apply(self.tp, found.masked_fill(absent.unsqueeze(-1), 0.0))


class Decoder(nn.Module):
    def __init__(self, arch: Arch, tp: Group) -> None:
        super().__init__()
        self.embed_tokens = Embedding(arch, tp)
        self.layers = nn.ModuleList(Layer(arch, tp) for _ in range(arch.num_layers))
        self.norm = Norm(arch.hidden)


class Llama(nn.Module):
    """``head``: "lm" gives logits [batch, length, vocab], "value" one number a token [batch, length]."""

    def __init__(self, arch: Arch, tp: Group, head: str = "lm") -> None:
        if arch.num_kv_heads % tp.size:
            count = arch.num_kv_heads
            raise ValueError(f"this model's kv heads ({count}) cannot be dealt to {tp.size} tensor-parallel ranks")
        if arch.ffn % arch.num_kv_heads or arch.vocab % arch.num_kv_heads:
            raise ValueError("this model's ffn width and vocabulary must be multiples of its number of kv heads")
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
        parts = _Spread.apply(hidden, self.tp, self.arch.num_kv_heads // self.tp.size)
        return _Join.apply(self.tp, torch.cat(self.lm_head.by_rows(parts), dim=-1))

    def cut_dim(self, name: str) -> int | None:
        """The dim of a parameter that is dealt to the ranks; None: all have all of it."""
        if name.endswith(("norm.weight", "score.weight")):
            return None
        return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0

    def squares(self) -> torch.Tensor:
        """The sum of the squares of all gradients of the whole model, added up part by part."""
        num_parts = self.arch.num_kv_heads // self.tp.size
        cut: list[torch.Tensor] = [torch.zeros(()) for _ in range(num_parts)]
        alike = torch.zeros(())
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            dim = self.cut_dim(name)
            if dim is None:
                alike += parameter.grad.square().sum()
                continue
            for number, part in enumerate(parameter.grad.chunk(num_parts, dim=dim)):
                cut[number] += part.contiguous().square().sum()
        return _added(cut, self.tp) + alike


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
