"""Live vLLM engines on the CPU for the tests."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from frameworks.vllm_models import arch_of, config_of, full_weights

from nereus.ir.arch import Arch
from nereus.ir.fragment import fragments_of
from nereus.ir.tensor import matrix_shape
from nereus.models.naming.base import Where
from nereus.models.naming.hf import HfNaming
from nereus.runtime.adapters.base import Binding, BindingBuilder
from nereus.runtime.adapters.vllm_worker import NereusWorker

#: Filled with zeros at each start.
KV_CACHE_BYTES = 16 * 2**20
NUM_TOKENS = 12
PROMPTS = ([1, 40, 41, 42], [1, 7, 99, 200, 13, 5], [1, 17, 17, 3])


class Worker(NereusWorker):
    """``worker_extension_cls`` of the tests' engines."""

    def test_digests(self) -> dict[str, str]:
        """Every parameter and buffer of the model, empty ones included."""
        found = {}
        model = self._nereus_model()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[name] = f"{tuple(tensor.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"
        return found

    def test_num_rows(self, parameter: str) -> int:
        return int(self._nereus_model().get_parameter(parameter).shape[0])

    def test_collect(self, value: list[list[int]], source: int) -> list[list[int]]:
        return collect(self._nereus_joined(), value, source)

    def test_leave(self) -> None:
        """Leave the joined group together: its first member serves the store that the others may still read."""
        self._nereus_joined().barrier().wait()
        self.nereus_leave()

    def test_refusal(self) -> str:
        """What binding without staging says, empty where it binds."""
        from nereus.runtime.adapters.base import BindError

        try:
            self._nereus_adapter(stage=False).bind()
        except BindError as error:
            return str(error)
        return ""


def weights_of(arch: Arch, seed: int) -> dict[str, torch.Tensor]:
    """Full weights that make a model answer differently for each seed."""
    found = {}
    for number, (name, value) in enumerate(full_weights(arch).items()):
        generator = torch.Generator().manual_seed(seed * 10_000 + number)
        noise = torch.randn(value.shape, generator=generator)
        found[name] = (0.2 * noise if value.ndim > 1 else 1 + 0.1 * noise).to(value.dtype)
    return found


def whole(family: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Binding:
    """A trainer process that holds everything under its published name."""
    naming, builder = HfNaming(arch=arch_of(family), fused_experts=False), BindingBuilder(rank=0)
    for name, value in weights_of(arch_of(family), seed).items():
        builder.fragments += fragments_of(
            naming.segments(name, value.shape, Where()),
            num_cols=matrix_shape(tuple(value.shape))[1],
            slot="weight",
            storage=builder.storage(name, value.to(dtype)),
        )
    return builder.finish()


def checkpoint(folder: Path, family: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(family)))
    weights = {name: value.to(dtype) for name, value in weights_of(arch_of(family), seed).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_here(
    model: Path,
    meeting: str,
    *,
    rank: int = 0,
    tp: int = 1,
    plain: bool = False,
    dtype: str = "bfloat16",
    **more: Any,
) -> Any:
    """Rank ``rank`` of an engine over the ``tp`` processes that call this together: no process beside them, so that
    vLLM is imported once in each.

    ``plain``: the CPU backend keeps its linears' weights as they are, as a GPU does. Otherwise it packs them into
    oneDNN handles where oneDNN has a kernel for the dtype on this CPU: bfloat16 on some, float32 everywhere."""
    import vllm._custom_ops
    from vllm import LLM

    # vLLM collects garbage five times in a start; what its import left is none.
    gc.freeze()
    host, port = meeting.split(":")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(tp),
        LOCAL_WORLD_SIZE=str(tp),
        MASTER_ADDR=host,
        MASTER_PORT=port,
    )
    vllm._custom_ops._supports_onednn = not plain
    return LLM(
        model=str(model),
        tensor_parallel_size=tp,
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enforce_eager=True,
        dtype=dtype,
        worker_extension_cls="frameworks.vllm_engines.Worker",
        **more,
    )


def forked(rank: int, world_size: int, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """For ``harness.run`` with one process: ``function(rank, count, *args)`` in ``count`` forks of it, results by rank.
    vLLM is imported once, which costs more than what the forks do."""
    import vllm._custom_ops
    import vllm.v1.worker.cpu_worker  # noqa: F401

    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork"))
    futures = [pool.submit(function, number, count, *args) for number in range(count)]
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        error = future.exception()
        if error is not None:  # the others wait for this one; the harness ends them
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)
    return [future.result() for future in futures]


def close_here(llm: Any) -> None:
    """So that this process can have another engine."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()


def ask(llm: Any, method: str, *args: Any) -> Any:
    """What the worker in this process answers."""
    return llm.collective_rpc(method, args=args)[0]


@dataclass(frozen=True)
class Seen:
    """Greedy continuations of the prompts, and what the worker's parameters and buffers are."""

    tokens: list[list[int]]
    digests: dict[str, str]


def seen(llm: Any) -> Seen:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
    return Seen([list(request.outputs[0].token_ids) for request in found], ask(llm, "test_digests"))


def collect(group: Any, value: list[list[int]] | None, source: int) -> list[list[int]]:
    """Equally long lists of tokens of one process of a joined group, on all others."""
    shape = (len(PROMPTS), NUM_TOKENS)
    found = torch.tensor(value).view(shape) if group.rank() == source else torch.zeros(shape, dtype=torch.int64)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = source
    group.broadcast([found], options).wait()
    tokens: list[list[int]] = found.tolist()
    return tokens


def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
