"""What the server has imported from which the harness forks its processes. None of it starts a thread or a group."""

import gc

import megatron.core
import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import torch._dynamo
import torch.distributed.checkpoint
import transformers  # noqa: F401

gc.freeze()  # the forks share these pages: no collection touches them
