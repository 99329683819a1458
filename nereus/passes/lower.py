"""lower: the change of every model-stage as primitives, the explanation that people read.

The paper's four cover DP x TP x PP: Split and Merge go through the largest layout that both sides split into, Extend
copies a replica to devices outside, Destroy releases one. Reshape covers what they cannot say: same devices, other
cp, ep, ZeRO, FSDP, pp_split, or degrees that do not divide. Execution never follows the chain: it would move 2-4
times the bytes; see ``diff`` and ``route``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import gcd

from nereus.ir.cluster import Device
from nereus.ir.layout import layout_of
from nereus.ir.plan import Plan, Replicas, Slot, Stage
from nereus.ir.units import GIB

MARKS = {
    "keep": "=",
    "move": ">",
    "split": "/",
    "merge": "&",
    "extend": "+",
    "destroy": "-",
    "reshape": "#",
    "retune": "~",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """``count`` EMUs of layout ``before`` (tp, pp) become EMUs of ``after``; equal for extend and destroy."""

    kind: str  # split | merge | extend | destroy | reshape
    count: int
    before: tuple[int, int]
    after: tuple[int, int]
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChange:
    stage: str
    marks: str  # one sign per kind of change, see MARKS
    old: Stage | None
    new: Stage | None
    primitives: tuple[Primitive, ...]
    notes: tuple[str, ...]  # settings that change without moving anything

    @property
    def changed(self) -> bool:
        return self.marks != MARKS["keep"]


_GEOMETRY = ("cp", "ep", "etp", "vp", "zero", "fsdp", "pp_split", "chunks")
#: They follow from pp where it changes.
_SPLITS = ("pp_split", "chunks")
#: Fields of a stage that the primitives and degrees already tell, or that are no setting.
_TOLD = {"model", "kind", "devices", "tp", "pp", "dp", "place", "slots", "span", "key_spans", *_GEOMETRY}
_KEYS = {"with_": "with", "kv_cache_bytes": "kv_cache", "mem_fraction": "mem"}


def lower(old: Plan, new: Plan) -> tuple[StageChange, ...]:
    names = dict.fromkeys([*(s.name for s in new.stages), *(s.name for s in old.stages)])
    return tuple(_change(old, new, name) for name in names)


def _change(old: Plan, new: Plan, name: str) -> StageChange:
    before, after = old.find_stage(name), new.find_stage(name)
    if before is None or after is None:
        one = after or before
        assert one is not None
        mark = MARKS["extend" if before is None else "destroy"]
        return StageChange(stage=name, marks=mark, old=before, new=after, primitives=(), notes=())
    notes = tuple(_setting_notes(old, new, before, after))
    if before.service or after.service:
        mark = MARKS["retune" if notes else "keep"]
        return StageChange(stage=name, marks=mark, old=before, new=after, primitives=(), notes=notes)
    primitives = _primitives(old, before, after, lost=set(new.cluster.lost))
    marks = "".join(dict.fromkeys(MARKS[p.kind] for p in primitives))
    if not marks and before.ranks != after.ranks:
        marks = MARKS["move"]
    if not marks and notes:
        marks = MARKS["retune"]
    return StageChange(
        stage=name, marks=marks or MARKS["keep"], old=before, new=after, primitives=primitives, notes=notes
    )


def emus(stage: Stage) -> tuple[frozenset[Device], ...]:
    """Device sets of the stage's complete replicas: closed under tp, pp, cp, ep and every slot's shard groups."""
    coords, unit_of_dp = layout_of(stage).coordinates(), stage.unit_of_dp
    sets: dict[int, set[Device]] = {}
    for rank, device in enumerate(stage.ranks):
        sets.setdefault(unit_of_dp[int(coords["dp"][rank])], set()).add(device)
    return tuple(frozenset(sets[i]) for i in sorted(sets))


def common_layout(before: Stage, after: Stage) -> tuple[int, int] | None:
    """Largest (tp, pp) that both sides split into: tp the smaller side's, pp the greatest common divisor; None where
    the degrees do not divide."""
    tp, pp = gcd(before.tp, after.tp), gcd(before.pp, after.pp)
    if tp not in (before.tp, after.tp) or pp not in (before.pp, after.pp):
        return None
    return tp, pp


def _primitives(old: Plan, before: Stage, after: Stage, lost: set[str]) -> tuple[Primitive, ...]:
    result: list[Primitive] = []
    living = tuple(d for d in before.ranks if d.node not in lost)
    stays, had = set(after.ranks), set(before.ranks)
    gone = tuple(d for d in before.ranks if d not in stays)
    fresh = tuple(d for d in after.ranks if d not in had)
    old_layout, new_layout = (before.tp, before.pp), (after.tp, after.pp)
    reshaped = any(getattr(before, key) != getattr(after, key) for key in _GEOMETRY if key not in _SPLITS)
    uneven = before.pp == after.pp and any(getattr(before, key) != getattr(after, key) for key in _SPLITS)
    common = common_layout(before, after)
    # A ZeRO group grows or shrinks with dp: its shards are cut anew even where nothing else changes.
    shards = before.num_shards != after.num_shards
    if common is None or reshaped or uneven or shards:
        result.append(
            Primitive(kind="reshape", count=after.num_emus, before=old_layout, after=new_layout, devices=after.ranks)
        )
    if common is None:
        common = gcd(before.tp, after.tp), gcd(before.pp, after.pp)
    unit = common[0] * common[1]
    old_units, new_units = len(before.ranks) // unit, len(after.ranks) // unit
    if old_layout != common:
        count = len(before.ranks) // (old_layout[0] * old_layout[1])
        result.append(Primitive(kind="split", count=count, before=old_layout, after=common, devices=living))
    if gone:
        result.append(
            Primitive(kind="destroy", count=max(1, len(gone) // unit), before=common, after=common, devices=gone)
        )
    if fresh:
        result.append(
            Primitive(kind="extend", count=max(1, len(fresh) // unit), before=common, after=common, devices=fresh)
        )
    if new_layout != common:
        count = len(after.ranks) // (new_layout[0] * new_layout[1])
        result.append(Primitive(kind="merge", count=count, before=common, after=new_layout, devices=after.ranks))
    assert old_units and new_units, "a stage without a single unit"
    return tuple(result)


def _setting_notes(old: Plan, new: Plan, before: Stage, after: Stage) -> Iterable[str]:
    """Every setting that differs, as ``key old -> new`` in the words of the plan language."""
    for field in fields(Stage):
        a, b = getattr(before, field.name), getattr(after, field.name)
        if field.name == "sp" and before.tp != after.tp:
            continue  # follows tp by default
        if field.name not in _TOLD and a != b:
            yield f"{_KEYS.get(field.name, field.name)} {_value(field.name, a)} -> {_value(field.name, b)}"
    yield from _slot_notes(before, after)
    if old.workload.mode != new.workload.mode and after.kind == "generate":
        yield f"mode {old.workload.mode} -> {new.workload.mode}"
    if before.is_train and after.is_train and before.with_ is None and not (before.max_tokens or after.max_tokens):
        a, b = (p.workload.mini_batch // (s.dp * s.micro_batch) for p, s in ((old, before), (new, after)))
        if a != b:
            same = "same" if old.workload.mini_batch == new.workload.mini_batch else "new"
            yield f"accumulation {a} -> {b}, {same} mini_batch"


def _slot_notes(before: Stage, after: Stage) -> Iterable[str]:
    slots = [{slot.name: slot for slot in stage.slots} for stage in (before, after)]
    for name in dict.fromkeys([*slots[0], *slots[1]]):
        a, b = (side.get(name) for side in slots)
        if a != b:
            yield f"state {name} {_slot(a)} -> {_slot(b)}"


def _slot(slot: Slot | None) -> str:
    return "none" if slot is None else slot.text


def _value(key: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Replicas):
        return f"{{ min {value.min} dormant {value.dormant} }}"
    if key == "kv_cache_bytes" and isinstance(value, int):
        return f"{value / GIB:.4g} GiB"  # as people write it
    return str(value)
