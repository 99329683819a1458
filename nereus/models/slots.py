"""Which kinds of state a model-stage keeps per parameter unless its plan says otherwise; which tensors have them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nereus.ir.plan import Slot
from nereus.ir.tensor import LogicalTensor

#: Slots beside the weight and its master. Plain SGD keeps none: momentum is written in the plan's ``state`` block.
_OPTIMIZER_SLOTS: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "lion": ("exp_avg",),
    # Muon for the hidden matrices, Adam for the rest: ``slot_applies`` says which tensor has which.
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
}

#: Optimizers whose state is no set of tensors shaped like the parameters, and why.
REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "adafactor": "its second moments are row and column sums over the whole matrix, which no shard of it can hold",
        "adam8bit": "its moments are quantised in blocks with scales of their own, which do not follow a cut",
        "adamw8bit": "its moments are quantised in blocks with scales of their own, which do not follow a cut",
        "galore": "its moments live in a projected space that belongs to no part of the parameter",
        "shampoo": "its preconditioners are square matrices per dimension, which no shard of the parameter can hold",
        "soap": "its preconditioners are square matrices per dimension, which no shard of the parameter can hold",
    }
)


def optimizer_names() -> tuple[str, ...]:
    return tuple(_OPTIMIZER_SLOTS)


def default_slots(*, trains: bool, precision: str, optimizer: str | None) -> tuple[Slot, ...]:
    """Weight in the model's precision; while it trains also an fp32 master and moments (Adam where none is named).

    With fp32 weights the weight is its own master, so there is no second copy. Frozen models, inference and generation
    keep the weight only. Raises ValueError for an optimizer that is not known.
    """
    weight = Slot(name="weight", dtype=precision)
    if not trains:
        return (weight,)
    name = (optimizer or "adam").lower()
    if name in REFUSED_OPTIMIZERS:
        raise ValueError(f"optimizer '{optimizer}' cannot be described: {REFUSED_OPTIMIZERS[name]}")
    if name not in _OPTIMIZER_SLOTS:
        raise ValueError(f"optimizer '{optimizer}' is not known; known are {', '.join(_OPTIMIZER_SLOTS)}")
    master = () if precision == "fp32" else (Slot(name="master", dtype="fp32"),)
    return (weight, *master, *(Slot(name=slot, dtype="fp32") for slot in _OPTIMIZER_SLOTS[name]))


def slot_applies(slot: str, tensor: LogicalTensor, optimizer: str | None) -> bool:
    """Whether ``tensor`` has ``slot`` at all. Every tensor has a weight; what is not trained has nothing else."""
    if slot == "weight":
        return True
    if not tensor.trainable:
        return False
    if (optimizer or "").lower() == "muon":
        if slot == "momentum_buffer":
            return is_muon_matrix(tensor)
        if slot in ("exp_avg", "exp_avg_sq"):
            return not is_muon_matrix(tensor)
    return True


def is_muon_matrix(tensor: LogicalTensor) -> bool:
    """Matrices of layers, routers and adapters included; embedding, head, norms and biases go to Adam."""
    return tensor.layer is not None and len(tensor.shape) == 2
