"""Jobs of the trace study: PPO of an 8B actor and critic on the Nereus paper's three clusters.

And what three frameworks would run, as fixed plans in their plan spaces: OpenRLHF (engines and trainers apart, ZeRO
without tensor or pipeline parallelism in training), verl (all models on all GPUs, Megatron), AReaL (asynchronous,
three quarters of the nodes generate). Within its space each takes the best layout for the first lengths that fits at
the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.planner.limits import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``mem_gb``: where it is not what the data sheet of the GPU says."""

    name: str
    gpu: str
    gpus_per_node: int
    nic_gb_per_s: float
    rails: int
    mem_gb: float | None = None


#: The A100 of 64 GB is in no data sheet that we have: the 80 GB part with less memory.
SITES = (
    Site(name="h200", gpu="h200-sxm-141gb", gpus_per_node=8, nic_gb_per_s=25, rails=1),
    Site(name="a100", gpu="a100-sxm-80gb", gpus_per_node=4, nic_gb_per_s=50, rails=4, mem_gb=64),
    Site(name="mi250x", gpu="mi250x-gcd-64gb", gpus_per_node=8, nic_gb_per_s=100, rails=4),
)
#: Layouts of the stages, by what a framework can run. ``{all}``, ``{engines}``, ``{trainers}``: nodes.
_COLOCATED = """
stage actor.generate {{ engine = vllm  on = {all}  tp = 2  mem = 0.5  idle = offload }}
stage actor.logprob {{ with = actor.train }}
stage ref.infer {{ backend = megatron  on = {all}  tp = 2  idle = offload }}
stage actor.train {{ backend = megatron  on = {all}  tp = 4  optimizer = adam  idle = offload{budget} }}
stage critic.train {{ backend = megatron  on = {all}  tp = 4  optimizer = adam  idle = offload{budget} }}
stage critic.infer {{ with = critic.train }}
"""
_APART = """
stage actor.generate {{ engine = vllm  on = {engines}  tp = 2  mem = 0.8 }}
stage actor.logprob {{ with = actor.train }}
stage ref.infer {{ backend = megatron  on = {trainers}  tp = 2  idle = offload }}
stage actor.train {{ backend = megatron  on = {trainers}  tp = 4  optimizer = adam  idle = offload{budget} }}
stage critic.train {{ backend = megatron  on = {trainers}  tp = 4  optimizer = adam  idle = offload{budget} }}
stage critic.infer {{ with = critic.train }}
"""
_ZERO = (
    _APART.replace("tp = 4  optimizer", "tp = 1  zero = 3  optimizer")
    .replace("megatron", "deepspeed")
    .replace("on = {trainers}  tp = 2  idle", "on = {trainers}  tp = 1  zero = 3  idle")
)


def job(
    site: Site,
    num_nodes: int,
    *,
    framework: str = "nereus",
    max_tokens: int | None = None,
    prompts: int = 384,
    mini_batch: int = 192,
    response_len: int = 1147,
) -> Plan:
    """``max_tokens``: token budget of a micro-batch instead of a number of samples."""

    def nodes(first: int, last: int) -> str:
        return f"n[{first}-{last - 1}]" if last - first > 1 else f"n{first}"

    share = {"openrlhf": 2, "areal": 4}.get(framework)
    split = num_nodes - max(1, num_nodes // share) if share is not None else num_nodes
    stages = {"openrlhf": _ZERO, "areal": _APART}.get(framework, _COLOCATED)
    mode = "  mode = async { staleness = 1 }" if framework == "areal" else ""
    text = f"""
cluster {{ node {nodes(0, num_nodes)} {{
  gpus = {site.gpus_per_node} x "{site.gpu}"  host_mem = 2 TiB  nic = {site.nic_gb_per_s:g} GB/s  rails = {site.rails}
}} }}
model actor = "llama-3.1-8b"
model ref = actor {{ frozen = true }}
model critic = "llama-3.1-8b" {{ head = value }}
workload {{ algorithm = ppo{mode}  prompts = {prompts}  samples = 1  mini_batch = {mini_batch}
  prompt_len = 1024  response_len = {response_len} }}
""" + stages.format(
        all=nodes(0, num_nodes),
        engines=nodes(0, split),
        trainers=nodes(split, num_nodes),
        budget="" if max_tokens is None else f"  max_tokens = {max_tokens}",
    )
    result = resolve_text(text, path=f"{site.name}.plan", base_dir=".")
    if result.plan is None:
        raise ValueError("; ".join(found.headline for found in result.diagnostics))
    return _with_memory(result.plan, site.mem_gb)


def limits_of(framework: str) -> Limits:
    """Its plan space, beyond what the plan says."""
    if framework != "openrlhf":
        return NO_LIMITS
    trained = ("actor.train", "critic.train", "ref.infer")
    return Limits(values={(stage, key): frozenset({"1"}) for stage in trained for key in ("tp", "pp")})


def _with_memory(plan: Plan, mem_gb: float | None) -> Plan:
    if mem_gb is None:
        return plan
    nodes = tuple(replace(node, gpu=replace(node.gpu, mem_gb=mem_gb)) for node in plan.cluster.nodes)
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))
