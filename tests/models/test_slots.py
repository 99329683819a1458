"""State per parameter by default."""

from __future__ import annotations

import pytest

from nereus.models.slots import default_slots


def _bytes(**options: object) -> dict[str, int]:
    return {slot.name: slot.element_bytes for slot in default_slots(**options)}  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "Adam", None])
def test_adam_keeps_fourteen_bytes_beside_gradients(optimizer: str | None) -> None:
    slots = _bytes(trains=True, precision="bf16", optimizer=optimizer)
    assert slots == {"weight": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}


def test_other_cases() -> None:
    assert _bytes(trains=True, precision="bf16", optimizer="sgd") == {"weight": 2, "master": 4}
    assert _bytes(trains=True, precision="fp32", optimizer="adam") == {"weight": 4, "exp_avg": 4, "exp_avg_sq": 4}
    assert _bytes(trains=False, precision="bf16", optimizer="adam") == {"weight": 2}
    with pytest.raises(ValueError, match="lion"):
        default_slots(trains=True, precision="bf16", optimizer="lion")
