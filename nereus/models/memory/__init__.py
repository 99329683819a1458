"""Steady-state memory of a plan: who needs what where while which stage runs, and what helps if it does not fit."""

from __future__ import annotations

from nereus.models.memory.check import check_memory
from nereus.models.memory.report import HostRow, MemoryReport, MemoryRow, Part
from nereus.models.memory.steady import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    engine_running_bytes,
    process_count,
    resident_state_bytes,
    steady_state,
)

__all__ = [
    "COMMUNICATOR_BYTES",
    "CONTEXT_BYTES",
    "HostRow",
    "MemoryReport",
    "MemoryRow",
    "Part",
    "check_memory",
    "engine_running_bytes",
    "process_count",
    "resident_state_bytes",
    "steady_state",
]
