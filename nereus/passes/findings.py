"""Everything that ``check`` proves of a transition, in the order in which it is printed."""

from __future__ import annotations

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.schedule import Schedule
from nereus.passes import check
from nereus.passes.check import Finding
from nereus.passes.check_storages import check_edges, check_lifetimes
from nereus.passes.dag import Dag
from nereus.passes.diff import Diff
from nereus.passes.memory import MemoryPlan
from nereus.passes.storages import StorageMap


def all_findings(
    diff: Diff,
    schedule: Schedule,
    dag: Dag,
    storages: StorageMap,
    memory: MemoryPlan,
    topology: Topology,
    *,
    moved_bytes: int,
) -> tuple[tuple[Finding, ...], IntArray]:
    """The findings, and the most bytes that each memory space may hold on any timing. ``moved_bytes``: how many must
    move."""
    in_memory, worst = check.check_memory(dag, memory.tight_base, memory.capacity, topology)
    findings = (
        check.check_coverage(diff, schedule),
        check.check_sources(diff, schedule),
        check.check_order(dag, schedule),
        check.check_windows(schedule, topology.num_devices, memory.staging),
        check.check_bytes(diff, schedule, moved_bytes),
        in_memory,
        check_lifetimes(diff, schedule, storages),
        check_edges(dag, schedule, topology.num_devices),
    )
    return findings, worst
