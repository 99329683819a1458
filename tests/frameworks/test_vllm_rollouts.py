"""vLLM's weights change while its rollouts run, twice in a row, in every mode. What each rollout becomes is compared
with transformers' own model, step by step, on the weights that its tokens say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import vllm_engines as engines
from frameworks.harness import run
from frameworks.vllm_models import arch_of

from nereus.models.tensors import logical_tensors
from nereus.runtime.live import move_here
from nereus.runtime.rollouts import DRAIN, KEEP, MODES, PREFILL, REQUEUE, Rollout, Rollouts

#: Tokens that vLLM caches together.
BLOCK = 32
#: Long enough that vLLM caches a part of it, for the second rollout with it to find.
PROMPT = tuple(1 + 7 * at % 90 for at in range(40))
PROMPTS = {"a": PROMPT, "b": (1, 7, 99, 200, 13, 5), "c": (1, 17, 17, 3), "d": PROMPT}
LIMIT = 14
#: Seed of the weights of each version.
SEEDS = (1, 2, 1)


def _all_modes(rank: int, world_size: int, folders: dict[int, Path], at: str) -> dict[str, Any]:
    from vllm import SamplingParams

    from nereus.runtime.adapters.base import BindError
    from nereus.runtime.adapters.vllm_rollouts import VllmRollouts

    rules = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
    more = {"dtype": "float32", "plain": True, "block_size": BLOCK, "enable_prefix_caching": True}
    llm = engines.engine_here(folders[SEEDS[0]], at, async_scheduling=False, **more)
    tensors = logical_tensors(arch_of("llama"))

    def load(seed: int) -> None:
        adapter = llm.collective_rpc("nereus_adapter")[0]
        move_here([engines.whole("llama", seed, torch.float32)], [adapter.bind()], tensors)
        adapter.finish()

    found: dict[str, Any] = {}
    for mode in MODES:
        engine = VllmRollouts(llm, rules)
        rollouts = Rollouts(engine, mode, slots=2)
        done: list[Rollout] = []
        for name, prompt in PROMPTS.items():
            rollouts.add(name, prompt, LIMIT)
        for version in (1, 2):
            for _ in range(4 if version == 1 else 12):
                done += rollouts.step()
            with rollouts.update(version):
                load(SEEDS[version])
        while len(rollouts):
            done += rollouts.step()
        found[mode] = done
        engine.renew(3, running=False)  # the last weights are those that the next mode begins with
    # An update that fails: the engine serves nothing until one succeeds, and then goes on.
    rollouts = Rollouts(VllmRollouts(llm, rules), PREFILL, slots=2)
    rollouts.add("a", PROMPT, LIMIT)
    rollouts.step()
    with pytest.raises(MemoryError), rollouts.update(1):
        raise MemoryError
    with pytest.raises(RuntimeError, match="must not serve"):
        rollouts.step()
    with rollouts.update(2):
        load(SEEDS[2])
    rollouts.step()
    # What another engine would go on from.
    (left,) = rollouts.release()
    assert len(rollouts) == 0 and not llm.llm_engine.has_unfinished_requests()
    again = Rollouts(VllmRollouts(llm, rules, version=2), PREFILL, slots=2, version=2)
    again.take_up(left)
    ended: list[Rollout] = []
    while len(again):
        ended += again.step()
    found["released"] = ended
    # Two with one prompt under the same weights share what is computed: the prefix cache is on.
    twice = [llm.generate([{"prompt_token_ids": list(PROMPT)}], rules, use_tqdm=False)[0] for _ in range(2)]
    found["cached"] = [request.num_cached_tokens for request in twice]
    # The CPU build never schedules ahead; one that does is refused.
    llm.llm_engine.vllm_config.scheduler_config.async_scheduling = True
    try:
        VllmRollouts(llm, rules)
    except BindError as error:
        found["refusal"] = str(error)
    return found


class Oracle:
    """Greedy decoding by transformers, a token at a time, on weights of any version."""

    def __init__(self, folders: dict[int, Path]) -> None:
        from transformers import AutoModelForCausalLM

        self.models = {
            seed: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for seed, folder in folders.items()
        }

    @torch.no_grad()
    def check(self, rollout: Rollout, mode: str) -> None:
        """Each token is what the model of its version says, on keys and values as the mode has them."""
        assert tuple(rollout.prompt) == PROMPTS[rollout.name] and len(rollout.tokens) == LIMIT
        assert len(rollout.versions) == len(rollout.logprobs) == LIMIT
        cache, given, before = None, list(rollout.prompt), rollout.versions[0]
        for at, (token, version) in enumerate(zip(rollout.tokens, rollout.versions, strict=True)):
            if version != before and mode != KEEP:
                cache, given = None, [*rollout.prompt, *rollout.tokens[:at]]
            before = version
            model = self.models[SEEDS[version]]
            answer = model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            chances = answer.logits[0, -1].log_softmax(-1)
            assert int(chances.argmax()) == token, (rollout.name, mode, at)
            assert abs(float(chances[token]) - rollout.logprobs[at]) < 1e-3
            given = [token]


def test_rollouts_outlive_updates_in_every_mode(tmp_path: Path) -> None:
    folders = {seed: engines.checkpoint(tmp_path / f"llama-{seed}", "llama", seed, torch.float32) for seed in (1, 2)}
    (found,) = run(1, _all_modes, folders, engines.address(), init=False, timeout=500)
    oracle = Oracle(folders)
    for mode in MODES:
        done = {rollout.name: rollout for rollout in found[mode]}
        assert sorted(done) == sorted(PROMPTS)
        for rollout in done.values():
            oracle.check(rollout, mode)
        spans = {name: sorted(set(rollout.versions)) for name, rollout in done.items()}
        if mode in (DRAIN, REQUEUE):
            assert all(len(versions) == 1 for versions in spans.values()), spans
            assert spans["a"] == ([0] if mode == DRAIN else [2])
        else:
            assert spans["a"] == spans["b"] == [0, 1] and spans["c"] == spans["d"] == [1, 2]
        assert any(rollout.restarts for rollout in done.values()) == (mode == REQUEUE)
    a, kept = (next(r for r in found[mode] if r.name == "a") for mode in (PREFILL, KEEP))
    assert a.tokens[:4] == kept.tokens[:4] and a.tokens != kept.tokens
    (released,) = found["released"]
    oracle.check(released, PREFILL)
    assert sorted(set(released.versions)) == [0, 2]
    assert found["cached"][1] == BLOCK
    assert "async_scheduling=False" in found["refusal"]
