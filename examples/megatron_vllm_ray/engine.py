"""A stage that vLLM generates with: an engine inside the job's own processes, a rank in each."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nereus.runtime.adapters.vllm import VllmAdapter
from nereus.runtime.adapters.vllm_worker import forget_prefixes
from nereus.runtime.session.members import View

WORKER = "nereus.runtime.adapters.vllm_worker.NereusWorker"


class Engine:
    """``config``: the model's config.json, as text. Weights come by ``Job.sync`` before every use; the engine that is
    there serves on where a change leaves its stage as it was."""

    def __init__(self, store: Any, config: str) -> None:
        self._store, self._config = store, config
        self._llm: Any = None
        self._members: tuple[int, ...] = ()
        self.speaks = False

    def build(self, view: View) -> VllmAdapter:
        """All ranks of the stage at once."""
        if view.stage.dp > 1:
            raise ValueError(f"{view.stage.name}: this example has one engine")
        if self._llm is None:
            self._llm, self._members = self._started(view), view.place.everyone.members
            self.speaks = view.place.tp.rank == 0
        if self._members != view.place.everyone.members:
            raise ValueError(f"{view.stage.name}: this example keeps its engine")
        (adapter,) = self._llm.collective_rpc("nereus_adapter")
        return adapter  # type: ignore[no-any-return]

    def generate(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> tuple[list[Any], list[Any]]:
        """(tokens, their log-probabilities), ``length`` of each for every prompt, sampled. After a sync: what the
        engine cached belongs to other weights."""
        from vllm import SamplingParams

        forget_prefixes(self._llm)
        rules = [
            SamplingParams(
                temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0, seed=seed + number
            )
            for number in range(len(prompts))
        ]
        found = self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], rules, use_tqdm=False)
        answers = [request.outputs[0] for request in found]
        tokens = [list(answer.token_ids) for answer in answers]
        values = [[at[t].logprob for at, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
        return tokens, values

    def _started(self, view: View) -> Any:
        from vllm import LLM

        place, folder = view.place.tp, tempfile.mkdtemp(prefix="nereus-engine-")
        Path(folder, "config.json").write_text(self._config)
        key = f"engine/{view.epoch}"
        if place.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._store.set(key, f"{socket.gethostname()} {probe.getsockname()[1]}")
        host, port = self._store.get(key).decode().split()
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            RANK=str(place.rank),
            LOCAL_RANK=str(place.rank),
            WORLD_SIZE=str(place.size),
            LOCAL_WORLD_SIZE=str(place.size),
            MASTER_ADDR=host,
            MASTER_PORT=port,
        )
        return LLM(
            model=folder,
            load_format="dummy",
            tensor_parallel_size=place.size,
            distributed_executor_backend="external_launcher",
            skip_tokenizer_init=True,
            max_model_len=view.plan.workload.seq_len + 1,
            max_num_seqs=view.plan.workload.num_samples,
            kv_cache_memory_bytes=view.stage.kv_cache_bytes,
            enforce_eager=not torch.cuda.is_available(),
            dtype="float32",
            worker_extension_cls=WORKER,
        )
