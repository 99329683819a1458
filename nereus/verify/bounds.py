"""Lower bounds of the placement, counted anew: bytes that must move, bytes that must enter each node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.verify.case import Case
from nereus.verify.segments import IntArray, Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """``moved_bytes``: what GPUs lack, each, and what a node's host memory lacks, once. ``node_in_bytes``: what some
    place of a node wants and none has. ``kept`` and ``derived``: what places have, or make themselves."""

    moved_bytes: int
    node_in_bytes: IntArray
    kept_bytes: int
    derived_bytes: int


def count_bounds(case: Case) -> Bounds:
    world = case.world
    moved = kept = derived = 0
    node_in = np.zeros(len(world.nodes), dtype=np.int64)
    known: dict[int, tuple[int, IntArray, int, int]] = {}
    for stream in case.streams:
        wants = case.wants(stream.model, stream.kind)
        if id(wants) not in known:
            stride = case.grounds[stream.model].stride
            first_host = world.num_devices * stride
            to_gpus = Segments(*_below(wants.need, first_host))
            to_hosts = _by_node(case, wants.need, stride, first_host)
            in_hosts = _by_node(case, wants.held, stride, first_host)
            entering = _by_node(case, wants.need, stride, 0).minus(_by_node(case, wants.held, stride, 0))
            per_node = np.zeros(len(world.nodes), dtype=np.int64)
            np.add.at(per_node, entering.lo // stride, entering.hi - entering.lo)
            must = to_gpus.total + to_hosts.minus(in_hosts).total
            known[id(wants)] = (must, per_node, wants.wanted.common(wants.held).total, wants.derived.total)
        must, per_node, stays, made = known[id(wants)]
        width = stream.kind.num_bytes
        moved, kept, derived = moved + must * width, kept + stays * width, derived + made * width
        node_in += per_node * width
    return Bounds(moved_bytes=moved, node_in_bytes=node_in, kept_bytes=kept, derived_bytes=derived)


def _below(line: Segments, point: int) -> tuple[IntArray, IntArray]:
    some = line.lo < point
    return line.lo[some], line.hi[some]


def _by_node(case: Case, line: Segments, stride: int, first: int) -> Segments:
    """What a node's places from ``first`` on have together: places become nodes."""
    some = line.lo >= first
    place = line.lo[some] // stride
    shift = (case.world.node_of_places(place) - place) * stride
    return Segments.union(line.lo[some] + shift, line.hi[some] + shift)
