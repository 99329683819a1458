"""How many tokens an engine's KV cache holds."""

from __future__ import annotations

from collections.abc import Iterator

from nereus.ir.plan import Plan, Stage
from nereus.models.memory.activations import kv_bytes_per_token
from nereus.models.memory.report import MemoryReport
from nereus.models.memory.state import copies
from nereus.models.memory.steady import kv_cache_bytes, mem_bytes_of

_CACHE_ELEMENT_BYTES = 2  # bf16 cache


def cache_tokens(plan: Plan, report: MemoryReport) -> Iterator[tuple[Stage, int, int]]:
    """(stage, tokens that its cache holds, bytes per token) on the engine's tightest GPU. ``report``: that of
    ``plan``."""
    copy_of = {user.name: copy for copy in copies(plan) for user in copy.users}
    nodes = {node.name: node for node in plan.cluster.nodes}
    for stage in plan.stages:
        if stage.kind != "generate" or stage.service is not None:
            continue
        copy = copy_of[stage.name]
        tightest: tuple[int, int] | None = None
        for row in report.rows:
            if row.stage != stage.name:
                continue
            layers = copy.shapes[row.pp_index].num_layers
            per_token = kv_bytes_per_token(copy.model.arch, stage, layers, _CACHE_ELEMENT_BYTES)
            mem_bytes = mem_bytes_of(nodes[row.device.node])
            tokens = kv_cache_bytes(plan, copy, stage, row.pp_index, mem_bytes) // max(1, per_token)
            if tightest is None or tokens < tightest[0]:
                tightest = (tokens, per_token)
        if tightest is not None:
            yield stage, *tightest
