"""Times as they are printed: a unit that leaves no powers of ten."""

from __future__ import annotations

import pytest

from nereus.ir.units import format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (38.2, "38.2 s"),
        (1234.0, "1,234 s"),
        (0.134, "0.134 s"),
        (5.47e-5, "0.0547 ms"),
        (5.47e-8, "0.0547 us"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
