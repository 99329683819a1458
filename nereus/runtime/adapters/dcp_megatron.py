"""Keys of megatron-core's own checkpoints (dist_checkpointing, ``torch_dist``), which are DCP folders.

A key has no layer or expert number where all layers are alike: the tensor has them as leading axes, and the rest of it
is the parameter at tp 1 (grouped rows of q, k, v; gate rows, then up rows). The vocabulary is padded as it was where
the checkpoint was written; padded rows are no state. The optimizer's ``fully_reshardable`` form has the same shapes
under ``optimizer.state.<slot>.``, ``param`` being the fp32 masters. Its other forms are cut along Megatron's own
buckets and are refused: Megatron loads them at the tp and pp of the writer, and a live move goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nereus.ir.fragment import Segment
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.megatron import MegatronNaming

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.weight)")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_SLOTS = {"param": "master", "fp32_param": "master"}
#: Checkpoints have Transformer Engine's names of fused norms, also for layers where nothing is fused (experts).
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class Stacked:
    """A stored tensor whose first ``num_axes`` axes count layers, experts, or both. ``slot``: None for weights."""

    naming: MegatronNaming
    parameter: str
    slot: str | None
    num_axes: int
    shape: tuple[int, ...]  # without those axes

    def segments(self, numbers: Sequence[int]) -> tuple[Segment, ...]:
        """Of the part at ``numbers`` of the leading axes. Raises UnknownParameter."""
        rest, name, shape = list(numbers), self.parameter, self.shape
        layered = _LAYER.fullmatch(name)
        if layered is not None:
            layer, inner = layered[1] if layered[1] is not None else rest.pop(0), layered[2]
            expert = _EXPERT.fullmatch(inner)
            if expert is not None:
                inner = f"mlp.experts.local_experts.{expert[1] if expert[1] is not None else rest.pop(0)}.{expert[2]}"
            name = f"decoder.layers.{layer}.{_NORMS.get(inner, inner)}"
        elif name in _VOCABULARY and self.naming.arch.vocab < shape[0] and self.naming.head != "value":
            shape = (self.naming.arch.vocab, *shape[1:])
        return self.naming.segments(name, shape, Where())


def stacked(key: str, shape: tuple[int, ...], naming: MegatronNaming) -> Stacked:
    """Raises UnknownParameter for keys of the optimizer's other forms, and shapes with too few axes."""
    if _BUCKETS.match(key):
        raise UnknownParameter(
            "the optimizer was saved along Megatron's buckets (dp_reshardable), which only Megatron can read, at the "
            "tp and pp of the writer: load it there and move on, save it with distrib_optim_sharding_type = "
            "'fully_reshardable', or pass ignore for its keys"
        )
    optimizer = _OPTIMIZER.fullmatch(key)
    name = key if optimizer is None else optimizer[2]
    slot = None if optimizer is None else _SLOTS.get(optimizer[1], optimizer[1])
    layered = _LAYER.fullmatch(name)
    axes = 0
    if layered is not None:
        expert = _EXPERT.fullmatch(layered[2])
        axes = (layered[1] is None) + (expert is not None and expert[1] is None)
    if len(shape) <= axes:
        raise UnknownParameter(f"shape {list(shape)} has no axes beside those of layers and experts")
    return Stacked(naming, name, slot, axes, shape[axes:])
