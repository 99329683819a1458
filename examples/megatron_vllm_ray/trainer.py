"""A stage that megatron-core trains: built for a layout, and one policy-gradient update of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nereus.models.naming.megatron import MegatronNaming
from nereus.runtime.adapters.base import Binding
from nereus.runtime.adapters.megatron import MegatronAdapter
from nereus.runtime.default_group import DefaultGroup
from nereus.runtime.session.members import View

#: Of the layouts built last, oldest first. Megatron forgets its groups and never frees them.
_worlds: list[DefaultGroup] = []
#: Megatron's globals before the first layout.
_untouched: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """``tokens`` [samples, length], prompts and responses; of each token whether it was generated, the advantage of
    its sample, and the log-probability that the engine gave it."""

    tokens: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    engine: torch.Tensor

    def part(self, rows: slice) -> Batch:
        return Batch(
            tokens=self.tokens[rows], mask=self.mask[rows], advantages=self.advantages[rows], engine=self.engine[rows]
        )


class Trainer(MegatronAdapter):
    """torch has one default group, and Megatron keeps its parallel groups in globals. Each trainer has its own and puts
    them in force when it works, so that an old one still works beside a new one, and after the new one was given up."""

    def __init__(self, view: View, world: DefaultGroup, model: Any, config: Any, optimizer: Any) -> None:
        naming = MegatronNaming(arch=view.plan.model(view.stage.model).arch, vocab_multiple=1)
        super().__init__([model], naming, optimizer=optimizer, rank=view.place.everyone.rank)
        self.view, self.config = view, config
        self._world, self._state = world, _globals()

    def activate(self) -> None:
        self._world.activate()
        vars(_parallel_state()).update(self._state)

    def bind(self) -> Binding:
        self.activate()
        return super().bind()

    def job_state(self) -> dict[str, object]:
        self.activate()
        return super().job_state()

    def finish(self, job_state: dict[str, object]) -> None:
        self.activate()
        super().finish(job_state)

    def update(self, batch: Batch) -> dict[str, float] | None:
        """One optimizer step on the whole batch. On the rank that tells of it: by how much at most, and in the mean,
        the engine's log-probabilities of its own tokens are others than the trainer's; None on all others."""
        self.activate()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self._run(batch, forward_only=False)
        self.optimizer.step()
        place = self.view.place
        if not found:  # no last pipeline stage
            return None
        apart = torch.cat(found)
        most = place.dp.all_reduce(apart.max().reshape(1), "max")
        total = place.dp.all_reduce(torch.stack((apart.sum(), torch.tensor(float(apart.numel())))))
        if place.tp.rank or place.dp.rank:
            return None
        return {"apart": float(most), "apart_mean": float(total[0] / total[1])}

    def figures(self, batch: Batch) -> list[float]:
        """Mean log-probability of each sample's generated tokens, on all ranks the same: for the probe."""
        place = self.view.place
        with torch.no_grad():
            found = self._run(batch, forward_only=True)
        sums = torch.zeros(len(batch.tokens))
        if found and place.tp.rank == 0:
            rows = _share(len(sums), place.dp)
            sums[rows] = torch.cat(found).view(rows.stop - rows.start, -1).mean(1)
        return [float(value) for value in place.everyone.all_reduce(sums)]

    def _run(self, batch: Batch, *, forward_only: bool) -> list[torch.Tensor]:
        """Megatron's schedule over this rank's share; on the last pipeline stage, of each micro-batch, the distance of
        the log-probabilities of its generated tokens from those in ``batch.engine``."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.activate()
        place, size = self.view.place, self.view.stage.micro_batch
        mine = batch.part(_share(len(batch.tokens), place.dp))
        length, count = batch.tokens.shape[1], float(batch.mask.sum())
        position = torch.arange(length).repeat(size, 1)
        causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        found: list[torch.Tensor] = []

        def forward(batches: Iterator[Batch], model: Any) -> Any:
            micro = next(batches)
            # Megatron gives -log p of label i at position i, which is the token after it.
            costs = model(micro.tokens, position, causal, labels=micro.tokens.roll(-1, 1))

            def loss(costs: torch.Tensor) -> Any:
                costs, mask = costs[:, :-1].float(), micro.mask[:, 1:]
                found.append((costs + micro.engine[:, 1:])[mask].detach().abs())
                gain = costs * micro.advantages.unsqueeze(1) * mask
                # The schedule takes the mean over micro-batches, and DDP that over replicas.
                return gain.sum() / count * len(parts) * place.dp.size, {}

            return costs, loss

        parts = [mine.part(slice(at, at + size)) for at in range(0, len(mine.tokens), size)]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=self.chunks[0],
            num_microbatches=len(parts),
            seq_length=length,
            micro_batch_size=size,
            forward_only=forward_only,
        )
        return found


def build(view: View, *, store: Any) -> Trainer:
    """All ranks of the stage at once."""
    import megatron.core.optimizer as optimizers
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    stage, arch = view.stage, view.plan.model(view.stage.model).arch
    world = _new_groups(view, store)
    state = _parallel_state()
    config = TransformerConfig(
        num_layers=arch.num_layers, hidden_size=arch.hidden, num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads, kv_channels=arch.head_dim, ffn_hidden_size=arch.ffn,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", tensor_model_parallel_size=stage.tp, pipeline_model_parallel_size=stage.pp,
        use_cpu_initialization=True, pipeline_dtype=torch.float32, params_dtype=torch.float32, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    torch.manual_seed(1)
    model: Any = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=arch.vocab, max_sequence_length=64,
        pre_process=state.is_pipeline_first_stage(), post_process=state.is_pipeline_last_stage(),
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    model.to(_device())
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=stage.zero > 0, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, model)
    options = optimizers.OptimizerConfig(
        optimizer="adam", lr=3e-3, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=stage.zero > 0
    )
    optimizer = optimizers.get_megatron_optimizer(options, [model])
    return Trainer(view, world, model, config, optimizer)


def shut() -> None:
    """End every wait in Megatron's groups, from another thread."""
    for world in list(_worlds):
        world.shut()


def _new_groups(view: View, store: Any) -> DefaultGroup:
    """Megatron's groups for the layout of ``view``; those of the layout before stay for its trainer."""
    from megatron.core import tensor_parallel

    state: Any = _parallel_state()
    if not _untouched:
        _untouched.update(_globals())
    vars(state).update({name: copy.copy(value) for name, value in _untouched.items()})
    place = view.place.everyone
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    name = f"{view.epoch}/{view.stage.name}"
    world = DefaultGroup(store, name, rank=place.rank, size=place.size, backend=backend, timeout_s=120.0)
    state.initialize_model_parallel(view.stage.tp, view.stage.pp)
    world.made()
    _worlds.append(world)
    while len(_worlds) > 2:
        _worlds.pop(0).close()
    at = view.place.at
    theirs = (state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank())
    assert theirs == (at.tp[0], at.pp[0]), f"Megatron counts {theirs}, the plan {at}"
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return world


def _parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state


def _globals() -> dict[str, Any]:
    names = (name for name in vars(_parallel_state()) if name.startswith("_") and name.isupper())
    return {name: getattr(_parallel_state(), name) for name in (*names, "_global_process_group_list")}


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _share(count: int, dp: Any) -> slice:
    return slice(count * dp.rank // dp.size, count * (dp.rank + 1) // dp.size)
