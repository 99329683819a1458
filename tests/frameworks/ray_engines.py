"""What the processes of the Ray example need on a machine without GPUs."""

from __future__ import annotations


def prepare(stage: str) -> None:
    """Megatron runs on the CPU; vLLM's CPU backend keeps its linears' weights as they are, as a GPU does, and compiles
    nothing."""
    if stage == "actor.train":
        from frameworks import cpu_shim

        cpu_shim.install()
        cpu_shim.install_megatron()
    else:
        import vllm._custom_ops
        from torch import _dynamo

        vllm._custom_ops._supports_onednn = False
        _dynamo.config.disable = True
