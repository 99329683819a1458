"""Attention over latent heads for megatron-core without TransformerEngine, whose attention core is the only one that
Megatron gives them. It has no weights, so nothing that is moved is of it."""

from __future__ import annotations

from typing import Any

import torch


class LatentCore(torch.nn.Module):
    """Causal attention where heads of queries and keys are wider than those of values."""

    def __init__(self, config: Any, *, softmax_scale: float, **ignored: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.num_rotary = int(config.qk_pos_emb_head_dim)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **ignored: Any
    ) -> torch.Tensor:
        """[sequence, batch, heads, dim] each -> [sequence, batch, heads x dim of values]."""
        # All heads share the rotary part of the key, so its gradient is a sum over those of all ranks. Where the latent
        # projections are cut over tp, as they are without TransformerEngine, Megatron (0.19.2) leaves that sum out.
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        own, rotary = key.split([key.shape[-1] - self.num_rotary, self.num_rotary], dim=-1)
        key = torch.cat([own, copy_to_tensor_model_parallel_region(rotary)], dim=-1)
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", shares, value).flatten(2)
