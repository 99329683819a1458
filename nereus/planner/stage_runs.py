"""What a stage of a plan asks of the cost model: a training or forward run, or an engine that generates."""

from __future__ import annotations

from collections.abc import Callable

from nereus.ir.cluster import GpuType, Node
from nereus.ir.plan import Plan, Stage
from nereus.models.tensors import num_params
from nereus.planner.generation import Serving
from nereus.planner.labels import engine_labels, step_labels
from nereus.planner.machines import machine_of
from nereus.planner.runs import SHARDING, Run

#: Gradients are kept in fp32 (the plan language's default).
_GRADIENT_BYTES = 4


def run_of_stage(plan: Plan, stage: Stage, source: str = "") -> Run:
    """One optimizer update of a train stage; one pass over all samples of an RL step of any other."""
    model = plan.model(stage.model)
    arch, node = model.arch, _slowest(plan, stage, lambda gpu: (gpu.bf16_tflops, gpu.hbm_bytes_per_s))
    moe = arch.moe
    sharded = bool(stage.fsdp) or stage.zero >= 3
    micro_batch: float = stage.micro_batch
    if stage.max_tokens is not None:
        micro_batch = max(1.0, stage.max_tokens / plan.workload.seq_len)
    samples = plan.workload.mini_batch if stage.is_train else plan.workload.num_samples
    return Run(
        machine=machine_of(node.gpu, "16", node),
        labels=step_labels(source, node.gpu, "16", sharded=sharded),
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
        micro_batch=min(micro_batch, max(1.0, samples / stage.dp)),
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
        forward_only=not stage.is_train,
    )


def serving_of_stage(plan: Plan, stage: Stage, batch: float) -> Serving:
    """One engine of a generate stage with ``batch`` sequences at once."""
    model = plan.model(stage.model)
    arch, node = model.arch, _slowest(plan, stage, lambda gpu: (gpu.hbm_bytes_per_s, gpu.bf16_tflops))
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


def _slowest(plan: Plan, stage: Stage, rates: Callable[[GpuType], tuple[float, float]]) -> Node:
    """All wait for the slowest GPU, and for the narrowest NIC of those."""
    names = {device.node for device in stage.devices}
    nodes = [node for node in plan.cluster.nodes if node.name in names]
    return min(nodes, key=lambda node: (*rates(node.gpu), node.nic_bytes_per_s / node.num_gpus))


def _expert_params(plan: Plan, stage: Stage) -> int:
    arch = plan.model(stage.model).arch
    if arch.moe is None:
        return 0
    layers = arch.num_layers - arch.moe.first_dense_layers
    return layers * arch.moe.num_experts * 3 * arch.hidden * arch.moe.expert_ffn
