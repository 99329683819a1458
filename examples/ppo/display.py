"""What a reader of a run sees: a line for every step."""

from __future__ import annotations

from collections.abc import Mapping


def line(point: Mapping[str, float], total_s: float, parts_s: Mapping[str, float]) -> str:
    """One step for a reader."""
    bar = "#" * round(24 * point["reward"])
    parts = " ".join(f"{name} {value:.2f}" for name, value in parts_s.items())
    return (
        f"step {point['step']:4.0f}  reward {point['reward']:.3f} |{bar:<24}|  "
        f"response {point['length']:5.1f} of {point['allowed']:2.0f}  kl {point['kl']:5.2f}  "
        f"{total_s:5.2f} s ({parts})"
    )
