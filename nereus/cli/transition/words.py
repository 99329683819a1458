"""A change of a model-stage in words: degrees, primitives, settings, placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nereus.cli.output import GLUE
from nereus.cli.transition.facts import PlanChange, StageFlow
from nereus.ir.cluster import Device
from nereus.ir.holdings import Topology
from nereus.ir.plan import Stage
from nereus.ir.transition import INTER, INTRA
from nereus.ir.units import GIB, TIB, format_bytes, format_seconds
from nereus.lang.ranges import compress_devices, compress_names
from nereus.passes.lower import Primitive, StageChange
from nereus.passes.place import Choice

#: Added seconds per RL step, or of a transfer, below which two placements count as equally fast.
_SAME_S = 1e-6


def glue(text: str) -> str:
    """A phrase that stays on one line."""
    return text.replace(" ", GLUE)


#: Fields of a plan whose key in the plan language is another.
_PLAN_KEYS = {
    "host_mem_bytes": "host_mem",
    "nic_bytes_per_s": "nic",
    "rails": "rails",
    "num_gpus": "gpus",
    "min_gpus": "min",
    "max_gpus": "max",
    "standby_gpus": "standby",
    "notice_s": "notice",
}


def plan_change(change: PlanChange) -> str:
    """A fact outside of stages, in the words of the plan language: ``n0.nic 400 GB/s -> 200 GB/s``."""
    if change.part == "cluster" and change.new == "lost":
        return f"{change.what} is lost"
    if change.old is None and change.new == "there":
        return f"{change.what} is new"
    if change.old == "there" and change.new is None:
        return f"{change.what} is removed"
    if change.part == "cluster" and change.old is None and isinstance(change.new, str):
        return f"{change.what} joins ({change.new})"
    path, _, name = change.what.rpartition(".")
    old, new = _amount(name, change.old), _amount(name, change.new)
    if old == new:  # alike to three digits
        old, new = _amount(name, change.old, exact=True), _amount(name, change.new, exact=True)
    return f"{path}{'.' if path else ''}{_PLAN_KEYS.get(name, name)} {old} -> {new}"


def _amount(name: str, value: object, *, exact: bool = False) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, int | float):
        return str(value)
    if exact:
        unit = next(
            (u for end, u in (("_bytes", " B"), ("_bytes_per_s", " B/s"), ("_s", " s")) if name.endswith(end)), ""
        )
        return f"{value:,.15g}{unit}"
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_bytes"):
        size = next(((n, u) for n, u in ((TIB, "TiB"), (GIB, "GiB")) if value >= n and value % n == 0), None)
        return format_bytes(value) if size is None else f"{int(value) // size[0]:,} {size[1]}"
    if name.endswith("_s"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def degrees(change: StageChange) -> str:
    old, new = change.old, change.new
    sides = [stage for stage in (old, new) if stage is not None]
    if any(stage.service is not None for stage in sides):
        return " -> ".join(f"service {s.service}" if s.service is not None else _degrees(s, [s]) for s in sides)
    texts = [_degrees(stage, sides) for stage in sides]
    return texts[0] if len(set(texts)) == 1 else " -> ".join(texts)


def _degrees(stage: Stage, sides: Sequence[Stage]) -> str:
    """dp and tp always, others where one side has more than 1; sharding over dp where there is some."""
    shown = [f"dp {stage.dp}", f"tp {stage.tp}"]
    for axis in ("pp", "cp", "ep", "etp", "vp"):
        if any(getattr(side, axis) > 1 for side in sides):
            shown.append(f"{axis} {getattr(stage, axis)}")
    if any(side.ep > 1 for side in sides):
        shown.append(f"expert dp {stage.expert_dp}")
    splits = _splits(sides)
    if len(set(splits)) > 1 and len({side.pp for side in sides}) == 1:
        shown.append(f"pp_split {splits[sides.index(stage)]}")
    for key in ("zero", "fsdp"):
        if any(getattr(side, key) for side in sides):
            shown.append(f"{key} {_sharded(key, getattr(stage, key))}")
    return glue(" ".join(shown))


def _splits(sides: Sequence[Stage]) -> tuple[str, ...]:
    """Layers of every pipeline stage; where all sides have equally many chunks, of every chunk."""
    chunks = len({side.vp for side in sides}) == 1
    return tuple("-".join(map(str, (side.chunks if chunks else ()) or side.pp_split)) for side in sides)


def _sharded(key: str, value: int) -> str:
    """As the plan language says it: no sharding is ``zero 0``, but ``fsdp off``."""
    return "off" if key == "fsdp" and not value else str(value)


def where(change: StageChange, num_gpus: dict[str, int]) -> str:
    """``16 GPUs n[0-1], order tp-cp-pp-dp``, with both sides where they differ."""
    sides = [s for s in (change.old, change.new) if s is not None and s.service is None]
    if not sides:
        return ""
    counts = list(dict.fromkeys(f"{len(s.ranks):,}" for s in sides))
    lists = list(dict.fromkeys(" ".join(compress_devices(s.devices, num_gpus)) for s in sides))
    orders = list(dict.fromkeys(s.order for s in sides))
    return f"{glue(' -> '.join(counts) + ' GPUs')} {' -> '.join(lists)}, {glue('order ' + ' -> '.join(orders))}"


def primitive_words(change: StageChange, topology: Topology) -> str:
    """All primitives of a change in one sentence; empty where there is none."""
    return "; ".join(_primitive(p, change, topology) for p in change.primitives)


def _primitive(primitive: Primitive, change: StageChange, topology: Topology) -> str:
    before, after = (glue("tp {} pp {}".format(*pair)) for pair in (primitive.before, primitive.after))
    count = f"{primitive.count:,} x{GLUE}"
    match primitive.kind:
        case "split":
            return f"split {count}({before}) into {after}"
        case "merge":
            return f"merge into {count}({after})"
        case "extend":
            return f"extend to {count}({after}) on {_list(primitive.devices, topology)}"
        case "destroy":
            lost = {node.name for node, alive in zip(topology.nodes, topology.alive, strict=True) if not alive}
            how = "lost with" if {device.node for device in primitive.devices} <= lost else "released on"
            return f"destroy {count}({before}) {how} {_list(primitive.devices, topology)}"
    return _reshape_words(change)


def _reshape_words(change: StageChange) -> str:
    old, new = change.old, change.new
    assert old is not None and new is not None
    reasons = []
    for key in ("cp", "ep", "etp", "vp", "zero", "fsdp"):
        a, b = getattr(old, key), getattr(new, key)
        if a != b:
            reasons.append(f"{key} {_sharded(key, a)} -> {_sharded(key, b)}")
    before, after = _splits((old, new))
    if old.pp == new.pp and before != after:
        reasons.append(f"pp_split {before} -> {after}")
    if old.num_shards != new.num_shards:
        reasons.append(f"{old.num_shards:,} -> {new.num_shards:,} shards of each replica's state")
    if not reasons:
        reasons.append("degrees that do not divide each other")
    return "reshape: " + ", ".join(glue(reason) for reason in reasons)


def settings(change: StageChange) -> str:
    """Settings that change."""
    return ", ".join(glue(note) for note in change.notes if not note.startswith("order "))


def flow_words(flow: StageFlow, topology: Topology) -> str:
    """What moves: bytes with their bound, per link class, into each node."""
    if not flow.moved_bytes:
        return "no byte moves"
    text = f"moves {format_bytes(flow.moved_bytes)} (bound {format_bytes(flow.bound_moved_bytes)})"
    names = {INTRA: "inside nodes", INTER: "between nodes"}
    parts = [
        f"{format_bytes(num_bytes)} {names.get(link, 'over host links')}"
        for link, num_bytes in flow.bytes_by_link.items()
        if num_bytes
    ]
    text = f"{glue(text)}: {', '.join(glue(part) for part in parts)}"
    if flow.node_in:
        most = flow.node_in_bytes_max
        least = min(flow.node_in.values())
        names_of = compress_names([topology.nodes[node].name for node in sorted(flow.node_in)])
        about = "" if format_bytes(most) == format_bytes(least) else "up to "
        bound = flow.bound_node_in_bytes_max
        bound_text = "" if bound is None else f" (bound {format_bytes(bound)})"
        each = "each of " if len(flow.node_in) > 1 else ""
        into = f"{about}{format_bytes(most)} into {each}{', '.join(names_of)}{bound_text}"
        text += f"; {glue(into) if len(names_of) < 3 else into}"
    return text


def stays_words(flow: StageFlow) -> str:
    parts = []
    if flow.kept_bytes:
        text = f"{format_bytes(flow.kept_bytes)} stay in place"
        copied = flow.kept_bytes - flow.untouched_bytes
        if flow.untouched_bytes < copied // 100:
            text += ", repacked there"
        elif copied > 0:
            text += f", {format_bytes(copied)} of it repacked there"
        parts.append(text)
    if flow.derived_bytes:
        parts.append(f"{format_bytes(flow.derived_bytes)} of weight derived from the local fp32 master")
    if flow.local_bytes:
        parts.append(f"{format_bytes(flow.local_bytes)} copied inside host memory")
    return "; ".join(parts)


def placement_words(choice: Choice) -> str:
    """Why the stage lies where it does; empty where there was no choice."""
    if choice.chosen == "unchanged" or (choice.chosen == "listed" and not choice.moved_bytes):
        return ""
    reasons = {
        "pinned": "placement pinned by the plan",
        "listed": "placed as listed; nothing costs less",
        "bytes": "placed for the fewest bytes",
        "nodes": "placed for the fewest bytes into the nodes",
        "devices": "nodes as listed, GPUs inside them reassigned",
    }
    text = reasons.get(choice.chosen, choice.chosen)
    gains = []
    if choice.listed_moved_bytes != choice.moved_bytes:
        gains.append(f"{format_bytes(choice.listed_moved_bytes)} would move")
    if abs(choice.listed_step_s - choice.step_s) > _SAME_S:
        more = choice.listed_step_s - choice.step_s
        gains.append(f"each step takes {format_seconds(abs(more))} {'longer' if more > 0 else 'less'}")
    if gains:
        text += f"; as listed, {' and '.join(gains)}"
    if choice.moved_bytes > choice.best_moved_bytes:
        least = "least" if choice.exact else "lower bound"
        text += f"; {least} over all placements {format_bytes(choice.best_moved_bytes)}"
    return text


def _list(devices: Iterable[Device], topology: Topology) -> str:
    """In cluster order, whatever the rank order is."""
    ordered = sorted(devices, key=topology.index().__getitem__)
    return " ".join(compress_devices(ordered, {node.name: node.num_gpus for node in topology.nodes}))
