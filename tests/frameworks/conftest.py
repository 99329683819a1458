"""Tests against real frameworks: in an environment of their own, made by ``make test-frameworks``."""

from __future__ import annotations

import importlib.util
import os

import pytest
from frameworks.harness import ENVIRONMENT

_NEEDED = ("torch", "megatron", "vllm", "deepspeed", "ray")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _MISSING:
    raise pytest.UsageError(f"{', '.join(_MISSING)} not installed here: run these tests with `make test-frameworks`")

# Before any framework is imported: most of them read it then.
os.environ.update(ENVIRONMENT)
