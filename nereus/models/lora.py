"""LoRA adapters as logical tensors: two low-rank factors beside every linear that they adapt, the base frozen.

``y = W x + (alpha / rank) B (A x)``: A is [rank, in], B is [out, rank]. Tensor parallelism cuts the factor that meets
the cut dimension of W and copies the other: column-parallel W (cut rows) has A whole and B cut like W's rows,
row-parallel W has A cut along its columns like W and B whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nereus.ir.arch import Lora
from nereus.ir.tensor import LogicalTensor

A, B = "lora_A", "lora_B"


def is_linear(tensor: LogicalTensor) -> bool:
    """A matrix of a layer that an adapter may stand beside. The router is none: it decides, it does not transform."""
    return tensor.layer is not None and len(tensor.shape) == 2 and not tensor.name.endswith(".gate.weight")


def kind(tensor: LogicalTensor) -> str:
    """The module name that ``targets`` speaks of: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return tensor.name.split(".")[-2]


def linear_kinds(tensors: Iterable[LogicalTensor]) -> tuple[str, ...]:
    """Every module name that ``targets`` may name, in model order."""
    return tuple(dict.fromkeys(kind(t) for t in tensors if is_linear(t)))


def is_adapter(tensor: LogicalTensor) -> bool:
    return kind(tensor) in (A, B)


def with_adapters(tensors: Iterable[LogicalTensor], lora: Lora) -> Iterator[LogicalTensor]:
    """``tensors`` with the factors behind every adapted matrix. What is not an adapter becomes frozen, except a value
    head: nothing pretrained is in it, so frameworks train it whole (peft's ``modules_to_save``)."""
    for tensor in tensors:
        yield tensor if tensor.name == "score.weight" else replace(tensor, trainable=False)
        if is_linear(tensor) and (not lora.targets or kind(tensor) in lora.targets):
            yield from _factors(tensor, lora.rank)


def _factors(base: LogicalTensor, rank: int) -> tuple[LogicalTensor, LogicalTensor]:
    module = base.name.removesuffix(".weight")
    rows, cols = base.shape
    cut = base.cut
    common = replace(base, cut=None, trainable=True)
    return (
        replace(common, name=f"{module}.{A}.weight", shape=(rank, cols), cut=cut if cut and cut.dim == 1 else None),
        replace(common, name=f"{module}.{B}.weight", shape=(rows, rank), cut=cut if cut and cut.dim == 0 else None),
    )
