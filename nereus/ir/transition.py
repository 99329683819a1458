"""Moves between places: what route decides and everything after it schedules, proves and executes."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.intervals import Intervals

#: Link classes of a move. LOCAL stays inside one memory space (not counted as moved), HOST crosses a GPU's own host
#: link.
LOCAL, HOST, INTRA, INTER = "local", "host", "intra-node", "inter-node"
LINKS = (LOCAL, HOST, INTRA, INTER)
LINK_NUMBER = {link: number for number, link in enumerate(LINKS)}


@dataclass(frozen=True, slots=True)
class Move:
    """``intervals`` of atom table ``table``, for its slots number ``slots`` (all where None), go from place ``src``
    to place ``dst``.

    ``after``: moves that bring (part of) the intervals to ``src`` first, where ``src`` only relays; empty where
    ``src`` holds them in the old plan.
    """

    src: int
    dst: int
    table: int
    intervals: Intervals
    num_bytes: int
    link: str
    after: tuple[int, ...] = ()
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a transition costs and why it is safe. Bytes are exact; seconds are predictions from data-sheet rates and
    priors.

    ``bound_*``: no transition to the same placement can do better; ``best_bound_*``: over all allowed placements.
    """

    mode: str  # reversible | tight | none (nothing changes)
    moved_bytes: int
    bound_moved_bytes: int
    best_bound_moved_bytes: int
    node_in_bytes_max: int
    bound_node_in_bytes_max: int
    best_bound_node_in_bytes_max: int
    peak_bytes_max: int
    bound_peak_bytes_max: int
    best_bound_peak_bytes_max: int
    peak_device: str
    peak_phase: str
    capacity_bytes: int
    transfer_s: float
    bound_transfer_s: float
    best_bound_transfer_s: float
    #: What ``place`` weighs: predicted transfer (busiest port) + horizon x seconds that a placement adds to a step.
    placement_s: float
    best_bound_placement_s: float
    drain_s: float
    setup_s: float
    commit_s: float
    downtime_s: float
    bound_downtime_s: float
    background_s: float
    kept_bytes: int
    derived_bytes: int
    local_bytes: int
    bytes_by_link: tuple[tuple[str, int], ...]
    num_ops: int
    num_edges: int
    num_waves: int
    point_of_no_return: str | None
    safe: bool
    checks: tuple[tuple[str, bool, str], ...]  # (what was checked, holds, evidence)
    digest: str
    compile_s: float
    #: Through host memory, since GPUs are full: bytes that leave a GPU and reach their new places from there. They are
    #: not part of ``moved_bytes``, which counts what arrives.
    staged_bytes: int = 0
