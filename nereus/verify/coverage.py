"""Every element that a place wants is there, is made there, or arrives exactly once; nothing else arrives.

And nothing is sent that is not there: a source holds what it sends in the old plan, or earlier waves brought it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.verify.case import Case, Rows, Stream
from nereus.verify.finding import Violation
from nereus.verify.segments import IntArray, Segments, first_overlap, ints, meeting, outside, within


def check_elements(case: Case) -> str:
    for model, kind in case.slot_kinds:
        if not any((s.model, s.kind) == (model, kind) for s in case.streams):
            wanted = sum(len(case.new.holding(c, kind).lo) for c in case.new.of_model(model) if kind in c.slots)
            if wanted or model not in case.grounds:
                raise Violation(f"{model} {kind.name} {kind.dtype} is wanted and no table of the document moves it")
    total = arrived = 0
    moves, rows = case.document.moves, case.rows
    known = set(case.slot_kinds)
    for stream, wants, count in case.distinct():
        if (stream.model, stream.kind) not in known:
            raise Violation(f"the document moves {stream.model} {stream.kind.name}, which is not held and wanted")
        stride = case.grounds[stream.model].stride
        chosen = np.zeros(len(moves), dtype=bool)
        chosen[stream.carries] = True
        mine = rows.of_moves(chosen)
        lo, hi = (moves.dst[mine.move] * stride + end for end in (mine.lo, mine.hi))
        twice = first_overlap(lo, hi)
        if twice is not None:
            raise Violation(f"{case.where(stream, twice)} arrives twice")
        arriving = Segments.union(lo, hi)
        missing = wants.need.minus(arriving)
        if len(missing):
            raise Violation(
                f"{case.where(stream, int(missing.lo[0]))} never arrives ({missing.total:,} elements in all)"
            )
        extra = arriving.minus(wants.need).minus(wants.derived)
        if len(extra):
            point = int(extra.lo[0])
            there = not len(outside(ints([point]), ints([point + 1]), wants.wanted))
            why = "is there already" if there else "is not wanted there"
            raise Violation(f"{case.where(stream, point)} arrives and {why} ({extra.total:,} elements in all)")
        total += wants.wanted.total * count
        arrived += arriving.total * count
    return f"{total:,} wanted elements: {arrived:,} arrive, each once, the others are there or made there"


def fetched_bytes(case: Case) -> int:
    """Bytes that arrive where they could be made."""
    total = 0
    moves, rows = case.document.moves, case.rows
    for stream, wants, count in case.distinct():
        if wants.derived.total:
            chosen = np.zeros(len(moves), dtype=bool)
            chosen[stream.carries] = True
            mine = rows.of_moves(chosen)
            stride = case.grounds[stream.model].stride
            arriving = Segments.union(*(moves.dst[mine.move] * stride + end for end in (mine.lo, mine.hi)))
            total += arriving.common(wants.derived).total * stream.kind.num_bytes * count
    return total


def check_sources(case: Case) -> str:
    moves, rows = case.document.moves, case.rows
    relays = np.zeros(len(moves), dtype=bool)
    relays[moves.relays] = True
    _check_relayed(case)
    for stream, wants, _ in case.distinct():
        stride = case.grounds[stream.model].stride
        chosen = np.zeros(len(moves), dtype=bool)
        chosen[stream.carries] = True
        mine = rows.of_moves(chosen & ~relays)
        lo, hi = (moves.src[mine.move] * stride + end for end in (mine.lo, mine.hi))
        held = wants.held
        passing = _passing(case, stream)
        if passing is not None:
            _check_passing(case, mine, lo, hi, passing)
            held = Segments.union(np.concatenate((held.lo, passing.lo)), np.concatenate((held.hi, passing.hi)))
        bad = outside(lo, hi, held)
        if len(bad):
            at = int(bad[0])
            point = int(lo[at])
            number = int(mine.move[at])
            alive = bool(case.world.alive[moves.src[number] % case.world.num_devices])
            what = "is not there at the boundary" if alive else "is lost with its node"
            raise Violation(f"move {number} reads {case.where(stream, point)}, which {what}")
    return f"{len(moves):,} moves read what is held on living nodes or was verified before, {int(relays.sum()):,} relay"


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """Old storages of one slot in host memory on the way: keys there, ascending, and between which waves."""

    lo: IntArray
    hi: IntArray
    first: IntArray
    last: IntArray


def _passing(case: Case, stream: Stream) -> _Passing | None:
    staged = {key: waves for key, waves in case.document.staged.items() if key[2] == stream.kind.name}
    num_devices, stride = case.world.num_devices, case.grounds[stream.model].stride
    columns: list[tuple[IntArray, ...]] = []
    for copy in case.old.of_model(stream.model):
        if stream.kind not in copy.slots or copy.slots[stream.kind] == 1:
            continue
        held = case.old.holding(copy, stream.kind)
        waves = {
            device * len(copy.tensors) + tensor: span
            for (device, stage, _, tensor), span in staged.items()
            if stage == copy.stage
        }
        if not waves:
            continue
        storage = held.place * len(copy.tensors) + held.tensor
        rows = np.flatnonzero(np.isin(storage, ints(list(waves))))
        spans = ints([waves[key] for key in storage[rows].tolist()]).reshape(-1, 2)
        begin = (held.place[rows] + num_devices) * stride
        columns.append((begin + held.lo[rows], begin + held.hi[rows], spans[:, 0], spans[:, 1]))
    if not columns:
        return None
    lo, hi, first, last = (np.concatenate([c[i] for c in columns]) for i in range(4))
    order = np.argsort(lo, kind="stable")
    return _Passing(lo[order], hi[order], first[order], last[order])


def _check_passing(case: Case, mine: Rows, lo: IntArray, hi: IntArray, passing: _Passing) -> None:
    """What is read from host memory on the way is there: copied in an earlier wave, and not gone."""
    moves = case.document.moves
    read, storage = meeting(lo, hi, passing.lo, passing.hi)
    number = mine.move[read]
    first, last = moves.wave[number], moves.wave[number] + moves.slices[number] - 1
    bad = np.flatnonzero((first <= passing.first[storage]) | (last > passing.last[storage]))
    if len(bad):
        at = int(bad[0])
        span = f"from wave {int(passing.first[storage[at]])} to {int(passing.last[storage[at]])}"
        raise Violation(
            f"move {int(number[at])} of wave {int(first[at])} reads from host memory what is there {span} only"
        )


def _check_relayed(case: Case) -> None:
    """A relay reads what its predecessors bring, in later waves than they bring it."""
    moves = case.document.moves
    relays = moves.relays
    if not len(relays):
        return
    counts = (moves.after_first[1:] - moves.after_first[:-1])[relays]
    child = np.repeat(relays, counts)
    parent = moves.after[np.repeat(moves.after_first[:-1][relays], counts) + within(counts)]
    wrong = np.flatnonzero((moves.dst[parent] != moves.src[child]) | (moves.table[parent] != moves.table[child]))
    if len(wrong):
        raise Violation(f"move {child[wrong[0]]} relays move {parent[wrong[0]]}, which does not come to its source")
    masks = np.where(moves.slots < 0, -1, moves.slots)
    lacking = np.flatnonzero((masks[child] & ~masks[parent]) != 0)
    if len(lacking):
        raise Violation(f"move {child[lacking[0]]} relays slots that move {parent[lacking[0]]} does not bring")
    early = np.flatnonzero(moves.wave[child] <= moves.wave[parent])
    if len(early):
        c, p = child[early[0]], parent[early[0]]
        raise Violation(f"move {c} relays in wave {moves.wave[c]} what move {p} brings from wave {moves.wave[p]} on")
    # Slice k of a relay of one whole move with as many slices needs slice k of that only: nothing more to show.
    single = np.zeros(len(moves), dtype=bool)
    single[relays[counts == 1]] = True
    same = single[child] & (moves.region[child] == moves.region[parent]) & (moves.slices[child] == moves.slices[parent])
    pairs = np.flatnonzero(~same)
    if len(pairs):
        _check_slices(case, child[pairs], parent[pairs])


def _check_slices(case: Case, child: IntArray, parent: IntArray) -> None:
    """Every slice of each child against the slices of all its parents, which bring disjoint elements."""
    stride = max(ground.stride for ground in case.grounds.values())
    own = np.unique(child)
    waves_r, number_r, lo_r, hi_r = _slices(case, own)
    wave_a, at, lo_a, hi_a = _slices(case, parent)
    number_r, number_a = own[number_r], child[at]
    read_lo, read_hi = number_r * stride + lo_r, number_r * stride + hi_r
    come_lo, come_hi = number_a * stride + lo_a, number_a * stride + hi_a
    order = np.argsort(come_lo, kind="stable")
    come_lo, come_hi, wave_a = come_lo[order], come_hi[order], wave_a[order]
    bad = outside(read_lo, read_hi, Segments.union(come_lo, come_hi))
    if len(bad):
        raise Violation(f"move {int(number_r[bad[0]])} relays elements that no move before it brings")
    # Elements that come twice are another check's business; here the last to come counts.
    read, came = meeting(read_lo, read_hi, come_lo, np.maximum.accumulate(come_hi))
    late = np.flatnonzero(wave_a[came] >= waves_r[read])
    if len(late):
        number, wave = int(number_r[read[late[0]]]), int(waves_r[read[late[0]]])
        raise Violation(f"move {number} relays in wave {wave} what arrives in wave {int(wave_a[came[late[0]]])}")


def _slices(case: Case, numbers: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(wave, position in ``numbers``, lo, hi) of every piece of every slice of the moves ``numbers``.

    Slice k has elements ``numel * k // slices`` to ``numel * (k + 1) // slices`` in the order of the region.
    """
    document = case.document
    moves, rows = document.moves, case.rows
    bounds = np.searchsorted(rows.move, np.arange(len(moves) + 1))
    counts = (bounds[1:] - bounds[:-1])[numbers]
    owner = np.repeat(np.arange(len(numbers), dtype=np.int64), counts)
    row = np.repeat(bounds[:-1][numbers], counts) + within(counts)
    lo, size = rows.lo[row], rows.hi[row] - rows.lo[row]
    # Offsets of the rows among the elements of their move, and the cut points, on one line.
    ends = np.cumsum(size)
    first_of = np.concatenate((np.zeros(1, dtype=np.int64), ends))[np.cumsum(counts) - counts]
    numel = np.concatenate((ends, np.zeros(1, dtype=np.int64)))[np.cumsum(counts) - 1] - first_of
    slices = moves.slices[numbers]
    cut_owner = np.repeat(np.arange(len(numbers), dtype=np.int64), slices)
    cuts = first_of[cut_owner] + numel[cut_owner] * within(slices) // slices[cut_owner]
    points = np.unique(np.concatenate((ends - size, cuts)))
    points = points[points < (int(ends[-1]) if len(ends) else 0)]
    stops = np.append(points[1:], ends[-1:])
    at = np.searchsorted(ends, points, side="right")
    begin = lo[at] + points - (ends - size)[at]
    who = owner[at]
    part = np.searchsorted(cuts, points, side="right") - 1 - (np.cumsum(slices) - slices)[who]
    return moves.wave[numbers][who] + part, who, begin, begin + (stops - points)
