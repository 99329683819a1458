"""Small plans, and programs made from them element by element, without the compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nereus.ir.arch import Arch
from nereus.ir.cluster import Cluster, Device, Node
from nereus.ir.plan import Model, Plan, Stage, Workload
from nereus.ir.program import Blocks, LocalCopy, Message, Program, StorageSpec, Wave
from nereus.ir.units import TIB
from nereus.models.hardware import gpu_type
from nereus.models.slots import default_slots
from nereus.runtime.reference import expected, fresh_slots

ARCH = Arch(
    family="llama",
    num_layers=4,
    hidden=12,
    num_heads=8,
    num_kv_heads=2,
    head_dim=2,
    ffn=24,
    vocab=40,
    tied_embeddings=True,
)


def cluster(*sizes: int, first: int = 0) -> Cluster:
    kind = gpu_type("h100-sxm-80gb")
    nodes = tuple(
        Node(name=f"n{first + i}", gpu=kind, num_gpus=size, host_mem_bytes=2 * TIB, nic_bytes_per_s=4e11)
        for i, size in enumerate(sizes)
    )
    return Cluster(nodes=nodes)


def stage(owner: Model, kind: str, on: tuple[Device, ...], **more: Any) -> Stage:
    tp, pp, cp = more.get("tp", 1), more.get("pp", 1), more.get("cp", 1)
    layers = owner.arch.num_layers
    filled: dict[str, Any] = {
        "dp": len(on) // (tp * pp * cp),
        "pp_split": tuple(layers // pp + (i < layers % pp) for i in range(pp)),
        "slots": default_slots(trains=kind == "train", precision="bf16", optimizer="adam"),
        **more,
    }
    return Stage(model=owner.name, kind=kind, devices=on, **filled)


def plan(*stages: Stage, on: Cluster, models: tuple[Model, ...], mode: str = "sync") -> Plan:
    return Plan(cluster=on, models=models, workload=Workload(mode=mode), stages=stages)


def trainer(on: Cluster, count: int | None = None, *, arch: Arch = ARCH, **more: Any) -> Plan:
    """One actor that trains on the first ``count`` devices."""
    actor = Model(name="actor", arch=arch, source="tiny")
    return plan(stage(actor, "train", on.devices[:count], **more), on=on, models=(actor,))


def ppo(on: Cluster, *, actor: dict[str, Any], critic: dict[str, Any], ref: dict[str, Any]) -> Plan:
    """Three models; the critic sleeps in host memory."""
    policy = Model(name="actor", arch=ARCH, source="tiny")
    value = Model(name="critic", arch=replace(ARCH, tied_embeddings=False), source="tiny", head="value")
    frozen = Model(name="ref", arch=ARCH, source="tiny", frozen=True, base="actor")
    train = stage(policy, "train", actor.pop("on", on.devices), **actor)
    return plan(
        stage(policy, "generate", on.devices, tp=2, kv_cache_bytes=10**9),
        train,
        replace(
            train, kind="logprob", with_=train.name, slots=default_slots(trains=False, precision="bf16", optimizer=None)
        ),
        stage(value, "train", critic.pop("on", on.devices), idle="offload", **critic),
        stage(frozen, "infer", ref.pop("on", on.devices), **ref),
        on=on,
        models=(policy, value, frozen),
    )


class Indices:
    """In the place of values: every element is its own global index."""

    def bits(self, model: str, tensor: str, slot: str, dtype: str, numel: int) -> torch.Tensor:
        return torch.arange(numel, dtype=torch.int64)


def living(old: Plan, new: Plan) -> tuple[Device, ...]:
    return tuple(dict.fromkeys((*(d for d in old.cluster.devices if d in new.cluster.devices), *new.cluster.devices)))


def build_programs(
    old: Plan, new: Plan, *, mode: str = "reversible", num_waves: int = 3, seed: int = 0, derive: bool = True
) -> dict[Device, Program]:
    """Every element of every new shard from a holder of that element: from the same device where it has one."""
    devices = living(old, new)
    indices: Any = Indices()
    before = {(s.device, s.key): s for s in expected(old, devices, indices)}
    after = {(s.device, s.key): s for s in expected(new, devices, indices)}
    kept = {
        k
        for k, s in after.items()
        if k in before
        and torch.equal(before[k].bits, s.bits)
        and (before[k].dtype, before[k].host) == (s.dtype, s.host)
    }
    specs: dict[Device, list[StorageSpec]] = {d: [] for d in devices}
    ids: dict[tuple[str, Any], int] = {}
    for role, shards in (("old", before), ("new", after)):
        for k, s in shards.items():
            if k in kept and role == "new":
                ids[role, k] = ids["old", k]
                continue
            mine = specs[s.device]
            ids[role, k] = len(mine)
            mine.append(
                StorageSpec(
                    id=len(mine),
                    role="kept" if k in kept else role,
                    stage=s.key.stage,
                    model=s.model,
                    tensor=s.key.tensor,
                    slot=s.key.slot,
                    dtype=s.dtype,
                    host=s.host,
                    tensor_shape=(1,),
                    row_lo=int(s.bits[0]),
                    row_hi=int(s.bits[-1]) + 1,
                    col_lo=0,
                    col_hi=1,
                    start=0,
                    stop=len(s.bits),
                )
            )
    holders: dict[tuple[str, str, str], list[Any]] = {}
    for k, s in before.items():
        holders.setdefault((s.model, s.key.tensor, s.key.slot), []).append((k, s.bits.numpy()))
    fresh = fresh_slots(old, new)
    copies: dict[Device, list[LocalCopy]] = {d: [] for d in devices}
    derives: dict[Device, list[LocalCopy]] = {d: [] for d in devices}
    wires: dict[tuple[int, Device, Device], list[tuple[Any, Any]]] = {}
    rng = np.random.default_rng(seed)
    for k, s in after.items():
        if k in kept or (s.key.stage, s.key.slot) in fresh:
            continue
        wanted = s.bits.numpy()
        missing = np.ones(len(wanted), dtype=bool)
        wave = int(rng.integers(num_waves))
        found = holders[s.model, s.key.tensor, s.key.slot]
        order = [h for h in found if h[0][0] == s.device]
        others = [h for h in found if h[0][0] != s.device]
        order += [others[i] for i in rng.permutation(len(others))]
        for holder, have in order:
            both, target, source = np.intersect1d(wanted, have, return_indices=True)
            use = missing[target]
            if not use.any():
                continue
            if derive and s.key.slot == "weight" and holder[0] != s.device:
                master = after.get((s.device, replace(s.key, slot="master")))
                if master is not None:
                    _, t, m = np.intersect1d(wanted, master.bits.numpy(), return_indices=True)
                    chosen = missing[t]
                    if chosen.any():
                        src, dst = _runs(
                            ids["new", (s.device, master.key)], m[chosen], ids["new", k], t[chosen], wanted[t[chosen]]
                        )
                        derives[s.device].append(LocalCopy(src=Blocks(src), dst=Blocks(dst), cast=True))
                        missing[t] = False
                        use = missing[target]
                        if not use.any():
                            continue
            src, dst = _runs(ids["old", holder], source[use], ids["new", k], target[use], both[use])
            if holder[0] == s.device:
                copies[s.device].append(LocalCopy(src=Blocks(src), dst=Blocks(dst)))
            else:
                wires.setdefault((wave, holder[0], s.device), []).append((src, dst))
            missing[target] = False
        assert not missing.any(), f"nobody holds all of {s.key}"
    programs = {}
    tags = {key: number for number, key in enumerate(sorted(wires))}
    for d in devices:
        waves = []
        released = tuple(s.id for s in specs[d] if s.role == "old")
        for w in range(num_waves):
            out = [k for k in tags if k[0] == w and k[1] == d]
            into = [k for k in tags if k[0] == w and k[2] == d]
            last = w == num_waves - 1
            waves.append(
                Wave(
                    acquire=tuple(s.id for s in specs[d] if s.role == "new") if w == 0 else (),
                    copies=tuple(copies[d]) if w == 0 else (),
                    sends=tuple(Message(tag=tags[k], peer=k[2], blocks=_all(p[0] for p in wires[k])) for k in out),
                    receives=tuple(Message(tag=tags[k], peer=k[1], blocks=_all(p[1] for p in wires[k])) for k in into),
                    derives=tuple(derives[d]) if last else (),
                    release=released if last and mode == "tight" else (),
                )
            )
        programs[d] = Program(
            device=d,
            mode=mode,
            digest="0" * 64,
            storages=tuple(specs[d]),
            waves=tuple(waves),
            commit_release=() if mode == "tight" else released,
        )
    return programs


def _all(tables: Any) -> Blocks:
    return Blocks(np.concatenate(list(tables)))


def _runs(src: int, source: Any, dst: int, target: Any, index: Any) -> tuple[Any, Any]:
    """Blocks of elements that follow each other on both sides and in the tensor."""
    order = np.argsort(target)
    source, target, index = source[order], target[order], index[order]
    steps = (np.diff(source) != 1) | (np.diff(target) != 1) | (np.diff(index) != 1)
    first = np.flatnonzero(np.concatenate(([True], steps)))
    length = np.diff(np.concatenate((first, [len(index)])))
    one = np.ones(len(first), dtype=np.int64)
    columns = (one, length, length, index[first], length)
    return (
        np.stack((one * src, source[first], *columns), axis=1),
        np.stack((one * dst, target[first], *columns), axis=1),
    )
