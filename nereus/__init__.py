"""Nereus changes the parallel layout of a running RL post-training job."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``describe`` needs torch, and ``nereusc --help`` must not: it is loaded when it is first asked for."""
    if name == "describe":
        from nereus.runtime.describe import describe

        return describe
    raise AttributeError(f"module 'nereus' has no attribute {name!r}")
