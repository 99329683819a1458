"""Tiny megatron-core trainers on CPU at any layout, and what Megatron's own checkpoint metadata says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from frameworks import mini_batch
from frameworks.gathering import bindings_of_all

from nereus.ir.arch import Arch, Mla, Moe
from nereus.ir.tensor import matrix_shape
from nereus.models.batch import MEGATRON
from nereus.models.naming.megatron import MegatronNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import Binding
from nereus.runtime.adapters.megatron import MegatronAdapter
from nereus.runtime.adapters.whole import Whole, gather, scatter

DENSE = Arch(
    family="qwen3", num_layers=4, hidden=32, num_heads=8, num_kv_heads=2, head_dim=4, ffn=48, vocab=128, qk_norm=True
)
TIED = Arch(
    family="qwen2", num_layers=4, hidden=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn=48, vocab=120,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
SPARSE = Arch(
    family="qwen3_moe", num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=48, vocab=128,
    moe=Moe(num_experts=8, experts_per_token=2, expert_ffn=24),
)  # fmt: skip
LATENT = Arch(
    family="deepseek_v3", num_layers=2, hidden=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn=48, vocab=128,
    moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=24, num_shared_experts=1, shared_expert_ffn=40,
            first_dense_layers=1, router_bias=True),
    mla=Mla(q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
)  # fmt: skip
SEQUENCE, GLOBAL_BATCH = 8, 4


@dataclass(frozen=True, kw_only=True)
class At:
    """A layout of 4 processes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1  # over whole samples: Megatron's attention on a CPU does not split them
    vp: int | None = None
    ep: int = 1
    etp: int = 1  # tensor parallelism of the experts
    first: int | None = None  # layers of the first stage
    optimizer: str | None = "distributed"  # or plain
    bf16: bool = False
    vocab_multiple: int = 32
    bucket: int | None = None  # parameters in a bucket; with it collectives overlap backward and forward
    clip: float = 1.0
    offload: float | None = None  # of the optimizer's state in host memory
    precise: bool = False  # precision-aware: masters are the inner optimizer's

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"vp{self.vp}"] if self.vp else []
        parts += [f"first{self.first}"] if self.first else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"etp{self.etp}"] if self.etp > 1 else []
        parts += [f"offload{self.offload:g}"] if self.offload is not None else []
        return " ".join((*parts, str(self.optimizer), "bf16" if self.bf16 else "fp32", *["precise"] * self.precise))


@dataclass
class Trainer:
    arch: Arch
    at: At
    config: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    def adapter(self, **options: Any) -> MegatronAdapter:
        naming = MegatronNaming(arch=self.arch, vocab_multiple=self.at.vocab_multiple)
        return MegatronAdapter(self.chunks, naming, optimizer=self.optimizer, scheduler=self.scheduler, **options)

    def step(self, number: int) -> tuple[float, float, float]:
        """One update on global batch ``number`` of whole samples: (mean loss, gradient norm, lr)."""
        ids = mini_batch.samples(number, self.arch.vocab, GLOBAL_BATCH, SEQUENCE)
        loss, norm, rates = self.update(ids, [SEQUENCE] * GLOBAL_BATCH, advance=GLOBAL_BATCH)
        return loss, norm, rates[0]

    def update(
        self, ids: torch.Tensor, lengths: Sequence[int], *, advance: int
    ) -> tuple[float, float, tuple[float, float]]:
        """One update on ``ids``, of whose samples the first ``lengths`` tokens count: (loss, gradient norm, (lr, weight
        decay)). ``advance``: what the scheduler counts for it."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        cp = parallel_state.get_context_parallel_world_size()
        position = torch.arange(SEQUENCE).unsqueeze(0)
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)

        def forward(batches: Any, model: Any) -> Any:
            batch = next(batches)
            (sample,) = batch.samples
            tokens = ids[sample : sample + 1]
            output = model(tokens, position, mask, labels=tokens.roll(-1, 1))

            def loss(values: torch.Tensor) -> Any:
                mean = values.float().flatten()[: lengths[sample]].mean()
                # The schedule takes it for a cp rank's part of the sample, but all of them have the whole.
                return float(batch.scale) / cp * mean, float(batch.weight) * mean.item()

            return output, loss

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        share = mini_batch.share(lengths, dp, dp_rank, MEGATRON)
        # Every chunk draws the same samples, so each has an iterator of its own.
        batches: Any = [iter(share) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches if len(self.chunks) > 1 else batches[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(share),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        group = self.optimizer.param_groups[0]
        rates = float(group["lr"]), float(group["weight_decay"])
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(advance)
        return mini_batch.total((dp_rank, sum(losses)) if losses else None), float(norm or 0), rates


#: Groups of each ``start``, oldest first.
_started: list[list[Any]] = []


def start(at: At, seed: int = 1) -> None:
    """Groups of ``at`` instead of those there are; those before them stay for the trainer that is moved from.

    Megatron forgets its groups and never frees them, and each keeps three polling threads of gloo.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    while len(_started) > 1:
        for group in _started.pop(0):
            if group in dist.distributed_c10d._world.pg_map:  # Megatron frees a few itself
                dist.destroy_process_group(group)
    before = set(dist.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        at.tp,
        at.pp,
        at.vp,
        context_parallel_size=at.cp,
        expert_model_parallel_size=at.ep,
        expert_tensor_parallel_size=at.etp,
    )
    _started.append([group for group in dist.distributed_c10d._world.pg_map if group not in before])
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def build(
    arch: Arch, at: At, *, seed: int = 1, wrap: bool = True, groups: Any = None, torch_adam: bool = False
) -> Trainer:
    """``groups``: a model in these, beside the process's own that stay as they are."""
    from frameworks import cpu_shim

    cpu_shim.install()
    cpu_shim.install_megatron()
    if at.offload is not None:
        cpu_shim.apart_from_host()
    import megatron.core.optimizer as optimizers
    from megatron.core import parallel_state as state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if torch_adam:
        optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    if groups is None:
        start(at, seed)
    torch.manual_seed(seed)
    moe = arch.moe
    options: dict[str, Any] = {}
    if moe is not None:
        options = {
            "num_moe_experts": moe.num_experts, "moe_router_topk": moe.experts_per_token,
            "moe_ffn_hidden_size": moe.expert_ffn, "expert_model_parallel_size": at.ep,
            "expert_tensor_parallel_size": at.etp, "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none",
            # Behind an all-to-all, ranks of one expert gather unlike numbers of tokens, which gloo does not.
            "moe_token_dispatcher_type": "alltoall" if at.etp == 1 else "allgather",
            # Megatron trains no experts beside tensor parallelism without it.
            "sequence_parallel": at.tp > 1,
        }  # fmt: skip
        if moe.router_bias:
            options |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        if moe.num_shared_experts:
            options["moe_shared_expert_intermediate_size"] = moe.shared_expert_ffn
        if moe.first_dense_layers:
            options["moe_layer_freq"] = [int(n >= moe.first_dense_layers) for n in range(arch.num_layers)]
    config_class = TransformerConfig
    if arch.mla is not None:
        config_class = MLATransformerConfig
        options |= {
            "multi_latent_attention": True, "q_lora_rank": arch.mla.q_lora_rank,
            "kv_lora_rank": arch.mla.kv_lora_rank, "qk_head_dim": arch.mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": arch.mla.qk_rope_head_dim, "v_head_dim": arch.mla.v_head_dim, "rope_type": "rope",
        }  # fmt: skip
    dtype = torch.bfloat16 if at.bf16 else torch.float32
    config = config_class(
        num_layers=arch.num_layers, hidden_size=arch.hidden, num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads, kv_channels=arch.head_dim, ffn_hidden_size=arch.ffn,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias, qk_layernorm=arch.qk_norm or arch.mla is not None, normalization="RMSNorm",
        tensor_model_parallel_size=at.tp, pipeline_model_parallel_size=at.pp,
        virtual_pipeline_model_parallel_size=at.vp, num_layers_in_first_pipeline_stage=at.first,
        # As Megatron-LM's arguments demand: batched, the sends of a stage to the one other stage that is both before
        # and after it are told apart only by their order, and activations and gradients change places.
        overlap_p2p_comm=at.vp is not None, batch_p2p_comm=at.vp is None,
        use_cpu_initialization=True, pipeline_dtype=dtype, params_dtype=dtype, bf16=at.bf16, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, **options,
    )  # fmt: skip
    if moe is not None and moe.first_dense_layers:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=moe.num_experts if moe else None,
            moe_grouped_gemm=False,
            qk_layernorm=arch.qk_norm,
            normalization="RMSNorm",
        )
    if arch.mla is not None:
        from frameworks.latent_core import LatentCore
        from torch import _dynamo

        _dynamo.config.disable = True  # its fused functions, compiled, would ask the GPU what it is
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    step = at.vocab_multiple * at.tp
    chunks: list[Any] = []
    for number in range(at.vp or 1):
        stage = {"ignore_virtual": False, "vp_stage": number} if at.vp else {}
        model: Any = GPTModel(
            config, spec, vocab_size=-(-arch.vocab // step) * step, max_sequence_length=SEQUENCE,
            pre_process=groups is not None or state.is_pipeline_first_stage(**stage),
            post_process=groups is not None or state.is_pipeline_last_stage(**stage),
            position_embedding_type="rope", share_embeddings_and_output_weights=arch.tied_embeddings,
            **({"vp_stage": number} if at.vp else {}), **({"pg_collection": groups} if groups is not None else {}),
        )  # fmt: skip
        if at.cp > 1:
            model.rotary_pos_emb.cp_group = None
        if at.bf16:
            model = Float16Module(config, model)
        if wrap:
            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=at.optimizer == "distributed",
                overlap_grad_reduce=at.bucket is not None,
                overlap_param_gather=at.bucket is not None,
                bucket_size=at.bucket,
                grad_reduce_in_fp32=True,
            )
            model = DistributedDataParallel(config, ddp, model, disable_bucketing=number > 0)
            model.broadcast_params()
        chunks.append(model)
    config.finalize_model_grads_func = finalize_model_grads
    if at.optimizer is None:
        return Trainer(arch, at, config, chunks, None, None)
    optimizer, scheduler = optimizer_of(chunks, at)
    return Trainer(arch, at, config, chunks, optimizer, scheduler)


def optimizer_of(chunks: list[Any], at: At) -> tuple[Any, Any]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.01, clip_grad=at.clip, bf16=at.bf16,
            params_dtype=torch.bfloat16 if at.bf16 else torch.float32,
            use_distributed_optimizer=at.optimizer == "distributed", overlap_param_gather=at.bucket is not None,
            optimizer_cpu_offload=at.offload is not None, optimizer_offload_fraction=at.offload or 0.0,
            use_precision_aware_optimizer=at.precise,
        ),
        chunks,
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=8, lr_decay_steps=400,
        lr_decay_style="cosine", start_wd=0.01, end_wd=0.02, wd_incr_steps=100, wd_incr_style="linear",
    )  # fmt: skip
    return optimizer, scheduler


# -- whole tensors ----------------------------------------------------------------------------------------------------


def shapes(arch: Arch) -> dict[str, tuple[int, int]]:
    return {tensor.name: matrix_shape(tensor.shape) for tensor in logical_tensors(arch)}


def whole_of(binding: Binding, arch: Arch) -> Whole:
    """Every element that the ranks hold together, replicas compared."""
    bindings = bindings_of_all(binding)
    with torch._C.DisableTorchFunction():  # the stand-in for a GPU looks at each call; here are many, all on the host
        return gather(bindings, shapes(arch))


def randomise(trainer: Trainer, seed: int) -> None:
    """Weights of which no two are alike, so that a swap of any two shows."""
    binding = trainer.adapter().bind()
    generator = torch.Generator().manual_seed(seed)
    found: Whole = {}
    for name, shape in shapes(trainer.arch).items():
        values = torch.randn(shape, generator=generator)
        # The gradient decides about the norms' sign only through what they scale.
        found[name, "weight"] = 1 + 0.1 * values if "norm" in name else 0.1 * values
    weights = [f for f in binding.state.fragments if f.slot == "weight"]
    scatter(found, Binding(type(binding.state)(
        rank=binding.state.rank, storages=binding.state.storages, fragments=tuple(weights)
    ), binding.memory))  # fmt: skip
    if trainer.optimizer is not None:
        trainer.optimizer.reload_model_params()


# -- Megatron's own description ---------------------------------------------------------------------------------------

_LAYERED = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")


def sharded(value: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from sharded(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sharded(item)


def compare_with_metadata(trainer: Trainer, whole: Mapping[tuple[str, str], torch.Tensor]) -> int:
    """Compare each tensor of Megatron's sharded state dicts with ``whole`` at the place where its metadata puts it.
    Returns how many tensors were compared."""
    from megatron.core.dist_checkpointing.mapping import apply_factories

    compared = 0
    model: dict[str, Any] = {}
    for number, chunk in enumerate(trainer.chunks):
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        model[f"model{number}"] = inner.sharded_state_dict()
    optimizer = None
    # Of several buckets Megatron's own gather for checkpoints is wrong where padding lies between them: it drops the
    # padding, then reads at offsets that count it (and may warn of "data corruption").
    wrapped = [chunk for chunk in trainer.chunks if isinstance(getattr(chunk, "buffers", None), list)]  # DDP
    buffers = [b for chunk in wrapped for b in chunk.buffers]
    padded = any(k.numel_unpadded < k.grad_data.numel() for b in buffers for k in b.buckets[:-1])
    if trainer.optimizer is not None and not padded:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"} if trainer.at.optimizer != "plain" else None
        flat = {k: v for part in model.values() for k, v in part.items()} if len(model) == 1 else model
        optimizer = trainer.optimizer.sharded_state_dict(flat, metadata=metadata)
    for state in (model, optimizer):
        if state is None:
            continue
        apply_factories(state)
        for tensor in sharded(state):
            compared += _compare(trainer.arch, tensor, whole)
    return compared


def _compare(arch: Arch, tensor: Any, whole: Mapping[tuple[str, str], torch.Tensor]) -> int:
    key, slot = re.sub(r"^chained_\d+\.", "", tensor.key), "weight"
    matched = re.fullmatch(r"optimizer\.state\.(\w+?)\.(.+)", key)
    if matched is not None:
        slot, key = matched[1], matched[2]
        slot = {"param": "master", "fp32_param": "master"}.get(slot, slot)
        if slot == "master" and ("model.norm.weight", "master") not in whole:
            slot = "weight"
    if tensor.data is None or key.endswith("_extra_state"):
        return 0
    offset, local = tuple(tensor.global_offset), tuple(tensor.data.shape)
    numbers, offset = offset[: tensor.prepend_axis_num], offset[tensor.prepend_axis_num :]
    full = reference(arch, key, numbers, slot, whole)
    part = full[tuple(slice(lo, lo + size) for lo, size in zip(offset, local, strict=True))]
    data = tensor.data
    if "word_embeddings" in key or "output_layer" in key:  # true words only
        data = data[: part.shape[0]]
    assert part.shape == data.shape, (tensor.key, part.shape, data.shape)
    assert torch.equal(part, data), f"{tensor.key} {slot} at {tensor.global_offset} differs"
    return 1


def reference(
    arch: Arch, key: str, numbers: tuple[int, ...], slot: str, whole: Mapping[tuple[str, str], torch.Tensor]
) -> torch.Tensor:
    """A whole tensor of Megatron from those of HF, by the layout that its attention and MLP code use; ``numbers``: of
    layer and expert, where the key does not have them."""

    def get(name: str) -> torch.Tensor:
        found = whole[name, slot]
        return found.flatten() if found.shape[1] == 1 and not name.endswith("proj.weight") else found

    ends = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "model.embed_tokens.weight" if arch.tied_embeddings else "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if key in ends:
        return get(ends[key])
    matched = _LAYERED.fullmatch(key)
    assert matched is not None, key
    rest = list(numbers)
    layer = int(matched[1]) if matched[1] is not None else rest.pop(0)
    name, base = matched[2], f"model.layers.{layer}"
    if name.startswith("self_attention.linear_qkv.") and not name.endswith("layer_norm_weight"):
        kind = name.rsplit(".", 1)[1]
        parts = [get(f"{base}.self_attn.{p}_proj.{kind}") for p in "qkv"]
        groups = [p.reshape(arch.num_kv_heads, -1, *p.shape[1:]) for p in parts]
        return torch.cat(groups, 1).flatten(0, 1)
    if name.startswith("mlp.experts."):
        block = f"{base}.mlp.experts.{rest.pop(0)}"
    else:
        block = f"{base}.mlp"
    if name.startswith("mlp.shared_experts."):
        block += ".shared_experts"
    if name.endswith("linear_fc1.weight"):
        return torch.cat([get(f"{block}.gate_proj.weight"), get(f"{block}.up_proj.weight")])
    if name.endswith("linear_fc2.weight"):
        return get(f"{block}.down_proj.weight")
    q_norm = "q_norm" if arch.mla is None else "q_a_layernorm"
    return get(
        {
            "input_layernorm.weight": f"{base}.input_layernorm.weight",
            "self_attention.linear_qkv.layer_norm_weight": f"{base}.input_layernorm.weight",
            "pre_mlp_layernorm.weight": f"{base}.post_attention_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": f"{base}.post_attention_layernorm.weight",
            "self_attention.linear_proj.weight": f"{base}.self_attn.o_proj.weight",
            "self_attention.q_layernorm.weight": f"{base}.self_attn.{q_norm}.weight",
            "self_attention.kv_layernorm.weight": f"{base}.self_attn.kv_a_layernorm.weight",
            "self_attention.linear_q_down_proj.weight": f"{base}.self_attn.q_a_proj.weight",
            "self_attention.linear_q_up_proj.weight": f"{base}.self_attn.q_b_proj.weight",
            "self_attention.linear_q_up_proj.layer_norm_weight": f"{base}.self_attn.q_a_layernorm.weight",
            "self_attention.linear_kv_down_proj.weight": f"{base}.self_attn.kv_a_proj_with_mqa.weight",
            "self_attention.linear_kv_up_proj.weight": f"{base}.self_attn.kv_b_proj.weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight": f"{base}.self_attn.kv_a_layernorm.weight",
            "mlp.router.expert_bias": f"{base}.mlp.gate.e_score_correction_bias",
            "self_attention.k_layernorm.weight": f"{base}.self_attn.k_norm.weight",
            "mlp.router.weight": f"{base}.mlp.gate.weight",
        }[name]
    )
