"""The example's own generator as an engine of rollouts that go on while its weights change (asynchronous mode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.ppo.model import Cache, Llama
from nereus.runtime.rollouts import Emitted


@dataclass(slots=True)
class _Running:
    """``given``: tokens that the cache does not have yet; ``left``: how many more are wanted."""

    tokens: list[int]
    given: list[int]
    cache: Cache
    left: int


class Generator:
    """Greedy, a token a step for each rollout; keys and values of each in a cache of its own."""

    def __init__(self, module: Llama) -> None:
        self.module = module
        self._running: dict[str, _Running] = {}

    def add(self, name: str, prompt: Sequence[int], limit: int) -> None:
        length = len(prompt) + limit
        cache = Cache(self.module.arch, 1, length, self.module.tp.size)
        self._running[name] = _Running(list(prompt), list(prompt), cache, limit)

    @torch.no_grad()
    def step(self) -> list[Emitted]:
        found = []
        for name, one in list(self._running.items()):
            chances = self.module(torch.tensor([one.given]), one.cache)[0, -1].log_softmax(-1)
            token = int(chances.argmax())
            one.given, one.left = [token], one.left - 1
            one.tokens.append(token)
            if one.left == 0:
                del self._running[name]
            emitted = Emitted(name=name, tokens=(token,), logprobs=(float(chances[token]),), ended=one.left == 0)
            found.append(emitted)
        return found

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self._running[name]

    def renew(self, version: int, *, running: bool) -> None:
        """Nothing is shared between rollouts, so only those that run may hold what other weights computed."""
        if running:
            for one in self._running.values():
                one.cache.filled, one.given = 0, list(one.tokens)
