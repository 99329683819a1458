"""Variants of real post-training configurations: published example scripts of verl, OpenRLHF, NeMo-RL, AReaL, slime and
ROLL, as they stand and as their users might change them (other degrees, more or fewer GPUs, GPUs moved between
rollout and training). Shapes and degrees only; lengths and batch are cut where they do not matter to state.
"""

from __future__ import annotations

from collections.abc import Iterator

from transitions import ASYNC, Case, on, pair, plan_text

#: 94 layers on 8 pipeline stages.
SPLIT_94 = "(11, 12, 12, 12, 12, 12, 12, 11)"


def _stage(name: str, where: str, **keys: object) -> str:
    words = "  ".join(f"{key} = {value}" for key, value in keys.items())
    return f"stage {name} {{ on = {where}  {words} }}"


def _megatron(model: str, where: str, **keys: object) -> str:
    return _stage(
        f"{model}.train", where, backend="megatron", micro_batch=1, recompute="full", optimizer="adam", **keys
    )


def _fsdp(model: str, where: str, shards: int | str = "full", **keys: object) -> str:
    return _stage(
        f"{model}.train", where, backend="fsdp", fsdp=shards, micro_batch=1, recompute="full", optimizer="adam", **keys
    )


def _deepspeed(model: str, where: str, zero: int, **keys: object) -> str:
    return _stage(
        f"{model}.train",
        where,
        backend="deepspeed",
        zero=zero,
        micro_batch=1,
        recompute="full",
        optimizer="adam",
        **keys,
    )


def _rollout(where: str, tp: int, engine: str = "vllm", **keys: object) -> str:
    return _stage("actor.generate", where, engine=engine, tp=tp, kv_cache="16 GiB", **keys)


def _models(actor: str, critic: bool = False, ref: bool = False) -> str:
    lines = [f'model actor = "{actor}"']
    if critic:
        lines.append(f'model critic = "{actor}" {{ head = value }}')
    if ref:
        lines.append("model ref = actor { frozen = true }")
    return "\n".join(lines)


def _case(
    name: str, gpus: int, models: str, old: list[str], new: list[str], *, gpu: str = "h100-sxm-80gb", mode: str = ""
) -> Case:
    nodes = max(1, gpus // 8)
    per_node = min(8, gpus)
    keys = {
        "gpu": gpu,
        "nic": None,
        "per_node": per_node,
        "lengths": (512, 512),
        "algorithm": "ppo" if "critic" in models else "grpo",
    }
    if mode:
        keys["mode"] = mode
    texts = [plan_text(nodes, models, stages, **keys) for stages in (old, new)]  # type: ignore[arg-type]
    return Case(name, "configs", gpus, pair(name, *texts))


def real_configs() -> Iterator[Case]:
    yield from _verl()
    yield from _others()
    yield _shrinking()
    yield from _large()


def _verl() -> Iterator[Case]:
    # verl examples/ppo_trainer/run_qwen2-7b_rm.sh: FSDP over 8 GPUs, then over 16.
    models = _models("qwen2-7b", critic=True)
    both = [[_fsdp(m, where) for m in ("actor", "critic")] for where in ("n0", "n[0-1]")]
    yield _case("verl-qwen2-7b-fsdp-8-to-16", 16, models, *both)
    # run_qwen2.5-32b: 32 GPUs; hybrid sharding instead of full.
    models = _models("qwen2.5-32b")
    yield _case(
        "verl-qwen2.5-32b-fsdp-32-to-hsdp-16", 32, models, [_fsdp("actor", "n[0-3]")], [_fsdp("actor", "n[0-3]", 16)]
    )
    # run_deepseek7b split pools: actor on GPUs 0-3, critic on 4-7; they come to share four.
    models = _models("deepseek-llm-7b", critic=True)
    yield _case(
        "verl-dsllm-7b-split-to-overlap",
        8,
        models,
        [_fsdp("actor", on(0, 4)), _fsdp("critic", on(4, 8))],
        [_fsdp("actor", on(0, 6)), _fsdp("critic", on(2, 8))],
    )
    # Moonlight-16B-A3B: TP 8, PP 2, EP 8 on 32 GPUs; less TP.
    models = _models("moonlight-16b-a3b")
    degrees = [{"tp": tp, "pp": 2, "ep": 8, "etp": 1, "pp_split": "(14, 13)"} for tp in (8, 4)]
    yield _case(
        "verl-moonlight-tp8-to-tp4", 32, models, *[[_megatron("actor", "n[0-3]", zero=1, **d)] for d in degrees]
    )
    # run_qwen2-72b on 32 GPUs, then 64.
    models = _models("qwen2-72b")
    yield _case("verl-qwen2-72b-32-to-64", 64, models, [_fsdp("actor", "n[0-3]")], [_fsdp("actor", "n[0-7]")])
    # Mistral-Nemo 12B: FSDP becomes Megatron on the same GPUs.
    models = _models("mistral-nemo-12b")
    yield _case(
        "verl-nemo-12b-fsdp-to-tp4",
        8,
        models,
        [_fsdp("actor", "n0")],
        [_megatron("actor", "n0", tp=4, zero=1)],
        gpu="h200-sxm-141gb",
    )
    # Hybrid rollout replicas beside the trainer: half of them are switched off, the one change that sleeping can make.
    models = _models("qwen2-7b")
    yield _case(
        "verl-qwen2-7b-hybrid-rollout-8-to-4",
        8,
        models,
        [_fsdp("actor", "n0"), _rollout(on(0, 8), 1)],
        [_fsdp("actor", "n0"), _rollout(on(0, 4), 1)],
    )
    # Fully asynchronous 30B-A3B, 96 rollout + 32 training GPUs: a node per side moves.
    models = _models("qwen3-30b-a3b")
    yield _case(
        "verl-30b-async-96-32-to-80-48",
        128,
        models,
        [_rollout("n[0-11]", 4), _megatron("actor", "n[12-15]", tp=2, cp=2, ep=8, etp=1, zero=1)],
        [_rollout("n[0-9]", 4), _megatron("actor", "n[10-15]", tp=2, cp=1, ep=8, etp=1, zero=1)],
        mode=ASYNC,
    )


def _others() -> Iterator[Case]:
    # OpenRLHF 8B, five models on 8 GPUs with ZeRO-3; a second node.
    models = _models("llama-3-8b", critic=True, ref=True)
    sides = [
        [_deepspeed(m, where, 3) for m in ("actor", "critic")]
        + [_stage("ref.infer", where, backend="deepspeed", zero=3)]
        for where in ("n0", "n[0-1]")
    ]
    yield _case("openrlhf-8b-zero3-8-to-16", 16, models, *sides)
    # OpenRLHF 70B disaggregated: actor 16, critic 16; actor takes the reference's node.
    models = _models("llama-3-70b", ref=True)
    yield _case(
        "openrlhf-70b-16-to-24",
        32,
        models,
        [_deepspeed("actor", "n[0-1]", 3), _stage("ref.infer", "n2", backend="deepspeed", zero=3)],
        [_deepspeed("actor", "n[0-2]", 3), _stage("ref.infer", "n3", backend="deepspeed", zero=3)],
        gpu="h200-sxm-141gb",
    )
    # NeMo-RL PPO 7B on 64: TP 4, CP 2, DP 8; the context doubles.
    models = _models("qwen2.5-7b", critic=True)
    yield _case(
        "nemo-7b-cp2-to-cp4",
        64,
        models,
        [_megatron("actor", "n[0-7]", tp=4, cp=2, zero=1), _megatron("critic", "n[0-7]", tp=2, zero=1)],
        [_megatron("actor", "n[0-7]", tp=4, cp=4, zero=1), _megatron("critic", "n[0-7]", tp=4, zero=1)],
    )
    # NeMo-RL 70B, TP 4, PP 4, DP 4 on 64.
    models = _models("llama-3.3-70b")
    sides = [
        [_megatron("actor", "n[0-7]", zero=1, order=order, **d)]
        for order, d in (("tp-cp-ep-dp-pp", {"tp": 4, "pp": 4}), ("tp-cp-ep-dp-pp", {"tp": 8, "pp": 4}))
    ]
    yield _case("nemo-70b-tp4pp4-to-tp8pp4", 64, models, *sides)
    # NeMo-RL 30B asynchronous, 128 + 64 GPUs: training gives two nodes to rollout.
    models = _models("qwen3-30b-a3b")
    yield _case(
        "nemo-30b-async-128-64-to-112-80",
        192,
        models,
        [_megatron("actor", "n[0-15]", ep=8, etp=1, zero=1), _rollout("n[16-23]", 2)],
        [_megatron("actor", "n[0-13]", ep=8, etp=1, zero=1), _rollout("n[14-23]", 2)],
        mode=ASYNC,
    )
    # AReaL 1.5B, 4 + 4 GPUs: two go from rollout to training.
    models = _models("qwen2.5-1.5b")
    yield _case(
        "areal-1.5b-4-4-to-2-6",
        8,
        models,
        [_rollout(on(0, 4), 1, "sglang"), _fsdp("actor", on(4, 8))],
        [_rollout(on(0, 2), 1, "sglang"), _fsdp("actor", on(2, 8))],
        mode=ASYNC,
    )
    # slime 4B, actor and critic on 4 GPUs with TP 2, CP 2; then on 8.
    models = _models("qwen3-4b", critic=True)
    sides = [[_megatron(m, where, tp=2, cp=2, zero=1) for m in ("actor", "critic")] for where in (on(0, 4), on(0, 8))]
    yield _case("slime-4b-4-to-8", 8, models, *sides)
    # ROLL 7B, actor 0-7 and critic 8-15; they change nodes with other degrees.
    models = _models("qwen2.5-7b", critic=True)
    yield _case(
        "roll-7b-actor-critic-swap",
        16,
        models,
        [_megatron("actor", "n0", zero=1), _fsdp("critic", "n1")],
        [_megatron("actor", "n1", tp=2, zero=1), _fsdp("critic", "n0")],
    )


def _large() -> Iterator[Case]:
    models = _models("qwen3-235b-a22b")
    # slime 235B, 64 training and 64 rollout GPUs: TP 4, PP 4, CP 2, EP 16; twice as many pipeline stages.
    sides = [
        [_megatron("actor", "n[0-7]", tp=4, cp=2, etp=1, zero=1, **d), _rollout("n[8-15]", 8, "sglang")]
        for d in (
            {"pp": 4, "ep": 16, "pp_split": "(24, 24, 24, 22)"},
            {"pp": 8, "ep": 8, "pp_split": SPLIT_94},
        )
    ]
    yield _case("slime-235b-64-64-pp4-to-pp8", 128, models, *sides, gpu="h200-sxm-141gb")
    # ROLL 235B on 256 GPUs: TP 4, PP 8, EP 8 to PP 4.
    yield _case(
        "roll-235b-256-pp8-to-pp4",
        256,
        models,
        [_megatron("actor", "n[0-31]", tp=4, pp=8, ep=8, etp=1, zero=1, pp_split=SPLIT_94)],
        [_megatron("actor", "n[0-31]", tp=4, pp=4, ep=16, etp=1, zero=1, pp_split="(24, 24, 23, 23)")],
    )


def huge() -> Iterator[Case]:
    """Not part of the suite: 36,000 expert tensors in tight mode, minutes and gigabytes to compile."""
    # verl Qwen3-235B, TP 4, PP 8, EP 4 on 32 GPUs of the 96 GB class; a second replica needs 64.
    models = _models("qwen3-235b-a22b")
    yield _case(
        "verl-235b-64-to-128",
        128,
        models,
        [_megatron("actor", "n[0-7]", tp=4, pp=8, ep=8, etp=1, zero=1, pp_split=SPLIT_94)],
        [_megatron("actor", "n[0-15]", tp=4, pp=8, ep=8, etp=1, zero=1, pp_split=SPLIT_94)],
    )


def _shrinking() -> Case:
    # NeMo-RL 32B on 256 GPUs, FSDP with TP 8: half the pool goes.
    models = _models("qwen2.5-32b")
    return _case(
        "nemo-32b-256-to-128",
        256,
        models,
        [_megatron("actor", "n[0-31]", tp=8, zero=1)],
        [_megatron("actor", "n[0-15]", tp=8, zero=1)],
    )
