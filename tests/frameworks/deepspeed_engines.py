"""A tiny model under Hugging Face's names, and DeepSpeed engines of it on some of a launch's ranks."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nereus.ir.arch import Arch
from nereus.ir.tensor import matrix_shape
from nereus.models.naming.hf import HfNaming
from nereus.models.tensors import logical_tensors

#: Odd sizes: parameters end on no boundary, and groups need padding.
ARCH = Arch(
    family="llama", num_layers=2, hidden=9, num_heads=3, num_kv_heads=1, head_dim=4, ffn=21, vocab=37,
)  # fmt: skip
NAMING = HfNaming(arch=ARCH)
TENSORS = logical_tensors(ARCH)
SHAPES = {t.name: matrix_shape(t.shape) for t in TENSORS}
#: Samples of one optimizer update, and their length.
BATCH, LENGTH = 12, 5


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        queries, keys = ARCH.num_heads * ARCH.head_dim, ARCH.num_kv_heads * ARCH.head_dim
        self.q_proj = nn.Linear(ARCH.hidden, queries, bias=False)
        self.k_proj = nn.Linear(ARCH.hidden, keys, bias=False)
        self.v_proj = nn.Linear(ARCH.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, ARCH.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, ARCH.num_heads, ARCH.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, 1, ARCH.head_dim).transpose(1, 2).expand_as(q)
        v = self.v_proj(x).view(batch, length, 1, ARCH.head_dim).transpose(1, 2).expand_as(q)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(ARCH.hidden, ARCH.ffn, bias=False)
        self.up_proj = nn.Linear(ARCH.hidden, ARCH.ffn, bias=False)
        self.down_proj = nn.Linear(ARCH.ffn, ARCH.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = _Norm(ARCH.hidden), _Attention()
        self.post_attention_layernorm, self.mlp = _Norm(ARCH.hidden), _Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(ARCH.vocab, ARCH.hidden)
        self.layers = nn.ModuleList(_Layer() for _ in range(ARCH.num_layers))
        self.norm = _Norm(ARCH.hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class TinyLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = _Body()
        self.lm_head = nn.Linear(ARCH.hidden, ARCH.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting the next token."""
        logits = self.lm_head(self.model(ids[:, :-1])).float()
        return nn.functional.cross_entropy(logits.reshape(-1, ARCH.vocab), ids[:, 1:].reshape(-1))


class Group:
    """The interface of Megatron's mpu for data parallelism over a part of the ranks: what lets DeepSpeed, whose
    groups are global, build an engine on a subset."""

    def __init__(self, size: int) -> None:
        """Ranks 0 .. size are one group, the others another: DeepSpeed's barriers are the launch's, so all ranks must
        build an engine at once."""
        world, rank = dist.get_world_size(), dist.get_rank()
        parts = [list(range(size)), *([list(range(size, world))] if size < world else [])]
        self.group = [dist.new_group(part) for part in parts][rank >= size]
        self.ranks = parts[rank >= size]
        self.alone = [dist.new_group([r]) for r in range(world)][rank]
        self.inside = rank < size

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.ranks

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks)

    def get_data_parallel_rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    def get_model_parallel_group(self) -> Any:
        return self.alone

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_rank = get_model_parallel_rank


def config(stage: int, ranks: int, **changes: Any) -> dict[str, Any]:
    """``changes``: of the top level; ``zero_optimization`` is merged."""
    changes = copy.deepcopy(changes)
    zero = {"stage": stage, "reduce_bucket_size": 4096, **changes.pop("zero_optimization", {})}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 0, **zero}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": BATCH // ranks,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.002, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **changes,
    }
    if stage or zero.get("offload_optimizer"):
        made["zero_optimization"] = zero
    return {key: value for key, value in made.items() if value is not None}


class _Kernels:
    """What DeepSpeed's ops ``cpu_adam`` and ``fused_adam`` are to its classes, in torch."""

    def __init__(self) -> None:
        self._modes: dict[int, bool] = {}

    def create_adam(self, number: int, lr: float, *others: Any) -> None:
        *_, self._modes[number], _ = others

    def destroy_adam(self, number: int) -> None:
        del self._modes[number]

    def adam_update(self, number: int, *arguments: Any) -> None:
        *values, weight, gradient, mean, square = arguments
        self._update(weight, gradient, mean, square, *values, decoupled=self._modes[number])

    def multi_tensor_adam(
        self, chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], lr: float, beta1: float,
        beta2: float, eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
    ) -> None:  # fmt: skip
        for gradient, weight, mean, square in zip(*lists, strict=True):
            values = (step, lr, beta1, beta2, eps, weight_decay, bias_correction)
            self._update(weight, gradient, mean, square, *values, decoupled=mode == 1)

    @torch.no_grad()
    def _update(
        self, weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool,
        *, decoupled: bool,
    ) -> None:  # fmt: skip
        if decoupled:
            weight.mul_(1 - lr * weight_decay)
        else:
            gradient = gradient + weight_decay * weight
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        weight.sub_(mean / (square.sqrt() / second**0.5 + eps), alpha=lr / first)


def _kernels_of_adam() -> None:
    """DeepSpeed's Adams build their kernels when they are first used, which takes a minute or two of compiling. The
    classes, which say what state there is, are DeepSpeed's own in either case."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    if os.environ.get("NEREUS_BUILD_OPS", "0") != "1":
        for name in ("cpu_adam", "fused_adam"):
            OpBuilder._loaded_ops.setdefault(name, _Kernels())


def build(stage: int, group: Group, *, seed: int = 0, groups: bool = False, frozen: str = "", **changes: Any) -> Any:
    """An engine on this rank's part of ``group``. ``groups``: norms in groups of their own."""
    import logging

    logging.disable(logging.WARNING)
    import deepspeed
    from deepspeed.utils import groups as ds_groups

    torch.set_num_threads(1)
    # Else the first start on a machine compiles an extension for some minutes; gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if changes.get("fp16"):  # torch computes in fp16 on a CPU, slowly; DeepSpeed asks for special instructions
        accelerator = deepspeed.accelerator.get_accelerator()
        type(accelerator).is_fp16_supported = lambda self: True
    _kernels_of_adam()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    ds_groups.mpu = group
    torch.manual_seed(seed)
    made = config(stage, len(group.ranks), **changes)
    model = TinyLlama()
    for name, param in model.named_parameters():
        param.requires_grad_(not (frozen and frozen in name))
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters: list[Any] = trained
    if groups:
        parameters = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim == 1][:-1], "weight_decay": 0.0},
            # Nine elements: the last of four ranks holds padding only.
            {"params": [model.model.norm.weight], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=made, mpu=group)[0]


def train(engine: Any, first: int, steps: int) -> list[tuple[float, float, float]]:
    """(mean loss, lr, gradient norm) of each update; the samples depend on the update's number alone."""
    from deepspeed.utils import groups as ds_groups

    ds_groups.mpu = engine.mpu  # a global: DeepSpeed expects one engine in a process
    found = []
    for step in range(first, first + steps):
        ids = torch.randint(0, ARCH.vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 + step))
        per = BATCH // engine.dp_world_size
        rank = dist.get_rank(group=engine.data_parallel_group)
        total = torch.zeros(1)
        lr = engine.get_lr()[0]
        for sample in range(rank * per, (rank + 1) * per):
            loss = engine(ids[sample : sample + 1])
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / BATCH
        dist.all_reduce(total, group=engine.data_parallel_group)
        found.append((total.item(), float(lr), float(engine.get_global_grad_norm())))
    return found


def loss(engine: Any) -> float:
    """Of a fixed batch, without a gradient; the same on every rank."""
    ids = torch.randint(0, ARCH.vocab, (4, LENGTH), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return float(engine(ids))


def whole_by_deepspeed(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Masters and moments as DeepSpeed's own accessors give them: the independent oracle. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _link(engine)
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            shape = SHAPES[name]
            found[name, "master"] = safe_get_full_fp32_param(param).detach().clone().reshape(shape)
            for key in ("exp_avg", "exp_avg_sq"):
                found[name, key] = safe_get_full_optimizer_state(param, key).detach().clone().reshape(shape)
    return found


def _link(engine: Any) -> None:
    """DeepSpeed 0.19.8 links the moments of all parameter groups when the first one has stepped: those of the others
    do not exist then, and its accessors do not find them."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def set_by_deepspeed(engine: Any, whole: dict[tuple[str, str], torch.Tensor], state: dict[str, Any]) -> None:
    """``whole`` and counters into an engine through DeepSpeed's own setters. It must have trained a step, since
    DeepSpeed makes the moments in the first one."""
    from deepspeed import utils

    _link(engine)
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        for key in ("master", "exp_avg", "exp_avg_sq"):
            value, state_key = whole[name, key].reshape(-1), () if key == "master" else (key,)
            if hasattr(param, "ds_id"):
                # The setters of whole values fail where the ranks do not divide a parameter; those of parts do not.
                size, rank = param.ds_tensor.ds_numel, param.ds_zero_partition_rank
                part = torch.zeros(size)
                held = value[rank * size : (rank + 1) * size]
                part[: held.numel()] = held
                by_part = utils.safe_set_local_optimizer_state if state_key else utils.safe_set_local_fp32_param
                by_part(param, part, *state_key)
            else:
                by_whole = utils.safe_set_full_optimizer_state if state_key else utils.safe_set_full_fp32_param
                by_whole(param, value.reshape(param.shape), *state_key)
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer._partition_all_parameters()
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    step = state["groups"][0]["step"]
    for values in optimizer.optimizer.state.values():
        values["step"] = torch.full_like(values["step"], step) if torch.is_tensor(values["step"]) else step
    engine.lr_scheduler.load_state_dict(state["scheduler"]["state"])
    engine.lr_scheduler._last_lr = [group["lr"] for group in state["groups"]]
    for group, old in zip(optimizer.optimizer.param_groups, state["groups"], strict=True):
        group["lr"] = old["lr"]
    for key, value in (state["loss_scaler"] or {}).items():
        if key != "dynamic":
            setattr(optimizer.loss_scaler, key, value)
