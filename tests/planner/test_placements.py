"""Stages on other GPUs: against brute force, what is written, limits, and the fewest GPUs that do."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from planner.test_rl_step import COLOCATED, PRIOR, SPLIT, plan_of

from nereus.cli.plan_limits import limits_of
from nereus.ir.cluster import Pool
from nereus.ir.plan import Plan
from nereus.lang.api import load_plan
from nereus.models.memory import check_memory
from nereus.planner.limits import Limits
from nereus.planner.placements import Placements, units_of
from nereus.planner.rl_step import step_time
from nereus.planner.search import Found, search
from nereus.planner.smallest import smallest
from nereus.planner.targets import targets

MOVE = Limits(move=True)
SMALL = """
cluster { node n0 { gpus = 4 x "a100-sxm-40gb" } }
model actor = "qwen2.5-1.5b"
model ref = actor { frozen = true }
workload { algorithm = grpo  prompts = 8  samples = 2  mini_batch = 8  prompt_len = 512  response_len = 1024 }
stage actor.generate { on = n0.gpu[0-1]  engine = vllm  kv_cache = 4 GiB  idle = offload }
stage actor.train { on = n0.gpu[2-3]  backend = megatron  optimizer = adam }
stage ref.infer { on = n0.gpu[2-3] }
"""


@pytest.fixture(scope="module")
def bench(repo_root: Path) -> Any:
    sys.path.insert(0, str(repo_root / "benchmarks"))
    import search as bench

    return bench


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_no_plan_on_any_gpus_is_better(bench: Any, seed: int) -> None:
    rng = random.Random(f"moving {seed}")
    plan = bench.random_plan(rng)
    while len(plan.cluster.devices) ** len(plan.owners()) > 8:
        plan = bench.random_plan(rng)
    found, best = bench.agrees(plan, PRIOR, move=True)
    assert found == pytest.approx(best) if best is not None else found is None


@pytest.mark.parametrize("text", [COLOCATED, SPLIT, SMALL], ids=["colocated", "split", "small"])
def test_what_is_written_resolves_to_what_was_judged(text: str, tmp_path: Path) -> None:
    (tmp_path / "base.plan").write_text(text)
    variant = tmp_path / "variant.plan"
    limits = replace(MOVE, num_gpus={"actor.train": (1, 3)}) if text is SMALL else MOVE
    found = search(plan_of(text), PRIOR, count=6, limits=limits).best
    assert found
    for each in found:
        written = "\n".join(f"stage {stage} {{ {keys} }}" for stage, keys in each.changes.items() if keys)
        variant.write_text(f'extends "base.plan"\n{written}\n')
        again = load_plan(str(variant)).plan
        assert again is not None, written
        assert [replace(s, span=None, key_spans=()) for s in again.stages] == [
            replace(s, span=None, key_spans=()) for s in each.plan.stages
        ]
        assert not [d for d in check_memory(again) if d.severity.value == "error"]
        assert step_time(again, PRIOR).seconds == pytest.approx(each.seconds)


def test_stages_that_run_side_by_side_may_get_gpus_of_their_own() -> None:
    """In async mode generation shares GPUs with nobody, and how many it gets decides the pace."""
    text = SPLIT.replace("algorithm = grpo", "algorithm = grpo  mode = async { staleness = 1 }")
    text = text.replace("ref.infer { on = n[0-1]", "ref.infer { on = n1").replace("on = n0 ", "on = n0.gpu[0-1] ")
    plan = plan_of(text)
    found = search(plan, PRIOR, count=5, limits=MOVE).best
    for each in found:
        generate = set(each.plan.stage("actor.generate").devices)
        assert all(generate.isdisjoint(s.devices) for s in each.plan.stages if s.name != "actor.generate")
    (present,) = search(plan, PRIOR, count=1).best
    assert found[0].seconds < 0.95 * present.seconds


def _sets(plan: Plan) -> list[frozenset[object]]:
    return [frozenset(owner.devices) for owner in plan.owners()]


def test_owners_share_all_gpus_or_none() -> None:
    plan = plan_of(SMALL)
    every = Placements(plan, MOVE)
    seen = set()
    for runs in every:
        put = every.placement(runs).put(plan)
        for first, second in combinations(_sets(put), 2):
            assert first == second or first.isdisjoint(second)
        for stage in put.stages:
            assert stage.devices and set(stage.devices) <= set(plan.cluster.devices)
        seen.add(tuple(_sets(put)))
    # Three owners in one set (4 sizes), in two (3 ways, 6 pairs of sizes) and in three (4 triples).
    assert len(seen) == 4 + 3 * 6 + 4


def test_stages_stay_where_a_placement_allows_it() -> None:
    plan = plan_of(SMALL)
    every = Placements(plan, MOVE)
    present = _sets(plan)
    kept = [runs for runs in every if _sets(every.placement(runs).put(plan)) == present]
    assert len(kept) == 1 and not every.placement(kept[0]).changes(plan)


def test_limits_are_kept() -> None:
    plan = plan_of(COLOCATED)
    for limits, holds in (
        (replace(MOVE, num_gpus={"actor.train": (4, 8)}), lambda p: len(p.stage("actor.train").devices) in range(4, 9)),
        (replace(MOVE, free=frozenset({"n1"})), lambda p: all(d.node == "n0" for s in p.stages for d in s.devices)),
        (replace(MOVE, most_gpus=6), lambda p: len({d for s in p.stages for d in s.devices}) <= 6),
        (
            replace(MOVE, pinned=frozenset({"actor.generate"}), num_gpus={"actor.train": (8, 8)}),
            lambda p: p.stage("actor.generate") == plan.stage("actor.generate"),
        ),
        (Limits(values={("actor.train", "tp"): frozenset("4")}), lambda p: p.stage("actor.train").tp == 4),
        (
            Limits(values={("actor.train", "micro_batch"): frozenset("2")}),
            lambda p: p.stage("actor.train").micro_batch == 2,
        ),
    ):
        found = search(plan, PRIOR, count=3, limits=limits).best
        assert all(holds(each.plan) for each in found)
        assert found or limits.pinned  # all GPUs are taken by what stays, or something fits


def test_a_pinned_stage_leaves_the_rest_of_the_cluster() -> None:
    plan = plan_of(SPLIT)
    limits = replace(MOVE, pinned=frozenset({"actor.generate"}))
    for each in search(plan, PRIOR, count=3, limits=limits).best:
        assert each.plan.stage("actor.generate") == plan.stage("actor.generate")
        generate = set(plan.stage("actor.generate").devices)
        for stage in each.plan.stages:
            assert set(stage.devices) == generate or generate.isdisjoint(stage.devices) or stage.name == "ref.infer"


def test_the_smallest_pool(bench: Any) -> None:
    """What is said is what brute force finds on so many GPUs, and on one fewer nothing fits."""
    text = SMALL.replace("a100-sxm-40gb", "v100-sxm-32gb")
    plan = plan_of(text)
    found = smallest(plan, PRIOR)
    assert found is not None and found.too_few == found.num_gpus - 1
    for num_gpus in range(1, 5):
        fewer = (
            text.replace("gpus = 4 x", f"gpus = {num_gpus} x")
            .replace("n0.gpu[0-1]", "n0.gpu0")
            .replace("n0.gpu[2-3]", "n0.gpu0")
        )
        best = search(plan_of(fewer), PRIOR, count=1, limits=MOVE).best
        assert bool(best) == (num_gpus >= found.num_gpus)
        if num_gpus == found.num_gpus:
            assert best[0].seconds == pytest.approx(found.found.seconds)
    assert smallest(plan_of(COLOCATED.replace("llama-3.1-8b", "llama-3.1-405b")), PRIOR) is None


def test_large_clusters_are_cut_into_nodes_and_unlike_ones_tried_in_every_order() -> None:
    many = plan_of(COLOCATED.replace("n[0-1]", "n[0-31]"))
    assert {len(unit) for unit in units_of(many.cluster, MOVE)} == {8}
    mixed = COLOCATED.replace(
        'node n[0-1] { gpus = 8 x "h100-sxm-80gb" }',
        'node n0 { gpus = 8 x "h100-sxm-80gb" } node n1 { gpus = 8 x "a100-sxm-80gb" }',
    )
    plan = plan_of(mixed)
    every = Placements(plan, MOVE)
    homes = {tuple(d.node for d in every.placement(runs).devices["actor.train"]) for runs in every}
    assert ("n0",) * 8 in homes and ("n1",) * 8 in homes


def test_the_stop_of_moving_counts() -> None:
    """A job that ends soon stays where it is; one that goes on for long moves where steps are faster."""
    plan = plan_of(SPLIT.replace("prompts = 64", "prompts = 4").replace("mini_batch = 256", "mini_batch = 32"))
    assert not any(targets(plan, PRIOR, steps=1, limits=MOVE).best[0].found.changes.values())
    assert "on = " in "".join(targets(plan, PRIOR, steps=10_000, limits=MOVE).best[0].found.changes.values())


def test_a_pool_keeps_gpus_free(tmp_path: Path) -> None:
    plan = plan_of(COLOCATED)
    args = Namespace(pin=[], only=[], gpus=[], free=[], move=True, smallest=False)

    def best(pool: Pool) -> tuple[Found, ...]:
        pooled = replace(plan, cluster=replace(plan.cluster, pool=pool))
        return search(pooled, PRIOR, count=1, limits=limits_of(pooled, args)).best

    found = best(Pool(standby_gpus=8))
    assert {d.node for s in found[0].plan.stages for d in s.devices} == {"n0"}
    assert not best(Pool(standby_gpus=24))  # more than there are: none is left, not some


def test_the_smallest_pool_is_none_that_the_pool_never_is() -> None:
    plan = plan_of(COLOCATED)
    free = smallest(plan, PRIOR)
    assert free is not None and free.num_gpus < 12
    pooled = replace(plan, cluster=replace(plan.cluster, pool=Pool(min_gpus=12)))
    found = smallest(pooled, PRIOR)
    assert found is not None and found.num_gpus == 12 and found.too_few is None
