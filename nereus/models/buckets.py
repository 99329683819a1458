"""Buckets of weights for receivers that load each bucket as it comes, and the groups that such a bucket must not cut.

Trainers feed an engine's ``load_weights`` bucket by bucket. A receiver holds what a model publishes as one tensor in
part of a fused one: [q | k | v] with its biases, [gate | up], the latent down projections of MLA, all experts of a
layer in two stacks; and it rearranges a layer for its kernels, or quantises it, when the layer is complete. So what
shares a module of the receiver travels together, block scales beside their FP8 weight, and between two buckets no
module is half new. ``nereus.runtime.live.move`` needs none of this: it writes an update as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereus.ir.arch import Arch, Lora
from nereus.ir.tensor import LogicalTensor
from nereus.models.fp8 import has_scale, scale_name, scale_tensors
from nereus.models.naming.hf import unwrapped
from nereus.models.tensors import logical_tensors

_EXPERTS = re.compile(r"(.*\.experts)\.(?:\d+\.|(?:gate_up_proj|down_proj)\b).*")
#: A receiver's expert layer holds its router, and the router's bias twice.
_ROUTER = re.compile(r"(.*\.(?:mlp|block_sparse_moe))\.gate\.[^.]+")
_FACTOR = re.compile(r"(.*)\.lora_[AB](?:\..+)?")
#: Last component of a module -> that of the receiver's module which holds it. Of experts' own: see ``_EXPERTS``.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of one module of the receiver, in model order."""

    name: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """``oversized``: one group, larger than the limit by itself; it travels alone."""

    groups: tuple[Group, ...]
    num_bytes: int
    oversized: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.tensors)


def group_name(tensor: str) -> str:
    """The receiver's module of a tensor, by its published name or that of a transformers module (fused experts). A
    name that is in no fused module stays with its own module: weight, bias and scales."""
    name = unwrapped(tensor)
    factor = _FACTOR.fullmatch(name)
    if factor is not None:  # an adapter is loaded apart from the base that it stands beside
        return f"{_module(factor[1])}.lora"
    if (router := _ROUTER.fullmatch(name)) is not None:
        return f"{router[1]}.experts"
    experts = _EXPERTS.fullmatch(name)
    return experts[1] if experts is not None else _module(name.rpartition(".")[0] or name)


def _module(path: str) -> str:
    experts = _EXPERTS.fullmatch(f"{path}.")
    if experts is not None:
        return experts[1]
    above, dot, last = path.rpartition(".")
    return f"{above}{dot}{_FUSED.get(last, last)}"


def groups_of(tensors: Iterable[str]) -> tuple[Group, ...]:
    """Groups in the order of their first tensors. Raises ValueError for a name that is there twice."""
    found: dict[str, dict[str, None]] = {}
    for tensor in tensors:
        members = found.setdefault(group_name(tensor), {})
        if tensor in members:
            raise ValueError(f"{tensor} is listed twice")
        members[tensor] = None
    return tuple(Group(name=name, tensors=tuple(members)) for name, members in found.items())


def model_groups(arch: Arch, head: str = "lm", lora: Lora | None = None, *, fp8: bool = False) -> tuple[Group, ...]:
    """The groups of a whole model under its published names; ``fp8``: with block scales."""
    return groups_of(model_bytes(arch, head, lora, fp8=fp8))


def model_bytes(
    arch: Arch, head: str = "lm", lora: Lora | None = None, *, element_bytes: int = 2, fp8: bool = False
) -> dict[str, int]:
    """Tensor -> bytes, in model order. ``fp8``: linears of layers in one byte, each followed by its fp32 scales."""
    scales = {t.name: t for t in scale_tensors(arch, head)} if fp8 else {}
    found: dict[str, int] = {}
    for tensor in logical_tensors(arch, head, lora):
        scale = scales.get(scale_name(tensor.name)) if _quantised(tensor) else None
        found[tensor.name] = tensor.numel * (element_bytes if scale is None else 1)
        if scale is not None:
            found[scale.name] = 4 * scale.numel
    return found


def _quantised(tensor: LogicalTensor) -> bool:
    return has_scale(tensor) and ".lora_" not in tensor.name


def pack(groups: Iterable[Group], sizes: Mapping[str, int], limit_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most ``limit_bytes`` in the order of ``groups``, none of which is cut; ``sizes``: bytes of each
    tensor. Raises ValueError for a limit that is no size, and for a tensor whose size is not given."""
    if limit_bytes < 1:
        raise ValueError(f"a bucket of {limit_bytes} bytes holds nothing")
    buckets: list[Bucket] = []
    open_groups: list[Group] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if open_groups:
            over = filled > limit_bytes
            buckets.append(Bucket(groups=tuple(open_groups), num_bytes=filled, oversized=over))
        open_groups.clear()
        filled = 0

    for group in groups:
        if missing := [name for name in group.tensors if name not in sizes]:
            raise ValueError(f"{', '.join(missing)}: size not given")
        size = sum(sizes[name] for name in group.tensors)
        if filled + size > limit_bytes:
            close()
        open_groups.append(group)
        filled += size
    close()
    return tuple(buckets)
