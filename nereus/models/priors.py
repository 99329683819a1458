"""Durations and rates that no data sheet gives: published figures and stated assumptions, until they are measured.

Compiler, simulator and verifier read them from here; what each is about is in ``docs/compiler.md``.
"""

from __future__ import annotations

from math import log2

#: A tensor-parallel engine of a few billion parameters, weights not loaded from disk (published: 12-215 s).
ENGINE_START_S = 35.0
#: Python, imports, CUDA context and module of a training worker. An assumption: no published figure was found.
SPAWN_S = 15.0
#: Decoding one token of a sequence: how long in-flight rollouts take to finish. An assumption (20-30 ms per token is
#: usual for models of 7-30 B at moderate batch).
DECODE_TOKEN_S = 0.025
#: Copying inside a node's host memory, all processes together: half of the 200-300 GB/s that two sockets read or write.
#: An assumption.
HOST_COPY_BYTES_PER_S = 100e9
#: Fixed cost of one message between two GPUs, seconds (two-rank fits of published tables: 40 us on NVLink).
MESSAGE_S = 50e-6


def groups_s(num_ranks: int) -> float:
    """All communicators of a stage: 2.1 s for 16 GPUs, 3.9 s for 1,024 (published grow: 1.7-4.2 s for 32 to 1,024)."""
    return 0.9 + 0.3 * log2(max(num_ranks, 1))


def commit_s(num_participants: int) -> float:
    """Verify what arrived last, vote, switch. An assumption: a few round trips that grow with log2 of the
    participants."""
    return 0.5 + 0.1 * log2(max(num_participants, 1))


def rest_of_rollouts_s(response_len: int) -> float:
    """Rollouts in flight finish: half a response is left on average."""
    return 0.5 * response_len * DECODE_TOKEN_S
