"""megatron-core trainers as storages with fragments: GPTModel chunks, plain or in DDP, and their optimizer.

Slots: ``weight``; ``master`` where 16-bit weights are trained; the optimizer's per-element state. A parameter of the
distributed optimizer has masters and moments only for the part of its bucket that this rank owns: maybe nothing.
Replicas are described by each rank that holds one, also the second copy of a tied embedding on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nereus.ir.fragment import Segment, fragments_of
from nereus.models.naming.base import UnknownParameter
from nereus.models.naming.megatron import MegatronNaming
from nereus.runtime.adapters import megatron_checklist, megatron_hybrid, megatron_job
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder, PostCondition
from nereus.runtime.adapters.megatron_layout import ELEMENTWISE, MegatronLayout, Param, layout_of, make_state
from nereus.runtime.adapters.megatron_refuse import COUNTERS, classify
from nereus.runtime.adapters.together import Ranks


class MegatronAdapter:
    """``Adapter`` (builder mode: fill) of one process's model chunks (one, or several where stages are interleaved) and
    their optimizer, as Megatron's ``get_megatron_optimizer`` made them, at rest after a step.

    ``optimizer`` and ``scheduler`` (OptimizerParamScheduler) may be None. ``group``: the ranks that hold the model
    together (None: all); ``bind`` with overlapped parameter gathers, ``job_state``, and the checklist are collective.
    ``derive_weights``: leave trained 16-bit weights out of ``bind`` and round them from the masters in ``finish``:
    fewer bytes moved, for one gather inside the data-parallel groups.
    """

    def __init__(
        self,
        chunks: Sequence[Any] | Any,
        naming: MegatronNaming,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        group: Any = None,
        rank: int | None = None,
        derive_weights: bool = False,
    ) -> None:
        self.chunks = list(chunks) if isinstance(chunks, list | tuple | torch.nn.ModuleList) else [chunks]
        if not self.chunks:
            raise BindError("a trainer has at least one model chunk")
        self.naming = naming
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.group = group
        self.rank = rank if rank is not None else (dist.get_rank(group) if dist.is_initialized() else 0)
        self.derive_weights = derive_weights
        self._expected: dict[str, Any] | None = None

    # -- binding ------------------------------------------------------------------------------------------------------

    def bind(self) -> Binding:
        """Raises BindError with everything that is not understood. Makes the optimizer's state where there is none yet
        (zeros, as the first step would)."""
        layout = self._layout()
        self._finish_gathers(layout)
        found = classify(layout, self.optimizer, self.naming)
        segments, unknown = self._segments(layout)
        if found.refused or unknown:
            raise BindError("; ".join(dict.fromkeys(found.refused + unknown)))
        for leaf in layout.leaves:
            make_state(leaf)
        builder = BindingBuilder(rank=self.rank, derived=found.derived, caches=found.caches)
        home = layout.params[0].tensor.device.type

        def add(
            param: Param, slot: str, name: str, data: torch.Tensor, start: int, stop: int, host: bool = False
        ) -> None:
            host = host or (data.device.type == "cpu" and home != "cpu")
            number = builder.storage(name, data, host=host)
            if builder.memory[number].data_ptr() != data.data_ptr():
                raise BindError(f"{name} cannot be seen as the memory that it is")
            builder.fragments += fragments_of(
                segments[param.name],
                num_cols=param.num_cols,
                slot=slot,
                storage=number,
                origin=-start,
                start=start,
                stop=stop,
            )

        derived = self._rounded_everywhere(layout) if self.derive_weights else set()
        for param in layout.params:
            if param.name in derived:
                builder.derived.append(f"{param.name} (weight, rounded from its master)")
            else:
                add(param, "weight", param.name, param.tensor.data, 0, param.tensor.numel())
        for leaf in layout.leaves:
            for shard in leaf.shards:
                param = shard.param
                part = shard.start, shard.stop
                if shard.master is not None:  # one that the wrapper made is on the GPU, whatever is stepped
                    host = shard.host and shard.master is not shard.tensor
                    add(param, "master", f"{param.name} master", shard.master.data, *part, host)
                for slot, value in leaf.inner.state.get(shard.tensor, {}).items():
                    if slot in ELEMENTWISE and value is not None:
                        add(param, slot, f"{param.name} {slot}", value, *part, shard.host)
            if megatron_hybrid.is_hybrid(leaf.inner) and leaf.inner.cpu_copys_map_gpu_param:
                builder.derived.append(f"{leaf.kind}: host copies of what it steps there")
        return builder.finish()

    def _layout(self) -> MegatronLayout:
        return layout_of(self.chunks, self.optimizer, self.naming)

    def _segments(self, layout: MegatronLayout) -> tuple[dict[str, tuple[Segment, ...]], list[str]]:
        """Segments of every parameter, and what the naming does not know or misses."""
        found: dict[str, tuple[Segment, ...]] = {}
        unknown: list[str] = []
        for param in layout.params:
            try:
                found[param.name] = self.naming.segments(param.local, param.tensor.shape, param.chunk.where)
            except UnknownParameter as error:
                unknown.append(str(error))
        if unknown:
            return found, unknown
        for chunk in layout.chunks:
            held = {s.tensor for p in layout.params if p.chunk is chunk for s in found[p.name]}
            try:
                wanted = {
                    name: self.naming.segments(name, shape, chunk.where)
                    for name, shape in self.naming.parameters(chunk.where).items()
                    if "embedding" not in name and "output_layer" not in name
                }
            except UnknownParameter as error:
                unknown.append(str(error))
                continue
            missing = {s.tensor for segments in wanted.values() for s in segments} - held
            if missing:
                unknown.append(f"model chunk {chunk.number} has no parameter for {', '.join(sorted(missing))}")
        return found, unknown

    def _rounded_everywhere(self, layout: MegatronLayout) -> set[str]:
        """Weights that are 16 bits wide and trained: by the optimizer, on whichever rank their shard lies."""
        if not layout.leaves:
            return set()
        half = (torch.bfloat16, torch.float16)
        return {p.name for p in layout.params if p.tensor.dtype in half and p.tensor.requires_grad and not p.buffer}

    def _finish_gathers(self, layout: MegatronLayout) -> None:
        """Where gathers overlap the forward pass, foreign shards of the weights are old until then."""
        for chunk in layout.chunks:
            if chunk.ddp is not None and getattr(chunk.ddp.ddp_config, "overlap_param_gather", False):
                with torch.no_grad():
                    chunk.ddp.start_param_sync(force_sync=True)

    # -- job state ----------------------------------------------------------------------------------------------------

    def job_state(self) -> dict[str, object]:
        """Collective over ``group``: ranks put together what each knows. BindError where they disagree."""
        ranks = Ranks(self.group)
        parts = ranks.agree(lambda: megatron_job.read_local(self._layout(), self.scheduler), "reading the job state")
        return megatron_job.merged(parts)

    @torch.no_grad()
    def finish(self, job_state: dict[str, object]) -> None:
        """Collective over the data-parallel groups with ``derive_weights``."""
        layout = self._layout()
        megatron_job.write(layout, self.scheduler, job_state, self._dp(layout))
        self._expected = job_state
        if self.derive_weights:
            self._round_weights(layout)
        for leaf in layout.leaves:
            if megatron_hybrid.is_hybrid(leaf.inner):
                megatron_hybrid.copy_to_host(leaf.inner)
        for chunk in layout.chunks:
            if chunk.ddp is not None:
                chunk.ddp.zero_grad_buffer()
            for param in chunk.model.parameters():
                param.grad = None
            for name, buffer in chunk.model.named_buffers():
                if name.rsplit(".", 1)[-1] in COUNTERS:
                    buffer.zero_()
        for leaf in layout.leaves:
            leaf.wrapper.zero_grad(set_to_none=True)

    def _round_weights(self, layout: MegatronLayout) -> None:
        for leaf in layout.leaves:
            for shard in leaf.shards:
                if shard.master is not None:
                    weight = shard.param.tensor.detach().view(-1)[shard.start : shard.stop]
                    weight.copy_(shard.master.view(-1))
        if any(leaf.distributed for leaf in layout.leaves):
            for chunk in layout.chunks:
                if chunk.ddp is not None:
                    chunk.ddp.start_param_sync(force_sync=True)

    def _dp(self, layout: MegatronLayout) -> int:
        """Data-parallel ranks, without context parallelism: those that take other samples."""
        group = getattr(layout.chunks[0].ddp, "dp_group", None)
        if group is None:
            group = getattr(getattr(layout.chunks[0].model, "pg_collection", None), "dp", None)
        if group is not None:
            return int(group.size())
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_world_size())

    def checklist(self) -> tuple[PostCondition, ...]:
        layout = self._layout()
        return megatron_checklist.checklist(
            layout, self.optimizer, self.scheduler, self._expected, self.naming.arch.num_layers, self._dp(layout)
        )

    def version(self) -> int:
        return int(getattr(self._home(), "_nereus_version", 0))

    def set_version(self, version: int) -> None:
        self._home()._nereus_version = version

    def _home(self) -> Any:
        return layout_of(self.chunks[:1], None, self.naming).chunks[0].model
