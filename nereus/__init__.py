"""Nereus changes the parallel layout of a running RL post-training job."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


#: What users embed, by the module that has it. They need torch, and ``nereusc --help`` must not: each is loaded when it
#: is first asked for.
_LAZY = {"attach": "nereus.runtime.session.attach", "describe": "nereus.runtime.describe"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nereus' has no attribute {name!r}")
