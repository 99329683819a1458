"""vLLM's scheduler as an engine of rollouts that outlive changes of its weights, step by step in the caller's process.

    llm = LLM(..., async_scheduling=False)
    rollouts = Rollouts(VllmRollouts(llm, SamplingParams(temperature=1.0)), "prefill", slots=256)

A request's prefixes are cached under the version of the weights that it began with (vLLM's ``cache_salt``), so that no
later one finds keys and values of older weights, whatever still runs on them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.vllm_layout import require_vllm
from nereus.runtime.rollouts import Emitted


class VllmRollouts:
    """``sampling``: vLLM's parameters, whose ``max_tokens`` is each rollout's own. ``version``: of the weights.

    BindError where the engine schedules ahead: a step could then be under way while its weights are written."""

    def __init__(self, llm: Any, sampling: Any, *, version: int = 0) -> None:
        require_vllm()
        if llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
            raise BindError(
                "this engine prepares its next step while one runs: start it with async_scheduling=False, so that it "
                "is at rest between two steps"
            )
        self.engine, self.sampling, self.version = llm.llm_engine, sampling, version
        self._emitted: dict[str, int] = {}

    def add(self, name: str, prompt: Sequence[int], limit: int) -> None:
        rules = copy.copy(self.sampling)
        rules.max_tokens, rules.logprobs = limit, rules.logprobs or 0
        words = {"prompt_token_ids": list(prompt), "cache_salt": f"nereus-{self.version}"}
        self.engine.add_request(name, words, rules)
        self._emitted[name] = 0

    def step(self) -> list[Emitted]:
        found = []
        for request in self.engine.step():
            (answer,) = request.outputs
            seen = self._emitted[request.request_id]
            tokens = tuple(answer.token_ids)[seen:]
            chances = tuple(at[token].logprob for at, token in zip(answer.logprobs[seen:], tokens, strict=True))
            self._emitted[request.request_id] = seen + len(tokens)
            if request.finished:
                del self._emitted[request.request_id]
            found.append(Emitted(name=request.request_id, tokens=tokens, logprobs=chances, ended=request.finished))
        return found

    def abort(self, names: Sequence[str]) -> None:
        self.engine.abort_request(list(names))
        for name in names:
            self._emitted.pop(name, None)

    def renew(self, version: int, *, running: bool) -> None:
        """With ``running`` the scheduler preempts all requests, forgets their blocks, and computes them anew."""
        self.version = version
        self.engine.reset_prefix_cache(reset_running_requests=running)
