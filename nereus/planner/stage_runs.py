"""What a stage of a plan asks of the cost model: a training or forward run, or an engine that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from nereus.ir.cluster import Node
from nereus.ir.plan import Plan, Stage
from nereus.models.tensors import num_params
from nereus.planner.generation import Serving
from nereus.planner.labels import engine_labels, step_labels
from nereus.planner.machines import machine_of
from nereus.planner.runs import RECOMPUTE, SHARDING, Columns, Floats, Run, columns

#: Gradients are kept in fp32 (the plan language's default).
_GRADIENT_BYTES = 4

#: Fields of stages that differ from a plan's, by stage: ``micro_batch``, ``recompute``, ``zero``.
Settings: TypeAlias = Mapping[str, Mapping[str, int | str]]


def run_of_stage(plan: Plan, stage: Stage, source: str = "") -> Run:
    """One optimizer update of a train stage; one pass over all samples of an RL step of any other."""
    model = plan.model(stage.model)
    arch, node = model.arch, _slowest(plan, stage, "bf16_tflops", "hbm_bytes_per_s")
    moe = arch.moe
    samples = _samples(plan, stage)
    return Run(
        machine=machine_of(node.gpu, "16", node),
        labels=step_labels(source, node.gpu, "16", sharded=bool(stage.fsdp) or stage.zero >= 3),
        layers=arch.num_layers,
        hidden=arch.hidden,
        heads=arch.num_heads,
        kv_heads=arch.num_kv_heads,
        ffn=moe.expert_ffn if moe else arch.ffn,
        mlp_matrices=3,
        vocab=1 if model.head == "value" else arch.vocab,
        params=float(num_params(arch, model.head)),
        expert_params=float(_expert_params(plan, stage)),
        experts_per_token=moe.experts_per_token if moe else 1,
        shared_experts=moe.num_shared_experts if moe else 0,
        seq_len=plan.workload.seq_len,
        global_batch=samples,
        micro_batch=min(_micro_batch(plan, stage), max(1.0, samples / stage.dp)),
        gpus=len(stage.devices),
        tp=stage.tp,
        pp=stage.pp,
        dp=stage.dp,
        cp=stage.cp,
        vp=stage.vp,
        ep=stage.ep,
        recompute=stage.recompute if stage.is_train else "none",
        sharding="full" if stage.fsdp else SHARDING[stage.zero],
        gradient_bytes=_GRADIENT_BYTES,
        flash=True,
        sequence_parallel=stage.sp or stage.tp == 1,
        forward_only=not stage.is_train,
    )


def columns_of_stage(name: str, layouts: Sequence[tuple[Plan, Settings]]) -> tuple[Columns, list[tuple[str, ...]]]:
    """(numbers, labels) of one stage, no engine, as ``run_of_stage`` gives them for each: plans of one model, workload
    and GPUs, with other settings on top. A search asks for thousands, which differ in their layout alone."""
    plan = layouts[0][0]
    stage = plan.stage(name)
    run = run_of_stage(plan, stage)
    bases = {id(base): base for base, _ in layouts}
    place = {key: number for number, key in enumerate(bases)}
    of_base = [base.stage(name) for base in bases.values()]
    at = np.array([place[id(base)] for base, _ in layouts])
    own = [settings.get(name, {}) for _, settings in layouts]

    def numbers(key: str) -> Floats:
        found: Floats = np.array([getattr(of, key) for of in of_base], float)[at]
        return found

    def tuned(key: str, number: Callable[[Any], float] = float) -> Floats:
        written = [number(getattr(of, key)) for of in of_base]
        return np.array([number(keys[key]) if key in keys else written[n] for n, keys in zip(at, own, strict=True)])

    dp, fsdp, zero = numbers("dp"), numbers("fsdp") > 0, tuned("zero")
    samples = _samples(plan, stage)
    micro_batch = tuned("micro_batch") if stage.max_tokens is None else _micro_batch(plan, stage)
    micro_batch = np.minimum(micro_batch, np.maximum(1.0, samples / dp))
    recompute = tuned("recompute", RECOMPUTE.index) if stage.is_train else np.zeros(len(dp))
    found = columns([run]).wide(len(layouts)) | {
        **{key: numbers(key) for key in ("tp", "pp", "cp", "vp", "ep")},
        "dp": dp,
        "sequence_parallel": np.maximum(numbers("sp"), numbers("tp") == 1),
        "micro_batch": micro_batch,
        "num_microbatches": np.maximum(samples / (dp * micro_batch), 1.0),
        "recompute": recompute,
        "sharding": np.where(fsdp, SHARDING.index("full"), zero),
    }
    gpu = _slowest(plan, stage, "bf16_tflops", "hbm_bytes_per_s").gpu
    labels = {sharded: step_labels("", gpu, "16", sharded=sharded) for sharded in (False, True)}
    return Columns(**found), [labels[sharded] for sharded in (fsdp | (zero >= 3)).tolist()]


def _samples(plan: Plan, stage: Stage) -> int:
    return plan.workload.mini_batch if stage.is_train else plan.workload.num_samples


def _micro_batch(plan: Plan, stage: Stage) -> float:
    if stage.max_tokens is None:
        return stage.micro_batch
    return max(1.0, stage.max_tokens / plan.workload.seq_len)


def serving_of_stage(plan: Plan, stage: Stage, batch: float) -> Serving:
    """One engine of a generate stage with ``batch`` sequences at once."""
    model = plan.model(stage.model)
    arch, node = model.arch, _slowest(plan, stage, "hbm_bytes_per_s", "bf16_tflops")
    fp8 = any(slot.name == "weight" and slot.dtype == "fp8" for slot in stage.slots)
    format = "fp8" if fp8 else "16"
    params, experts, moe = float(num_params(arch, model.head)), _expert_params(plan, stage), arch.moe
    active = params - experts + (experts * moe.experts_per_token / moe.num_experts if moe else 0)
    return Serving(
        machine=machine_of(node.gpu, format, node),
        labels=engine_labels(stage.engine or "", stage.model, node.gpu, format),
        layers=arch.num_layers,
        hidden=arch.hidden,
        heads=arch.num_heads,
        kv_heads=arch.num_kv_heads,
        active_params=active,
        params=params,
        weight_bytes=1 if fp8 else 2,
        cache_bytes=2,
        tp=stage.tp,
        pp=stage.pp,
        prompt_len=plan.workload.prompt_len,
        response_len=plan.workload.response_len,
        batch=batch,
    )


def _slowest(plan: Plan, stage: Stage, *rates: str) -> Node:
    """All wait for the slowest GPU, by the first of ``rates`` that differs, and for the narrowest NIC of those."""
    names = {device.node for device in stage.devices}
    nodes = [node for node in plan.cluster.nodes if node.name in names]
    rate = attrgetter(*rates)
    return min(nodes, key=lambda node: (*rate(node.gpu), node.nic_bytes_per_s / node.num_gpus))


def _expert_params(plan: Plan, stage: Stage) -> int:
    arch = plan.model(stage.model).arch
    if arch.moe is None:
        return 0
    layers = arch.num_layers - arch.moe.first_dense_layers
    return layers * arch.moe.num_experts * 3 * arch.hidden * arch.moe.expert_ffn
