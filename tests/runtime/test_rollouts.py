"""Rollouts whose engine refuses one: it is gone, the others go on, and no update waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nereus.runtime.rollouts import MODES, Emitted, Rollouts


class Counting:
    """An engine that counts up from each prompt's last token, and takes prompts of three at most."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, int]] = {}  # the next token, and how many are left

    def add(self, name: str, prompt: Sequence[int], limit: int) -> None:
        if len(prompt) > 3:
            raise ValueError(f"the prompt of {name} is too long")
        self.running[name] = prompt[-1] + 1, limit

    def step(self) -> list[Emitted]:
        found = []
        for name, (token, left) in list(self.running.items()):
            found.append(Emitted(name=name, tokens=(token,), logprobs=(0.0,), ended=left == 1))
            self.running[name] = token + 1, left - 1
            if left == 1:
                del self.running[name]
        return found

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self.running[name]

    def renew(self, version: int, *, running: bool) -> None: ...


@pytest.mark.parametrize("mode", MODES)
def test_one_that_is_refused_is_gone_and_no_update_waits_for_it(mode: str) -> None:
    rollouts = Rollouts(Counting(), mode, slots=3)
    for name, prompt in (("a", (10,)), ("long", (1, 2, 3, 4)), ("b", (20,))):
        rollouts.add(name, prompt, limit=2)
    with pytest.raises(ValueError, match="prompt of long"):
        rollouts.step()
    assert len(rollouts) == 2
    with rollouts.update(1):
        pass
    found = rollouts.ended()
    while len(rollouts):
        found += rollouts.step()
    assert {done.name: done.tokens for done in found} == {"a": [11, 12], "b": [21, 22]}
    rollouts.add("long", (1, 2), limit=1)
    assert [done.tokens for done in rollouts.step()] == [[3]]
