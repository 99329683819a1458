"""Which kinds of state a model-stage keeps per parameter unless its plan says otherwise."""

from __future__ import annotations

from nereus.ir.plan import Slot

#: Slots beside the weight and its master. Plain SGD keeps none: momentum is written in the plan's ``state`` block.
_OPTIMIZER_SLOTS: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
}


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
    if name not in _OPTIMIZER_SLOTS:
        raise ValueError(f"optimizer '{optimizer}' is not known; known are {', '.join(_OPTIMIZER_SLOTS)}")
    master = () if precision == "fp32" else (Slot(name="master", dtype="fp32"),)
    return (weight, *master, *(Slot(name=slot, dtype="fp32") for slot in _OPTIMIZER_SLOTS[name]))
