"""What the server has imported from which the harness forks its processes. None of it starts a thread or a group."""

import gc
import importlib

for name in (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "transformers",
):
    importlib.import_module(name)

gc.freeze()  # the forks share these pages: no collection touches them
