"""vLLM worker extension: moves reach a live engine through ``LLM.collective_rpc``.

    llm = LLM(model=..., worker_extension_cls="nereus.runtime.adapters.vllm_worker.NereusWorker")
    llm.collective_rpc("nereus_join", args=(address, first_rank, size, name))   # with the trainer's join_group
    update(llm, version)            # the trainer calls ``move`` meanwhile

All arguments and results are plain values, so that vLLM's default serialisation carries them. Generation must be at
rest: no running request, as for vLLM's own weight updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from nereus.ir.fragment import Fragment, FrameworkStorage, RankState
from nereus.models.hf import arch_from_config
from nereus.models.naming.vllm import VllmNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.adapters.joint import join_group, leave_group
from nereus.runtime.adapters.vllm import VllmAdapter, checksums
from nereus.runtime.adapters.whole import pieces
from nereus.runtime.coordinates import Coordinates, from_vllm

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


class NereusWorker:
    """Mixed into vLLM's worker class, so every name has a prefix."""

    _nereus_group: Any = None
    _nereus_open: tuple[VllmAdapter, Binding, list[torch.Tensor]] | None = None
    _nereus_arrived: dict[str, int] | None = None

    def nereus_describe(self, stage: bool = True) -> dict[str, Any]:
        """This worker's ``RankState`` as plain values (``state_of`` reads it). With ``stage`` what it wants; without,
        what it can be read for, which is refused where kernels rearranged weights."""
        return asdict(self._nereus_adapter(stage=stage).bind().state)

    def nereus_coordinates(self) -> dict[str, Any]:
        """Where this worker stands in its engine, as plain values (``coordinates_of`` reads it)."""
        return asdict(from_vllm(self._nereus_model()))

    def nereus_adapter(self, stage: bool = False) -> VllmAdapter:
        """This worker's model, for a caller in the same process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
        return self._nereus_adapter(stage=stage)

    def nereus_join(self, address: str, first_rank: int, size: int, name: str, timeout_s: float = 60.0) -> int:
        """Enter a group of ``size`` processes over several jobs as ``first_rank`` + this worker's number; the rank."""
        rank = first_rank + self._nereus_rank()
        self._nereus_group = join_group(address, rank, size, name=name, timeout_s=timeout_s)
        return rank

    def nereus_leave(self) -> None:
        if self._nereus_group is not None:
            leave_group(self._nereus_group)
            self._nereus_group = None

    def nereus_receive(self, version: int, deadline_s: float = 60.0) -> dict[str, int]:
        """Fill this worker from what the group's other members hold (they call ``move``); CRC-32 by parameter, of the
        loader's layout. On failure the engine must not serve: move again, or reload."""
        from nereus.runtime.live import ALL, move

        adapter = self._nereus_adapter(stage=True)
        binding = adapter.bind()
        tensors = logical_tensors(adapter.naming.arch)
        # An engine has no optimizer: whatever the senders hold beside weights stays with them.
        move(None, binding, tensors, self._nereus_joined(), drop=(ALL,), deadline_s=deadline_s)
        return self._nereus_commit(adapter, binding, version)

    def nereus_send(self, deadline_s: float = 60.0) -> None:
        """Offer this worker's weights to the group. Refused where kernels rearranged them."""
        from nereus.runtime.live import move

        adapter = self._nereus_adapter(stage=False)
        move(adapter.bind(), None, logical_tensors(adapter.naming.arch), self._nereus_joined(), deadline_s=deadline_s)

    def nereus_begin(self) -> None:
        """Open an update by ``nereus_write``."""
        adapter = self._nereus_adapter(stage=True)
        binding = adapter.bind()
        missing = [torch.zeros(m.numel(), dtype=torch.bool, device=m.device) for m in binding.memory]
        for number, _, view in _views(binding, missing):
            del number
            view.fill_(True)
        self._nereus_open = (adapter, binding, missing)

    def nereus_write(self, tensor: str, row: int, col: int, shape: Sequence[int], dtype: str, data: bytes) -> int:
        """Write a rectangle of a logical tensor (as a matrix) wherever this worker holds a part of it; how many
        elements that were."""
        if self._nereus_open is None:
            raise BindError("nereus_write before nereus_begin")
        if dtype not in _DTYPES:
            raise BindError(f"{tensor}: dtype '{dtype}' is none of {', '.join(_DTYPES)}")
        _, binding, missing = self._nereus_open
        given = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).view(*shape)
        written = 0
        with torch.no_grad():
            live = _views(binding, list(binding.memory))
            for (fragment, place, view), (_, _, left) in zip(live, _views(binding, missing), strict=True):
                if fragment.tensor != tensor:
                    continue
                if view.dtype != given.dtype:
                    raise BindError(f"{tensor}: the engine holds {view.dtype}, not {given.dtype}")
                first_row, num_rows, first_col, num_cols = place
                rows = range(max(first_row, row), min(first_row + num_rows, row + shape[0]))
                cols = range(max(first_col, col), min(first_col + num_cols, col + shape[1]))
                if len(rows) == 0 or len(cols) == 0:
                    continue
                into = (
                    slice(rows.start - first_row, rows.stop - first_row),
                    slice(cols.start - first_col, cols.stop - first_col),
                )
                view[into].copy_(given[rows.start - row : rows.stop - row, cols.start - col : cols.stop - col])
                left[into].fill_(False)
                written += len(rows) * len(cols)
        return written

    def nereus_finish(self, version: int) -> dict[str, int]:
        """Close an update: BindError where an element was never written; else as ``nereus_receive``."""
        if self._nereus_open is None:
            raise BindError("nereus_finish before nereus_begin")
        adapter, binding, missing = self._nereus_open
        counts = {s.name: int(m.sum()) for s, m in zip(binding.state.storages, missing, strict=True)}
        wrong = [f"{name}: {count} elements" for name, count in counts.items() if count]
        if wrong:
            raise BindError(f"never written: {'; '.join(wrong[:8])} ({len(wrong)} parameters)")
        self._nereus_open = None
        return self._nereus_commit(adapter, binding, version)

    def nereus_version(self) -> int:
        return int(getattr(self._nereus_model(), "_nereus_version", 0))

    def nereus_checksums(self) -> dict[str, int]:
        """CRC-32 by parameter of what last arrived, or of the live weights where nothing did."""
        if self._nereus_arrived is not None:
            return self._nereus_arrived
        return checksums(self._nereus_adapter(stage=False).bind())

    def _nereus_commit(self, adapter: VllmAdapter, binding: Binding, version: int) -> dict[str, int]:
        self._nereus_arrived = checksums(binding)
        adapter.finish()
        wrong = [f"{c.name}: {found}" for c in adapter.checklist() if (found := c.check()) is not None]
        if wrong:
            raise BindError(f"after the update: {'; '.join(wrong)}")
        adapter.set_version(version)
        return self._nereus_arrived

    def _nereus_adapter(self, *, stage: bool) -> VllmAdapter:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        config = runner.model_config.hf_config
        arch = arch_from_config(config.to_dict())

        def forget() -> None:
            for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
                if hasattr(runner, name):
                    getattr(runner, name)()

        naming = VllmNaming(arch=arch)
        rank = self._nereus_rank()
        return VllmAdapter(self._nereus_model(), naming, runner.model_config, rank=rank, stage=stage, after=forget)

    def _nereus_model(self) -> torch.nn.Module:
        found: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return found

    def _nereus_rank(self) -> int:
        """This worker's number in its engine, replicas of attention included."""
        parallel: Any = self.parallel_config  # type: ignore[attr-defined]
        return int(parallel.data_parallel_rank) * int(parallel.world_size) + int(self.rank)  # type: ignore[attr-defined]

    def _nereus_joined(self) -> Any:
        if self._nereus_group is None:
            raise BindError("this worker is in no group: call nereus_join first, and the other members join_group")
        return self._nereus_group


def _views(binding: Binding, memory: list[torch.Tensor]) -> Any:
    return pieces(Binding(binding.state, tuple(memory)))


def state_of(plain: dict[str, Any]) -> RankState:
    """The ``RankState`` that ``nereus_describe`` wrote out."""
    return RankState(
        rank=plain["rank"],
        storages=tuple(FrameworkStorage(**storage) for storage in plain["storages"]),
        fragments=tuple(Fragment(**fragment) for fragment in plain["fragments"]),
        derived=tuple(plain["derived"]),
        caches=tuple(plain["caches"]),
    )


def coordinates_of(plain: dict[str, Any]) -> Coordinates:
    """The ``Coordinates`` that ``nereus_coordinates`` wrote out."""
    values: dict[str, Any] = {axis: None if value is None else tuple(value) for axis, value in plain.items()}
    return Coordinates(**values)


def update(llm: Any, version: int, *, deadline_s: float = 60.0) -> list[dict[str, int]]:
    """Receive on all workers of ``llm`` (a ``vllm.LLM`` whose workers joined a group) and drop what was computed with
    the old weights; checksums by worker. BindError where the engine would go on with old cache entries."""
    arrived = llm.collective_rpc("nereus_receive", args=(version, deadline_s), timeout=2 * deadline_s)
    forget_prefixes(llm)
    return list(arrived)


def forget_prefixes(llm: Any) -> None:
    """Reset the prefix cache. BindError where requests still use it: they would mix two versions."""
    if not llm.reset_prefix_cache():
        raise BindError("the prefix cache is in use: finish or abort the running requests, then reset it, then serve")
