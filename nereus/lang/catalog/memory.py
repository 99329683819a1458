"""Codes of the memory model (nereus.models.memory)."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry

_TRAINER = """\
cluster {{ node n0 {{ gpus = 8 x "{gpu}"  host_mem = {host} }} }}
model actor  = "llama-3.1-8b"
model critic = "llama-3.1-8b" {{ head = value }}
workload {{
  algorithm = ppo  prompts = 64  samples = 1  mini_batch = 64
  prompt_len = 1024  response_len = 1024  max_response = {promised}
}}
"""

ENTRIES: tuple[CodeEntry, ...] = (
    CodeEntry(
        code="NRS4001",
        title="a stage does not fit in GPU memory",
        cause=(
            "While this stage runs, the named GPU would hold more than 0.9 of its memory. The note splits the need "
            "into weights, fp32 master, moments, gradients, activations of the micro-batches in flight, logits, KV, "
            "what other stages keep resident beside it, and 1 GB for each process. Sequences count with prompt_len + "
            "response_len."
        ),
        example={
            "plan.plan": _TRAINER.format(gpu="a100-sxm-40gb", host="1 TiB", promised=1024)
            + "stage actor.train  { on = n0  tp = 2  micro_batch = 4  optimizer = adam }\n"
        },
        command="check",
        fix=(
            "Write one of the changes named under help; each was tested. Beyond them: fewer stages resident on these "
            "GPUs (idle = offload), or more GPUs."
        ),
    ),
    CodeEntry(
        code="NRS4002",
        title="offloaded state does not fit in host memory",
        cause=(
            "State of stages with idle = offload or swap = host, and slots kept on the host, add up over all ranks of "
            "a node to more than its host_mem."
        ),
        example={
            "plan.plan": _TRAINER.format(gpu="h100-sxm-80gb", host="64 GiB", promised=1024)
            + "stage actor.train  { on = n0  tp = 4  optimizer = adam }\n"
            + "stage critic.train { on = n0  tp = 4  optimizer = adam  idle = offload }\n"
        },
        command="check",
        fix="Shard the state (zero = 1), discard generation copies (idle = discard), or keep a stage resident.",
    ),
    CodeEntry(
        code="NRS4003",
        title="the plan stops fitting once responses reach max_response",
        cause=(
            "Memory is planned for the observed response_len. At the promised max_response the named stages would not "
            "fit. This is a warning: lengths grow slowly, and the plan can be changed when they do."
        ),
        example={
            "plan.plan": _TRAINER.format(gpu="h100-sxm-80gb", host="1 TiB", promised=32768)
            + "stage actor.train  { on = n0  tp = 4  micro_batch = 4  optimizer = adam }\n"
        },
        command="check",
        fix="Nothing now. To be safe from the start, choose a layout that fits at max_response.",
    ),
    CodeEntry(
        code="NRS4004",
        title="the KV cache does not hold one sequence",
        cause=(
            "An engine needs room for prompt_len + response_len tokens of at least one sequence on each GPU; kv_cache "
            "(or what mem leaves beside the weights) is smaller, and the engine would refuse to start."
        ),
        example={
            "plan.plan": _TRAINER.format(gpu="h100-sxm-80gb", host="1 TiB", promised=1024)
            + "stage actor.generate { engine = vllm  on = n0  tp = 2  kv_cache = 64 MiB }\n"
        },
        command="check",
        fix="Give kv_cache (or mem) at least the size named under help.",
    ),
)
