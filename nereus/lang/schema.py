"""Blocks, keys and words of the plan language: one table, read by the resolver, its suggestions and the reference."""

from __future__ import annotations

from nereus.ir.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB

#: ``default`` as a value takes back what a base file wrote.
UNSET = "default"

BLOCKS = ("cluster", "model", "workload", "stage", "checkpoint")

CLUSTER_KEYS = ("remove", "lost", "node", "pool")
NODE_KEYS = ("gpus", "host_mem", "nic", "rails")
POOL_KEYS = ("min", "max", "standby", "notice")
MODEL_KEYS = ("frozen", "head", "precision", "lora", "arch")
LORA_KEYS = ("rank", "alpha", "targets")
#: Blocks that a model declared from another can do without: ``lora = none``.
DROPPABLE_BLOCKS = ("lora",)
MODE_KEYS = ("staleness", "sync_every", "partial")
WORKLOAD_KEYS = (
    "algorithm",
    "mode",
    "prompts",
    "samples",
    "mini_batch",
    "epochs",
    "prompt_len",
    "response_len",
    "max_response",
    "max_tokens",
)
CHECKPOINT_KEYS = ("path", "format", "every")
REPLICA_KEYS = ("min", "dormant")

KINDS = ("generate", "logprob", "infer", "train")
DEGREES = ("tp", "pp", "cp", "ep", "etp", "vp", "dp")
#: What a stage takes over from its host when it is ``with`` another.
LAYOUT_KEYS = (*DEGREES, "sp", "pp_split", "zero", "fsdp", "order", "place")
#: A dp that a base file wrote is dropped when one of these changes.
DP_DEPENDS_ON = ("on", "with", "service", "tp", "pp", "cp", "place")

_EVERY_KIND = (
    "on",
    "with",
    "service",
    *LAYOUT_KEYS,
    "idle",
    "swap",
    "state",
    "replicas",
)
#: Keys of a stage by its kind.
STAGE_KEYS: dict[str, tuple[str, ...]] = {
    "generate": (*_EVERY_KIND, "engine", "backend", "kv_cache", "mem", "max_tokens", "inflight"),
    "logprob": (*_EVERY_KIND, "backend", "micro_batch", "max_tokens"),
    "infer": (*_EVERY_KIND, "backend", "engine", "micro_batch", "max_tokens"),
    "train": (*_EVERY_KIND, "backend", "micro_batch", "max_tokens", "recompute", "optimizer"),
}
ALL_STAGE_KEYS = tuple(dict.fromkeys(key for keys in STAGE_KEYS.values() for key in keys))

HEADS = ("lm", "value")
BACKENDS = ("megatron", "fsdp", "deepspeed", "torch")
ENGINES = ("vllm", "sglang")
RECOMPUTE = ("none", "selective", "full")
IDLE = ("resident", "offload", "discard")
INFLIGHT = ("drain", "resume", "drop")
SWAP = ("host",)
MODES = ("sync", "async")
ALGORITHMS = ("ppo", "grpo", "dapo", "gspo", "rloo", "reinforce", "remax", "gmpo", "sft", "dpo")
CHECKPOINT_FORMATS = ("dcp", "megatron", "deepspeed", "hf")
WEIGHT_DTYPES = ("bf16", "fp16", "fp32", "fp8")
ORDER_AXES = ("tp", "cp", "ep", "pp", "dp")

#: Stages that an algorithm runs in most recipes, by the usual names of its models.
USUAL_STAGES: dict[str, tuple[str, ...]] = {
    "ppo": (
        "actor.generate",
        "actor.logprob",
        "ref.infer",
        "reward.infer",
        "critic.infer",
        "actor.train",
        "critic.train",
    ),
    **dict.fromkeys(
        ("grpo", "rloo", "reinforce", "remax"), ("actor.generate", "actor.logprob", "ref.infer", "actor.train")
    ),
    **dict.fromkeys(("dapo", "gspo", "gmpo"), ("actor.generate", "actor.logprob", "actor.train")),
    "sft": ("actor.train",),
    "dpo": ("ref.infer", "actor.train"),
}

SIZE_UNITS = {"B": 1, "kB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
RATE_UNITS = {
    **{f"{unit}/s": float(size) for unit, size in SIZE_UNITS.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
}
TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
STEP_UNITS = {"step": 1, "steps": 1}
UPDATE_UNITS = {"update": 1, "updates": 1}
GPU_UNITS = {"gpu": 1, "gpus": 1, "GPU": 1, "GPUs": 1}
TOKEN_UNITS = {"token": 1, "tokens": 1}
