"""The oracle: what every device must hold under a plan, element by element.

Built anew from the plan and from whole tensors with chunk, narrow, cat and pad, the way frameworks cut them; it shares
nothing with the compiler's layouts, cells, holdings and passes, so that an error there cannot hide here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.ir.program import Program
from nereus.ir.tensor import LogicalTensor
from nereus.models.tensors import logical_tensors
from nereus.runtime.faults import WRONG_ELEMENTS, Fault
from nereus.runtime.reference_values import Values
from nereus.runtime.state import DTYPES, DeviceState, StorageKey, key_of

#: Failures that are described one by one.
_MAX_TEXTS = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """One shard that must be on ``device``; ``bits``: its elements, 1-D, as integers of the dtype's width."""

    device: Device
    key: StorageKey
    model: str
    dtype: str
    host: bool
    bits: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    num_shards: int = 0
    num_elements: int = 0
    num_bytes: int = 0
    num_failures: int = 0
    failures: tuple[str, ...] = ()  # the first few

    @property
    def ok(self) -> bool:
        return self.num_failures == 0

    def __add__(self, other: CheckResult) -> CheckResult:
        return CheckResult(
            num_shards=self.num_shards + other.num_shards,
            num_elements=self.num_elements + other.num_elements,
            num_bytes=self.num_bytes + other.num_bytes,
            num_failures=self.num_failures + other.num_failures,
            failures=(*self.failures, *other.failures)[:_MAX_TEXTS],
        )


# -- which copies exist -----------------------------------------------------------------------------------------------


def stages_with_state(plan: Plan) -> tuple[tuple[Stage, Stage], ...]:
    """(stage, stage whose processes and layout it uses) of every copy of a model's state at a safe boundary.

    Stages of one model in the same processes share a copy, with the slots of the fullest and the name of the one that
    trains. No copy: services; in sync mode every copy of a training model that its trainer does not use, since it is
    an update behind; and what the plan discards while idle.
    """
    shared: dict[tuple[str, str], list[Stage]] = {}
    hosts: dict[str, Stage] = {}
    for stage in plan.stages:
        host = stage
        while host.with_:
            host = plan.stage(host.with_)
        if stage.service is None:
            hosts[host.name] = host
            shared.setdefault((host.name, stage.model), []).append(stage)
    for host_name, model in list(shared):
        # The base of a model with an adapter, in the same processes: its frozen weights are the base's very weights.
        base = plan.model(model).base
        adapted = base is not None and plan.model(base).lora and not plan.model(model).lora
        trains = any(user.kind == "train" for user in shared[host_name, model])
        if adapted and not trains and (host_name, base) in shared:
            del shared[host_name, model]
    training = {model for (_, model), users in shared.items() if any(u.kind == "train" for u in users)}
    found = []
    for (host_name, model), users in shared.items():
        fullest = max(users, key=lambda u: len(u.slots))
        lead = next((u for u in users if u.name == host_name), fullest)
        kinds = [u.kind for u in users]
        behind = plan.workload.mode == "sync" and model in training and "train" not in kinds
        if not behind and lead.idle != "discard":
            kind = "train" if "train" in kinds else lead.kind
            found.append((replace(lead, kind=kind, slots=fullest.slots), hosts[host_name]))
    return tuple(found)


def fresh_slots(old: Plan, new: Plan) -> frozenset[tuple[str, str]]:
    """(stage, slot) pairs of ``new`` that nothing in ``old`` can fill: the framework makes them."""
    before = {(stage.model, slot.name) for stage, _ in stages_with_state(old) for slot in stage.slots}
    return frozenset(
        (stage.name, slot.name)
        for stage, _ in stages_with_state(new)
        for slot in stage.slots
        if (stage.model, slot.name) not in before
    )


# -- what each device holds -------------------------------------------------------------------------------------------


def expected(plan: Plan, devices: Collection[Device], values: Values) -> Iterator[Expected]:
    """Every shard that ``plan`` puts on ``devices``; shards without elements are left out."""
    for stage, layout in stages_with_state(plan):
        coords = _coordinates(layout)
        ours = {d: c for d, c in zip(layout.ranks, coords, strict=True) if d in devices}
        if not ours:
            continue
        model = plan.model(stage.model)
        tensors = logical_tensors(model.arch, model.head, model.lora)
        num_experts = model.arch.moe.num_experts if model.arch.moe is not None else 0
        experts = _expert_coordinates(layout, coords) if num_experts else [dict[str, int]() for _ in coords]
        expert_of = dict(zip(layout.ranks, experts, strict=True))
        for slot in stage.slots:
            share = 1.0 if stage.idle == "offload" or stage.swap == "host" else slot.host_share * slot.host
            having = [t for t in tensors if _has(stage, slot.name, t)]
            whole = {t.name: values.bits(model.name, t.name, slot.name, slot.dtype, t.numel) for t in having}
            whole = {t.name: whole[t.name].view(t.shape) for t in having}
            for dense in dict.fromkeys((c["tp"], c["pp"]) for c in ours.values()):
                local = {
                    t.name: _tp_part(t, whole, layout, model.arch.num_kv_heads, layout.tp, dense[0])
                    for t in having
                    if dense[1] in _pipeline_homes(t, layout) and (t.expert is None or not _apart(layout))
                }
                alike = [d for d, c in zip(layout.ranks, coords, strict=True) if (c["tp"], c["pp"]) == dense]
                here = {d: place for place, d in enumerate(alike) if d in ours}
                shards = layout.fsdp or (len(alike) if layout.zero else 1)
                for device, name, bits, host in _homes(share, _dp_parts(layout, slot.name, local, here, shards)):
                    key = StorageKey(stage.name, name, slot.name)
                    yield Expected(device, key, stage.model, slot.dtype, host, bits)
            if not num_experts or not _apart(layout):
                continue
            spots = {d: (c["pp"], expert_of[d]["ep"], expert_of[d]["etp"]) for d, c in ours.items()}
            for pp, ep, etp in dict.fromkeys(spots.values()):
                owned = torch.chunk(torch.arange(num_experts), layout.ep)[ep].tolist()
                local = {
                    t.name: _tp_part(t, whole, layout, model.arch.num_kv_heads, _expert_tp(layout), etp)
                    for t in having
                    if t.expert in owned and pp in _pipeline_homes(t, layout)
                }
                here = {d: expert_of[d]["edp"] for d, spot in spots.items() if spot == (pp, ep, etp)}
                ranks_alike = len(layout.ranks) // (layout.pp * layout.ep * _expert_tp(layout))
                shards = min(layout.fsdp, ranks_alike) if layout.fsdp else (ranks_alike if layout.zero else 1)
                for device, name, bits, host in _homes(share, _dp_parts(layout, slot.name, local, here, shards)):
                    key = StorageKey(stage.name, name, slot.name)
                    yield Expected(device, key, stage.model, slot.dtype, host, bits)


def _homes(
    share: float, parts: Iterable[tuple[Device, str, torch.Tensor]]
) -> Iterator[tuple[Device, str, torch.Tensor, bool]]:
    """Parts that have elements, and whether each lies in host memory: of what an optimizer has on a device, the first
    ones, while those before are fewer elements than ``share`` of all."""
    of_device: dict[Device, list[tuple[str, torch.Tensor]]] = {}
    for device, name, bits in parts:
        if len(bits):
            of_device.setdefault(device, []).append((name, bits))
    for device, held in of_device.items():
        enough = sum(len(bits) for _, bits in held) * share
        before = 0
        for name, bits in held:
            yield device, name, bits, before < enough
            before += len(bits)


def _has(stage: Stage, slot: str, tensor: LogicalTensor) -> bool:
    """Frozen tensors have only a weight; Muon has one momentum for matrices of layers, Adam's two for the rest."""
    if slot == "weight" or not tensor.trainable:
        return slot == "weight"
    matrix = tensor.layer is not None and len(tensor.shape) == 2
    if (stage.optimizer or "").lower() == "muon" and slot in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        return matrix == (slot == "momentum_buffer")
    return True


def _expert_tp(stage: Stage) -> int:
    """Engines cut experts like everything else unless they spread them."""
    return stage.tp if stage.kind == "generate" and stage.ep == 1 and stage.etp == 1 else stage.etp


def _apart(stage: Stage) -> bool:
    """Whether experts have process groups, and so optimizer buffers, of their own."""
    return stage.ep > 1 or _expert_tp(stage) != stage.tp


def _coordinates(stage: Stage) -> list[dict[str, int]]:
    """Coordinate of every rank, by counting: the first axis of ``order`` turns fastest."""
    sizes = {"tp": stage.tp, "cp": stage.cp, "dp": stage.dp, "pp": stage.pp}
    slowest_first = [axis for axis in reversed(stage.order.split("-")) if axis in sizes]
    counted = product(*(range(sizes[axis]) for axis in slowest_first))
    return [dict(zip(slowest_first, digits, strict=True)) for digits in counted]


def _expert_coordinates(stage: Stage, coords: list[dict[str, int]]) -> list[dict[str, int]]:
    """The ranks of each pipeline stage, in their order, counted through anew with the expert degrees."""
    etp = _expert_tp(stage)
    sizes = {"tp": etp, "ep": stage.ep, "dp": len(coords) // (stage.pp * stage.ep * etp)}
    axes = [axis for axis in stage.order.split("-") if axis in sizes]
    if "ep" not in axes:
        axes.insert(axes.index("dp"), "ep")
    names = {"tp": "etp", "ep": "ep", "dp": "edp"}
    counted = [
        {names[axis]: digit for axis, digit in zip(reversed(axes), digits, strict=True)}
        for digits in product(*(range(sizes[axis]) for axis in reversed(axes)))
    ]
    seen: dict[int, int] = {}
    found = []
    for coord in coords:
        place = seen.get(coord["pp"], 0)
        seen[coord["pp"]] = place + 1
        found.append(counted[place])
    return found


def _pipeline_homes(tensor: LogicalTensor, stage: Stage) -> set[int]:
    homes = set()
    if tensor.first:
        homes.add(0)
    if tensor.last:
        homes.add(len(stage.pp_split) - 1)
    if tensor.layer is not None:
        chunks = stage.chunks or stage.pp_split
        owners = [number % stage.pp for number, count in enumerate(chunks) for _ in range(count)]
        homes.add(owners[tensor.layer])
    return homes


def _tp_part(
    tensor: LogicalTensor, all_whole: Mapping[str, torch.Tensor], stage: Stage, kv_heads: int, tp: int, rank: int
) -> torch.Tensor:
    """What tensor-parallel ``rank`` holds: an equal chunk, or its whole kv head where those are fewer.

    Megatron and the engines pad the vocabulary first, and Megatron cuts the fused q..q k v by rows.
    """
    whole = all_whole[tensor.name]
    if tensor.cut is None or tp == 1:
        return whole
    dim, units = tensor.cut.dim, tensor.cut.groups
    if tensor.name.split(".")[-2] in ("embed_tokens", "lm_head"):
        multiple = {"megatron": 128 * tp}.get(stage.backend or "", 64 if stage.engine in ("vllm", "sglang") else 1)
        missing = -len(whole) % multiple
        padded = torch.nn.functional.pad(whole, (0, 0, 0, missing))
        start = rank * (len(padded) // tp)
        return whole[start : min(start + len(padded) // tp, len(whole))]
    heads = ("q_proj", "k_proj", "v_proj")
    own = next((part for part in tensor.name.split(".") if part in heads), "")
    names = [tensor.name.replace(own, p) for p in heads] if own else []
    if stage.backend == "megatron" and own and all(name in all_whole for name in names):
        parts = []
        for number, name in enumerate(names):
            rows = all_whole[name]
            mark = torch.full((len(rows),), number)
            parts.append(list(zip(rows.chunk(kv_heads), mark.chunk(kv_heads), strict=True)))
        groups = list(zip(*parts, strict=True))
        marks = torch.cat([mark for group in groups for _, mark in group])
        values = torch.cat([rows for group in groups for rows, _ in group])
        size = len(marks) // tp
        mine = slice(rank * size, (rank + 1) * size)
        return values[mine][marks[mine] == names.index(tensor.name)]
    if tp > units:
        unit = whole.shape[dim] // units
        return whole.narrow(dim, (rank // (tp // units)) * unit, unit)
    return torch.chunk(whole, tp, dim=dim)[rank]


def _dp_parts(
    stage: Stage, slot: str, local: Mapping[str, torch.Tensor], place_of: Mapping[Device, int], shards: int
) -> Iterator[tuple[Device, str, torch.Tensor]]:
    """(device, tensor, its elements) for the ranks of one corner. ``place_of``: among the ranks that hold alike;
    ``shards``: over how many of them a sharded slot is spread."""
    if stage.fsdp:
        for name, tensor in local.items():
            chunks = torch.chunk(tensor, shards, dim=0)
            for device, place in place_of.items():
                member = place % shards
                if member < len(chunks):
                    yield device, name, chunks[member].reshape(-1)
    elif stage.zero >= 3:
        for name, tensor in local.items():
            flat = tensor.reshape(-1)
            size = _padded(len(flat), shards) // shards
            for device, place in place_of.items():
                yield device, name, flat[size * place : size * (place + 1)]
    elif stage.zero and slot != "weight":
        # One flat buffer of all tensors, padded, cut equally; then every tensor's piece of a cut.
        flat = torch.cat([t.reshape(-1) for t in local.values()]) if local else torch.empty(0)
        size = _padded(len(flat), shards) // shards
        for device, place in place_of.items():
            low, high, position = size * place, size * (place + 1), 0
            for name, tensor in local.items():
                begin, end = max(low, position), min(high, position + tensor.numel())
                position += tensor.numel()
                if begin < end:
                    yield device, name, flat[begin:end]
    else:
        for name, tensor in local.items():
            flat = tensor.reshape(-1)
            for device in place_of:
                yield device, name, flat


def _padded(numel: int, multiple: int) -> int:
    return numel + -numel % multiple


# -- filling and checking ---------------------------------------------------------------------------------------------


def fill(programs: Iterable[Program], plan: Plan, values: Values) -> dict[Device, DeviceState]:
    """States under ``plan`` in the storages that ``programs`` start from.

    Raises Fault where the programs' old storages are not exactly the shards of the plan.
    """
    states: dict[Device, DeviceState] = {}
    specs = {}
    for program in programs:
        states[program.device] = DeviceState(program.device)
        for spec in program.storages:
            if spec.role in ("old", "kept"):
                specs[program.device, key_of(spec)] = spec
    for shard in expected(plan, states.keys(), values):
        found = specs.pop((shard.device, shard.key), None)
        if found is None or found.numel != len(shard.bits) or found.dtype != shard.dtype:
            has = "nothing" if found is None else f"{found.numel} x {found.dtype}"
            text = f"the old plan has {len(shard.bits)} x {shard.dtype} of {shard.key}, its program {has}"
            raise Fault(WRONG_ELEMENTS, text, where=str(shard.device))
        states[shard.device].put(found, shard.bits.clone().view(DTYPES[shard.dtype]))
    for device, key in specs:
        raise Fault(WRONG_ELEMENTS, f"the program has {key}, the old plan has not", where=str(device))
    return states


def initialise(
    states: Mapping[Device, DeviceState], plan: Plan, values: Values, fresh: Collection[tuple[str, str]]
) -> None:
    """Give state that nothing held before its values, as a framework would; without a storage it stays missing."""
    if not fresh:
        return
    for shard in expected(plan, states.keys(), values):
        held = states[shard.device].held.get(shard.key)
        if (shard.key.stage, shard.key.slot) in fresh and held is not None and len(held.data) == len(shard.bits):
            held.data.copy_(shard.bits.view(held.data.dtype))


def check(states: Mapping[Device, DeviceState], plan: Plan, values: Values) -> CheckResult:
    """Compare every element of every shard of ``plan`` on these devices bit by bit; missing and left-over ones fail."""
    result = CheckResult()
    seen: set[tuple[Device, StorageKey]] = set()
    for shard in expected(plan, states.keys(), values):
        seen.add((shard.device, shard.key))
        result += _check_shard(states[shard.device], shard)
    for device, state in states.items():
        for key in state.held:
            if (device, key) not in seen:
                result += _failure(f"{device}: {key} is left over")
    return result


def _check_shard(state: DeviceState, shard: Expected) -> CheckResult:
    where = f"{shard.device}: {shard.key}"
    held = state.held.get(shard.key)
    if held is None:
        return _failure(f"{where} is missing")
    if held.data.dtype != DTYPES[shard.dtype] or held.spec.host != shard.host:
        memory = "host" if shard.host else "device"
        return _failure(f"{where} is {held.data.dtype}, or not in {memory} memory")
    if len(held.data) != len(shard.bits):
        return _failure(f"{where} has {len(held.data)} elements instead of {len(shard.bits)}")
    counted = CheckResult(
        num_shards=1, num_elements=len(shard.bits), num_bytes=len(shard.bits) * shard.bits.element_size()
    )
    got = held.data.view(shard.bits.dtype)
    if torch.equal(got, shard.bits):
        return counted
    wrong = torch.nonzero(got != shard.bits).reshape(-1)
    first = int(wrong[0])
    mask = (1 << 8 * shard.bits.element_size()) - 1
    text = (
        f"{where}: {len(wrong)} of {len(got)} elements are wrong, the first at {first}: "
        f"bits {int(got[first]) & mask:#x} instead of {int(shard.bits[first]) & mask:#x}"
    )
    return counted + _failure(text)


def _failure(text: str) -> CheckResult:
    return CheckResult(num_failures=1, failures=(text,))
