"""The sample plans as hand-built objects, so that the memory model is tested without the front end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nereus.ir.cluster import Cluster, Device, Node
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Plan, Stage, Workload
from nereus.ir.units import GIB, TIB
from nereus.models.hardware import gpu_type
from nereus.models.presets import preset
from nereus.models.slots import default_slots


def cluster(gpu: str, num_nodes: int, *, gpus: int = 8, host_mem: int = 2 * TIB) -> Cluster:
    kind = gpu_type(gpu)
    return Cluster(
        nodes=tuple(
            Node(
                name=f"n{i}",
                gpu=kind,
                num_gpus=gpus,
                host_mem_bytes=host_mem,
                nic_bytes_per_s=gpus * kind.default_nic_bytes_per_s,
            )
            for i in range(num_nodes)
        )
    )


def devices(first: int, last: int, *, gpus: range = range(8)) -> tuple[Device, ...]:
    return tuple(Device(f"n{node}", index) for node in range(first, last + 1) for index in gpus)


def model(name: str, source: str, **more: Any) -> Model:
    return Model(name=name, arch=preset(source), source=source, **more)


def stage(owner: Model, kind: str, on: tuple[Device, ...], **more: Any) -> Stage:
    """A stage with the defaults that the resolver fills in."""
    tp, pp, cp = more.get("tp", 1), more.get("pp", 1), more.get("cp", 1)
    layers = owner.arch.num_layers
    filled: dict[str, Any] = {
        "dp": len(on) // (tp * pp * cp),
        "sp": tp > 1,
        "pp_split": tuple(layers // pp for _ in range(pp)),
        "order": ORDER_MEGATRON if more.get("backend") == "megatron" else ORDER_REPLICA,
        "slots": default_slots(trains=kind == "train", precision="bf16", optimizer=more.get("optimizer")),
        **more,
    }
    return Stage(model=owner.name, kind=kind, devices=on, **filled)


def joined(owner: Model, kind: str, to: Stage, **more: Any) -> Stage:
    """A stage ``with`` another: its devices and degrees."""
    slots = default_slots(trains=False, precision="bf16", optimizer=None)
    settings: dict[str, Any] = {"model": owner.name, "kind": kind, "with_": to.name, "slots": slots}
    return replace(to, **settings, optimizer=None, micro_batch=1, idle="resident", **more)


def ppo_8b(*, response_len: int, actor: dict[str, Any], critic: dict[str, Any], generate: dict[str, Any]) -> Plan:
    """ppo-8b-*.plan: two nodes of H100."""
    llama = "llama-3.1-8b"
    policy = model("actor", llama)
    ref = model("ref", llama, frozen=True, base="actor")
    value = model("critic", llama, head="value")
    reward = model("reward", llama, head="value", frozen=True)
    everything = devices(0, 1)
    train = stage(policy, "train", everything, backend="megatron", optimizer="adam", **actor)
    learn = stage(value, "train", everything, backend="megatron", optimizer="adam", idle="offload", **critic)
    engine = {"engine": "vllm", "kv_cache_bytes": 24 * GIB, "idle": "offload", **generate}
    low, high = devices(0, 0, gpus=range(4)), devices(0, 0, gpus=range(4, 8))
    return Plan(
        cluster=cluster("h100-sxm-80gb", 2),
        models=(policy, ref, value, reward),
        workload=Workload(prompts=512, mini_batch=128, prompt_len=1024, response_len=response_len, max_response=8192),
        stages=(
            stage(policy, "generate", everything, **engine),
            joined(policy, "logprob", train),
            stage(ref, "infer", low, backend="megatron", tp=2, idle="offload"),
            stage(reward, "infer", high, backend="megatron", tp=2, idle="offload"),
            train,
            learn,
            joined(value, "infer", learn),
        ),
    )


def ppo_8b_2k() -> Plan:
    actor = {"tp": 2, "pp": 2, "micro_batch": 4}
    return ppo_8b(response_len=1024, actor=actor, critic={"tp": 4, "micro_batch": 2}, generate={"tp": 2})


def ppo_8b_4k_refused() -> Plan:
    actor = {"tp": 2, "pp": 2, "micro_batch": 4}
    return ppo_8b(response_len=3072, actor=actor, critic={"tp": 4, "micro_batch": 1}, generate={"tp": 2})


def ppo_8b_4k(*, zero: int = 0) -> Plan:
    actor = {"tp": 4, "pp": 1, "micro_batch": 4, "zero": zero}
    return ppo_8b(response_len=3072, actor=actor, critic={"tp": 4, "micro_batch": 1, "zero": zero}, generate={"tp": 4})


def swap_full() -> Plan:
    """Two trainers on PCIe cards, each filling its node."""
    policy, value = model("actor", "qwen2.5-7b"), model("critic", "qwen2.5-7b", head="value")
    settings: dict[str, Any] = {"tp": 4, "recompute": "full", "optimizer": "adam"}
    four = range(4)
    return Plan(
        cluster=cluster("l40s-48gb", 2, gpus=4, host_mem=256 * GIB),
        models=(policy, value),
        workload=Workload(mode="async", prompts=128, mini_batch=128, prompt_len=512, response_len=512),
        stages=(
            stage(policy, "train", devices(0, 0, gpus=four), **settings),
            stage(value, "train", devices(1, 1, gpus=four), **settings),
        ),
    )


def large(num_nodes: int, *, tp: int, pp: int, response_len: int) -> Plan:
    """ppo-8b-512.plan and ppo-8b-1024.plan."""
    llama = "llama-3.1-8b"
    policy, ref = model("actor", llama), model("ref", llama, frozen=True, base="actor")
    value, reward = model("critic", llama, head="value"), model("reward", llama, head="value", frozen=True)
    everything, half = devices(0, num_nodes - 1), num_nodes // 2
    trained: dict[str, Any] = {"backend": "megatron", "tp": tp, "pp": pp, "zero": 1, "optimizer": "adam"}
    train = stage(policy, "train", everything, **trained)
    learn = stage(value, "train", everything, idle="offload", **trained)
    frozen: dict[str, Any] = {"backend": "megatron", "tp": 2, "idle": "offload"}
    return Plan(
        cluster=cluster("mi250x-gcd-64gb", 128, host_mem=512 * GIB),
        models=(policy, ref, value, reward),
        workload=Workload(prompts=4096, mini_batch=2048, prompt_len=1024, response_len=response_len, max_response=8192),
        stages=(
            stage(policy, "generate", everything, engine="vllm", tp=2, kv_cache_bytes=20 * GIB, idle="offload"),
            stage(ref, "infer", devices(0, half - 1), **frozen),
            stage(reward, "infer", devices(half, num_nodes - 1), **frozen),
            train,
            joined(policy, "logprob", train),
            learn,
            joined(value, "infer", learn),
        ),
    )
