"""How many tokens an engine's KV cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nereus.ir.plan import Plan, Stage
from nereus.models.memory.activations import kv_bytes_per_token
from nereus.models.memory.report import MemoryReport
from nereus.models.memory.state import copies
from nereus.models.memory.steady import kv_cache_bytes, mem_bytes_of

_CACHE_ELEMENT_BYTES = 2  # bf16 cache


def cache_tokens(plan: Plan, report: MemoryReport) -> Iterator[tuple[Stage, int, int]]:
    """(stage, tokens that its cache holds, bytes per token) on the engine's tightest GPU. ``report``: that of
    ``plan``."""
    nodes = {node.name: node for node in plan.cluster.nodes}
    for stage in plan.stages:
        if stage.kind != "generate" or stage.service is not None:
            continue
        rows = [row for row in report.rows if row.stage == stage.name]
        places = dict.fromkeys((row.pp_index, mem_bytes_of(nodes[row.device.node])) for row in rows)
        if places:
            yield stage, *engine_tokens(plan, stage, places)


def engine_tokens(plan: Plan, stage: Stage, places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(tokens, bytes per token) on the tightest of ``places``: (pipeline stage, bytes of the GPU), at least one."""
    copy = next(copy for copy in copies(plan) if any(user.name == stage.name for user in copy.users))
    found = []
    for pp_index, mem_bytes in places:
        layers = copy.shapes[pp_index].num_layers
        per_token = kv_bytes_per_token(copy.model.arch, stage, layers, _CACHE_ELEMENT_BYTES)
        found.append((kv_cache_bytes(plan, copy, stage, pp_index, mem_bytes) // max(1, per_token), per_token))
    return min(found, key=lambda of_place: of_place[0])
