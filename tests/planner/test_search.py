"""The search against brute force, and what it must keep."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner.test_rl_step import COLOCATED, PRIOR, plan_of

from nereus.lang.api import load_plan
from nereus.models.memory import check_memory
from nereus.models.memory.neighbours import even_as_can_be
from nereus.models.memory.steady import COMMUNICATOR_BYTES, CONTEXT_BYTES, steady_state
from nereus.planner.candidates import candidates, choices_of
from nereus.planner.limits import Limits
from nereus.planner.rl_step import step_time
from nereus.planner.search import search


@pytest.fixture(scope="module")
def bench(repo_root: Path) -> Any:
    sys.path.insert(0, str(repo_root / "benchmarks"))
    import search as bench

    return bench


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6, 7])
def test_no_plan_is_better(bench: Any, seed: int) -> None:
    found, best = bench.agrees(bench.random_plan(random.Random(f"test {seed}")), PRIOR)
    assert found == pytest.approx(best) if best is not None else found is None


@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_those_of_the_memory_model(bench: Any, seed: int) -> None:
    """Candidate by candidate: while a stage runs alone on its GPUs, and beside an idle owner."""
    plan = bench.random_plan(random.Random(f"bytes {seed}"))
    owner = plan.owners()[-1]
    of_owner = candidates(plan, owner, PRIOR)
    for number in range(0, len(of_owner.all), 7):
        choice, held = of_owner.all[number], of_owner.held(number)
        report = steady_state(choice.alone)
        for stage in choice.alone.stages:
            for device, num_bytes in zip(stage.ranks, held.running[stage.name], strict=True):
                row = report.row(stage.name, device)
                assert row.need_bytes == num_bytes + CONTEXT_BYTES + COMMUNICATOR_BYTES


def test_what_is_found_fits_and_takes_what_it_says() -> None:
    plan = plan_of(COLOCATED)
    found = search(plan, PRIOR, count=3)
    assert len(found.best) == 3 and found.present is not None
    assert found.best[0].seconds < found.present.seconds == pytest.approx(step_time(plan, PRIOR).seconds)
    costs = [each.cost for each in found.best]
    assert costs == sorted(costs)
    for each in found.best:
        assert not [d for d in check_memory(each.plan) if d.severity.value == "error"]
        assert step_time(each.plan, PRIOR).seconds == pytest.approx(each.seconds)


def test_pinned_stages_stay() -> None:
    plan = plan_of(COLOCATED)
    for each in search(plan, PRIOR, limits=Limits(pinned=frozenset({"actor.logprob"}))).best:
        assert each.plan.stage("actor.train") == plan.stage("actor.train")
    every = [stage.name for stage in plan.stages]
    (only,) = search(plan, PRIOR, limits=Limits(pinned=frozenset(every))).best
    assert only.plan == plan and not any(only.changes.values())


def test_a_plan_that_does_not_fit_is_mended(repo_root: Path) -> None:
    plan = load_plan(str(repo_root / "tests" / "plans" / "ppo-8b-4k-refused.plan")).plan
    assert plan is not None
    found = search(plan, PRIOR, count=1)
    assert found.present is None and len(found.best) == 1


def test_nothing_fits_on_gpus_that_are_too_small() -> None:
    text = COLOCATED.replace("llama-3.1-8b", "llama-3.1-405b")
    found = search(plan_of(text), PRIOR)
    assert found.best == () and found.present is None


def test_choices_are_what_the_front_end_accepts() -> None:
    """Written into the plan, each choice resolves to the very stages that were judged."""
    plan = plan_of(COLOCATED)
    owner = plan.stage("actor.train")
    chosen = list(choices_of(plan, owner))
    assert len(chosen) > 50
    for choice in chosen[::9]:
        changes, alone, text = choice.changes, choice.alone, COLOCATED
        for stage, keys in changes.items():
            text = _written(text, stage, keys)
        resolved = plan_of(text).stage("actor.train")
        judged = alone.stage("actor.train")
        for field in ("tp", "pp", "dp", "sp", "zero", "micro_batch", "recompute", "pp_split"):
            assert getattr(resolved, field) == getattr(judged, field), (changes, field)


def _written(text: str, stage: str, keys: str) -> str:
    """``keys`` in place of those that the stage has."""
    start = text.index(f"stage {stage} {{") + len(f"stage {stage} {{")
    end = text.index("}", start)
    entries = dict(part.split(" = ") for part in text[start:end].strip().split("  "))
    for part in keys.split("  "):
        if part:
            name, value = part.split(" = ")
            entries[name] = value
    body = "  ".join(f"{name} = {value}" for name, value in entries.items() if value != "default")
    return f"{text[:start]} {body} {text[end:]}"


def test_more_room_is_never_slower() -> None:
    plan = plan_of(COLOCATED)
    (best,) = search(plan, PRIOR, count=1).best
    roomy = replace(
        plan,
        cluster=replace(
            plan.cluster,
            nodes=tuple(replace(n, gpu=replace(n.gpu, mem_gb=2 * n.gpu.mem_gb)) for n in plan.cluster.nodes),
        ),
    )
    assert search(roomy, PRIOR, count=1).best[0].cost <= best.cost


TWO_TRAINERS = (
    COLOCATED
    + """
model critic = "llama-3.1-8b" { head = value }
stage critic.train { with = actor.train  optimizer = adam }
"""
)


@pytest.mark.parametrize(
    "text",
    [
        TWO_TRAINERS,
        COLOCATED.replace("backend = megatron", "backend = megatron  sp = true"),
        COLOCATED.replace("backend = megatron", "backend = megatron  replicas { min = 2  dormant = 1 }"),
    ],
    ids=["two trainers", "sp", "replicas"],
)
def test_what_is_written_is_what_was_judged(text: str, tmp_path: Path) -> None:
    base, variant = tmp_path / "base.plan", tmp_path / "new.plan"
    base.write_text(text)
    plan = load_plan(str(base)).plan
    assert plan is not None
    for found in search(plan, PRIOR, count=12).best:
        written = "\n".join(f"stage {stage} {{ {keys} }}" for stage, keys in found.changes.items() if keys)
        variant.write_text(f'extends "base.plan"\n{written}\n')
        again = load_plan(str(variant)).plan
        assert again is not None, written
        both = zip(again.stages, found.plan.stages, strict=True)
        assert all(replace(a, span=b.span, key_spans=b.key_spans) == b for a, b in both), written


def test_a_plan_that_overflows_the_host_is_not_the_present() -> None:
    text = COLOCATED.replace('gpus = 8 x "h100-sxm-80gb"', 'gpus = 8 x "h100-sxm-80gb"  host_mem = 10 GiB')
    pinned = ("actor.generate", "actor.train", "ref.infer")
    assert search(plan_of(text), PRIOR, count=1, limits=Limits(pinned=frozenset(pinned))).present is None


@pytest.mark.parametrize(
    ("first", "second"), [("h200-sxm-141gb", "h100-sxm-80gb"), ("h100-sxm-80gb", "h200-sxm-141gb")]
)
def test_the_slowest_gpu_sets_the_pace(first: str, second: str) -> None:
    both = f'node n0 {{ gpus = 8 x "{first}" }}\n node n1 {{ gpus = 8 x "{second}" }}'
    mixed = COLOCATED.replace('node n[0-1] { gpus = 8 x "h100-sxm-80gb" }', both)
    (slow, found) = (step_time(plan_of(text), PRIOR) for text in (COLOCATED, mixed))
    assert found.stages[0].seconds == pytest.approx(slow.stages[0].seconds, rel=0.01)
    assert found.stages[-1].seconds == pytest.approx(slow.stages[-1].seconds, rel=0.01)


def test_pipelines_that_do_not_divide_the_layers_are_written_out(tmp_path: Path) -> None:
    """30 layers over 4 stages: the first and the last have fewer, and the text says which."""
    base, variant = tmp_path / "base.plan", tmp_path / "new.plan"
    base.write_text(COLOCATED.replace("llama-3.1-8b", "deepseek-llm-7b"))
    plan = load_plan(str(base)).plan
    assert plan is not None
    limits = Limits(values={("actor.train", "pp"): frozenset("4"), ("ref.infer", "pp"): frozenset({"8"})})
    found = search(plan, PRIOR, count=2, limits=limits).best
    assert found
    for each in found:
        assert each.plan.stage("actor.train").pp_split == (7, 8, 8, 7)
        assert each.plan.stage("actor.logprob").pp_split == (7, 8, 8, 7)
        assert each.plan.stage("ref.infer").pp_split == (3, 4, 4, 4, 4, 4, 4, 3)
        written = "\n".join(f"stage {stage} {{ {keys} }}" for stage, keys in each.changes.items() if keys)
        variant.write_text(f'extends "base.plan"\n{written}\n')
        again = load_plan(str(variant)).plan
        assert again is not None, written
        both = zip(again.stages, each.plan.stages, strict=True)
        assert all(replace(a, span=b.span, key_spans=b.key_spans) == b for a, b in both), written


def test_every_split_has_all_layers() -> None:
    for layers in range(1, 70):
        for pp in range(1, layers + 1):
            split = even_as_can_be(layers, pp)
            assert sum(split) == layers and max(split) - min(split) <= 1
            assert split[0] == min(split) or layers % pp == 0 or pp - layers % pp == 1
