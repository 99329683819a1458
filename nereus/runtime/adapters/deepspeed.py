"""DeepSpeed engines (stage 0, ZeRO 1, 2, 3, BF16_Optimizer, fp16) as storages with fragments.

State: the flat 16-bit weights (or stage 3's partitions), the fp32 masters and the optimizer's per-element state. Slots
are ``weight``, ``master`` and the names of the optimizer's state. An engine in fp32 has no ``master`` slot: its masters
are the weights, or copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nereus.ir.fragment import fragments_of
from nereus.models.naming.base import Naming, UnknownParameter, Where
from nereus.runtime.adapters import deepspeed_checklist, deepspeed_job
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder, PostCondition
from nereus.runtime.adapters.deepspeed_layout import EngineLayout, Master, Run, layout_of
from nereus.runtime.adapters.deepspeed_refuse import ADAM, ELEMENTWISE, made_again, refuse_unknown, require_engine


class DeepSpeedAdapter:
    """``Adapter`` (builder mode: fill) of the engine that ``deepspeed.initialize`` returned. It must be at rest: after
    an optimizer step, with nothing accumulated.

    ``derive_weights``: leave the 16-bit weights of trained parameters out of ``bind`` and round them from the masters
    in ``finish``: fewer bytes moved, for one gather inside the data-parallel group.
    """

    def __init__(self, engine: Any, naming: Naming, *, rank: int | None = None, derive_weights: bool = False) -> None:
        require_engine(engine)
        self.engine = engine
        self.naming = naming
        self.rank = int(engine.global_rank) if rank is None else rank
        self.derive_weights = derive_weights
        self._expected: Mapping[str, Any] | None = None

    def bind(self) -> Binding:
        """Raises BindError with everything that is not understood. Makes Adam's moments where they are absent yet
        (zeros at step 0, as the first step would)."""
        refuse_unknown(self.engine)
        layout = layout_of(self.engine)
        for master in layout.masters:
            _make_state(layout.inner, master)
        segments = self._segments()
        builder = BindingBuilder(rank=self.rank)
        numbers: dict[tuple[int, str], int] = {}

        def add(run: Run, slot: str, memory: torch.Tensor, name: str, host: bool) -> None:
            memory = memory.detach()
            key = (memory.data_ptr(), name)
            if key not in numbers:
                numbers[key] = builder.storage(name, memory, host=host)
            shape = run.shape
            width = 1 if len(shape) < 2 else shape[-1]
            builder.fragments += fragments_of(
                segments[run.parameter],
                num_cols=width,
                slot=slot,
                storage=numbers[key],
                origin=run.origin,
                start=run.start,
                stop=run.stop,
            )

        rounded = {run.parameter for m in layout.masters if not m.copies_weights for run in m.runs}
        trained = {name for group in layout.groups for name in group}
        for run in layout.weights:
            if self.derive_weights and run.parameter in trained and layout.masters and not _fp32(layout):
                builder.derived.append(f"{run.parameter} (weight, rounded from its master)")
                continue
            address = run.memory.data_ptr()
            add(run, "weight", run.memory, layout.names.get(address, run.parameter), address in layout.host)
        for master in layout.masters:
            if master.copies_weights:
                builder.derived.append(f"{master.name} (fp32: equals the weights)")
            for run in master.runs:
                if run.parameter in rounded:
                    add(run, "master", master.tensor, master.name, master.host)
                for key, value in layout.inner.state[master.tensor].items():
                    if key in ELEMENTWISE and value is not None:
                        add(run, key, value, f"{master.name} {key}", master.host)
        builder.derived += layout.derived + made_again(self.engine.module)
        builder.caches += layout.caches
        return builder.finish()

    def _segments(self) -> dict[str, tuple[Any, ...]]:
        """Segments of every parameter; one BindError for all that the naming does not know, or that it misses."""
        found, unknown = {}, []
        for name, param in self.engine.module.named_parameters():
            shape = tuple(getattr(param, "ds_shape", param.shape))
            try:
                found[name] = self.naming.segments(name, shape, Where())
            except UnknownParameter as error:
                unknown.append(str(error))
        held = {segment.tensor for segments in found.values() for segment in segments}
        for name, shape in self.naming.parameters(Where()).items():
            missing = [s.tensor for s in self.naming.segments(name, shape, Where()) if s.tensor not in held]
            if missing and not unknown:
                unknown.append(f"the module has no parameter for {', '.join(missing)}")
        if unknown:
            raise BindError("; ".join(unknown))
        return found

    def job_state(self) -> dict[str, object]:
        return deepspeed_job.read(self.engine, layout_of(self.engine))

    @torch.no_grad()
    def finish(self, job_state: dict[str, object]) -> None:
        """Collective over the engine's data-parallel group."""
        engine = self.engine
        layout = layout_of(engine)
        deepspeed_job.write(engine, layout, job_state)
        self._expected = job_state
        _derive(engine, layout, from_masters=self.derive_weights)
        _clear_gradients(engine, layout.kind)
        link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            # DeepSpeed's views of the moments, which it otherwise makes in the first step.
            engine.optimizer._hp_optimizer_states_linked = False
            link()

    def checklist(self) -> tuple[PostCondition, ...]:
        return deepspeed_checklist.checklist(self.engine, self._expected)

    def version(self) -> int:
        return int(getattr(self.engine, "_nereus_version", 0))

    def set_version(self, version: int) -> None:
        self.engine._nereus_version = version


def _fp32(layout: EngineLayout) -> bool:
    return all(master.copies_weights for master in layout.masters)


def _make_state(inner: Any, master: Master) -> None:
    """Adam's state of one master where it has none yet. BindError for optimizers whose beginning is not known."""
    tensor = master.tensor
    if inner.state.get(tensor):
        return
    kind, group = type(inner).__name__, inner.param_groups[master.group]
    if kind not in ADAM:
        if kind == "SGD" and not group.get("momentum"):
            return
        raise BindError(f"{kind} has no state of {master.name} yet, and how it begins is unknown; take a step first")
    state: dict[str, Any] = {}
    if kind in ("Adam", "AdamW"):
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
    elif deepspeed_job.counts_per_group(inner):
        for each in inner.param_groups:
            each.setdefault("step", 0)
    else:
        state["step"] = 0
    dtype = torch.float32 if getattr(inner, "fp32_optimizer_states", False) else tensor.dtype
    state["exp_avg"] = torch.zeros_like(tensor.detach(), dtype=dtype)
    state["exp_avg_sq"] = torch.zeros_like(tensor.detach(), dtype=dtype)
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = torch.zeros_like(tensor.detach(), dtype=dtype)
    inner.state[tensor] = state


def _derive(engine: Any, layout: EngineLayout, *, from_masters: bool) -> None:
    """Weights from masters, or an fp32 engine's masters from its weights; then the copies that stage 3 persists."""
    optimizer = engine.optimizer
    if layout.masters and _fp32(layout) and layout.kind != "plain":
        optimizer.refresh_fp32_params()
    elif from_masters and layout.masters:
        if layout.kind in ("zero12", "bf16"):
            optimizer.update_lp_params()
        elif layout.kind == "zero3":
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        else:
            for master in layout.masters:
                for run in master.runs:
                    weight = next(w for w in layout.weights if w.parameter == run.parameter)
                    low = weight.memory.view(-1)[weight.origin : weight.origin + run.stop]
                    low.copy_(run.memory.detach().view(-1)[run.origin : run.origin + run.stop])
    if layout.kind == "zero3":
        offload = getattr(optimizer, "parameter_offload", optimizer)
        offload.partition_all_parameters()
        if offload.persistent_parameters and layout.inner is not None:
            offload.persistent_parameters[0].all_gather(offload.persistent_parameters)


def _clear_gradients(engine: Any, kind: str) -> None:
    optimizer = engine.optimizer
    if optimizer is None or not hasattr(optimizer, "zero_grad"):
        return
    if kind == "bf16":
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads(set_to_none=True)
        return
    optimizer.zero_grad(set_to_none=True)
    if kind == "zero12":
        for number in optimizer.averaged_gradients:
            optimizer.averaged_gradients[number] = None
            optimizer.all_grad_tensors[number] = None
    elif kind == "zero3":
        optimizer.averaged_gradients = {}
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        optimizer.reset_cpu_buffers()
