"""The PPO example: its model cut and whole, its arithmetic, and the run itself under two layouts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from frameworks.harness import run  # noqa: E402

from examples.ppo import algorithm, fixed  # noqa: E402
from examples.ppo import loop as rl  # noqa: E402
from examples.ppo.model import Cache, Llama, initialise  # noqa: E402
from examples.ppo.plans import alone, laid_out, load  # noqa: E402
from examples.ppo.stages import sampling_numbers  # noqa: E402
from examples.ppo.task import Counting  # noqa: E402
from nereus.ir.plan import Plan  # noqa: E402
from nereus.models.tensors import logical_tensors  # noqa: E402
from nereus.runtime.groups import Group, Groups  # noqa: E402

PPO = Path(__file__).resolve().parents[2] / "examples" / "ppo"


def _plan(name: str) -> Plan:
    return load(str(PPO / f"{name}.plan"))


def _alone() -> Group:
    return Groups(dist.HashStore(), 0, 0).make("alone", (0,))


def _groups(folder: str, rank: int, world: int) -> Groups:
    return Groups(dist.FileStore(os.path.join(folder, "store"), world), 0, rank, deadline_s=60)


# -- the model


def _forward(tp: Group, head: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output of a fixed batch, and the gradient of its squares' sum."""
    arch = _plan("base").model("actor").arch
    module = Llama(replace(arch, num_kv_heads=2), tp, head)
    initialise(module, seed=3)
    if head == "value":
        torch.nn.init.constant_(module.score.weight, 0.1)
    tokens = torch.randint(0, arch.vocab, (3, 7), generator=torch.Generator().manual_seed(0))
    output = module(tokens)
    output.square().sum().backward()
    return output.detach(), {name: p.grad for name, p in module.named_parameters()}


def _cut(rank: int, world: int, folder: str) -> dict[str, Any]:
    tp = _groups(folder, rank, world).make("tp", range(world))
    return {head: _forward(tp, head) for head in ("lm", "value")}


@pytest.mark.procs
def test_cut_model_is_the_whole_one(tmp_path: Path) -> None:
    """Output and every gradient over two ranks, bit for bit, with two query heads to a kv head."""
    arch = replace(_plan("base").model("actor").arch, num_kv_heads=2)
    found = run(2, _cut, str(tmp_path), init=False)
    for head in ("lm", "value"):
        output, gradients = _forward(_alone(), head)
        for rank, result in enumerate(found):
            assert torch.equal(result[head][0], output)
            for tensor in logical_tensors(arch, head):
                whole = gradients[tensor.name]
                if tensor.cut is not None:
                    lo, hi = tensor.cut.interval(tensor.shape[tensor.cut.dim], 2, rank)
                    whole = whole.narrow(tensor.cut.dim, lo, hi - lo)
                assert torch.equal(result[head][1][tensor.name], whole), tensor.name


def test_cache_gives_what_the_whole_sequence_gives() -> None:
    arch = _plan("base").model("actor").arch
    module = Llama(arch, _alone())
    initialise(module, seed=3)
    tokens = torch.randint(0, arch.vocab, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = Cache(arch, 3, 7, tp=1)
        parts = [module(tokens[:, :3], cache), *(module(tokens[:, i : i + 1], cache) for i in range(3, 7))]
        torch.testing.assert_close(torch.cat(parts, dim=1), module(tokens), rtol=1e-4, atol=1e-5)


def test_layout_is_refused_that_the_model_cannot_have(tmp_path: Path) -> None:
    arch = replace(_plan("base").model("actor").arch, num_kv_heads=3)
    group = _alone()
    group.size = 2
    with pytest.raises(ValueError, match=r"kv heads \(3\) cannot be dealt to 2"):
        Llama(arch, group)


# -- arithmetic


def test_advantages_are_the_sums_that_define_them() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 5, generator=generator), torch.rand(2, 5, generator=generator)
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    gamma, lam = 0.9, 0.8
    advantages, returns = algorithm.gae(rewards * mask, values * mask, mask, gamma, lam)
    for row, length in enumerate((5, 2)):
        after = [*values[row, 1:length].tolist(), 0.0]
        deltas = [float(rewards[row, t]) + gamma * after[t] - float(values[row, t]) for t in range(length)]
        for t in range(length):
            expected = sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length))
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-6)
            assert float(returns[row, t]) == pytest.approx(expected + float(values[row, t]), abs=1e-6)
    assert not advantages[1, 2:].any() and not returns[1, 2:].any()


def test_group_advantages_compare_the_samples_of_a_prompt() -> None:
    rewards = torch.tensor([[1.0, 0], [0, 0], [0.5, 0.5], [0.5, 0.5]])
    found = algorithm.group_advantages(rewards, torch.ones(4, 2), samples=2)
    assert found[:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-3)


def test_rewards_count_the_right_numbers() -> None:
    task = Counting(goal=4, num_steps=3)
    prompts = task.prompts([0, 5])  # by 1 from 0; by 3 from 1
    assert task.answers(prompts, 4).tolist() == [[1, 2, 3, 4], [4, 7, 0, 3]]
    responses = torch.tensor([[1, 2, 9, 0], [4, 7, 0, 3]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    assert task.rewards(prompts, responses, mask).sum(1).tolist() == [0.5, 1.0]


def test_sampling_numbers_belong_to_the_sample() -> None:
    rule = rl.first(Counting(), algorithm.Settings(), 6).rng
    short, long = sampling_numbers(rule, 3, 4, 6), sampling_numbers(rule, 3, 8, 24)
    assert torch.equal(short, long[:4, :6])
    assert len(torch.unique(torch.cat((long, sampling_numbers(rule, 4, 8, 24))))) == 2 * 8 * 24


def test_loop_state_survives_json() -> None:
    state = rl.first(Counting(), algorithm.Settings(), 6)
    state = replace(state, step=7, data=state.data.advanced(100), kl=0.1 + 0.2, curve=({"step": 6, "reward": 0.25},))
    assert rl.Loop.of(json.loads(json.dumps(state.plain()))) == state


# -- the run


#: Number of processes, tensor-parallel degrees, steps.
LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {
    "dp 4": (4, {}, 20),
    "dp 2": (2, {}, 6),
    "tp 2, dp 2": (4, {"actor.train": 2, "critic.train": 2, "actor.generate": 4, "ref.infer": 2}, 6),
}


def _curves(rank: int, world: int, folder: str, plan: Plan) -> dict[str, rl.Loop]:
    store = dist.FileStore(os.path.join(folder, "store"), world)
    found = {}
    for epoch, (name, (count, tp, num_steps)) in enumerate(LAYOUTS.items()):
        found[name] = fixed.run(rank, store, fixed.options_of(laid_out(plan, count, tp, name), num_steps), epoch=epoch)
    return found


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, float], ...]]:
    folder = str(tmp_path_factory.mktemp("ppo"))
    found = run(4, _curves, folder, _plan("base"), init=False, timeout=500)
    assert all(result == found[0] for result in found), "every process has the same loop state"
    return {name: state.curve for name, state in found[0].items()}


@pytest.mark.slow
def test_grpo_learns_without_a_critic() -> None:
    plan = alone(_plan("grpo"))
    assert plan.find_stage("critic.train") is None
    state = fixed.run(0, dist.HashStore(), fixed.options_of(plan, 12))
    rewards = [point["reward"] for point in state.curve]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards


@pytest.mark.procs
@pytest.mark.slow
def test_reward_rises(curves: dict[str, tuple[dict[str, float], ...]]) -> None:
    rewards = [point["reward"] for point in curves["dp 4"]]
    assert sum(rewards[-5:]) > 5 * sum(rewards[:5]), rewards
    assert curves["dp 4"][-1]["length"] > 1.5 * curves["dp 4"][0]["length"], "responses grow with it"


@pytest.mark.procs
@pytest.mark.slow
def test_layouts_give_one_curve(curves: dict[str, tuple[dict[str, float], ...]]) -> None:
    """To the last bit: everything is summed in an order of its own, not in that of the processes."""
    assert curves["dp 2"] == curves["dp 4"][:6]
    assert curves["tp 2, dp 2"] == curves["dp 4"][:6]
