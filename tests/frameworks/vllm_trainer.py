"""A Megatron trainer of a model that vLLM generates with, and what Megatron itself says of the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks.megatron_models import At, Trainer, build, randomise
from frameworks.vllm_engines import PROMPTS
from frameworks.vllm_models import config_of

from nereus.models.hf import arch_from_config
from nereus.models.naming.megatron import MegatronNaming
from nereus.runtime.adapters import safetensors_write
from nereus.runtime.adapters.base import Binding

#: Four kv heads: at tp 4 each rank has one of its own. Megatron's default epsilon.
CONFIG: dict[str, Any] = config_of("qwen2", num_key_value_heads=4, rms_norm_eps=1e-5)
ARCH = arch_from_config(CONFIG)
AT = At(tp=2, bf16=True)


def trainer_here(meeting: str, rank: int, world_size: int) -> Trainer:
    """Rank ``rank`` of a trainer at tp 2 over the processes that call this together."""
    dist.init_process_group("gloo", init_method=f"tcp://{meeting}", rank=rank, world_size=world_size)
    trainer = build(ARCH, AT)
    randomise(trainer, seed=5)
    return trainer


def publish(folder: Path, binding: Binding) -> None:
    """Weights and config.json, for vLLM's own loading."""
    naming = MegatronNaming(arch=ARCH, vocab_multiple=AT.vocab_multiple)
    safetensors_write.save(folder, binding, naming, files={"config.json": json.dumps(CONFIG).encode()})


def behind(trainer: Trainer, answers: list[list[int]]) -> float:
    """By how much of the spread of Megatron's logits the tokens that an engine chose are behind Megatron's best, at
    most. 0: Megatron would have chosen the same throughout."""
    from megatron.core import parallel_state

    worst = 0.0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        size = ids.shape[1]
        mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), 1)
        with torch.no_grad():
            part = trainer.chunks[0](ids, torch.arange(size).unsqueeze(0), mask).float().contiguous()
        parts = [torch.empty_like(part) for _ in range(AT.tp)]
        dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
        logits = torch.cat(parts, -1)[0, len(prompt) - 1 : -1, : ARCH.vocab]
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        worst = max(worst, float(((logits.amax(-1) - chosen) / logits.std(-1)).max()))
    return worst
