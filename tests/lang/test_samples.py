"""The sample plans parse, resolve, format and survive the round trip through their placed form."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nereus.ir.diagnostic import Severity, Source
from nereus.lang.api import format_text, load_plan, pinned, placed_plan_text, resolve_text
from nereus.lang.parser import parse
from nereus.lang.render import render

PLANS = sorted((Path(__file__).parents[1] / "plans").glob("*.plan"))


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_sample_resolves_and_round_trips(path: Path) -> None:
    result = load_plan(str(path))
    assert result.plan is not None, render(result.diagnostics, color=False)
    assert all(d.severity is not Severity.ERROR for d in result.diagnostics)
    text = placed_plan_text(result.plan)
    assert "extends" not in text.replace("no extends", "")
    again = resolve_text(text, path=result.plan.path)
    assert again.plan == pinned(result.plan), render(again.diagnostics, color=False)
    assert placed_plan_text(pinned(result.plan)) == text
    assert format_text(text).text == text


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_formatting_keeps_tree_and_comments(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    formatted = format_text(text, str(path)).text
    assert formatted is not None
    assert format_text(formatted).text == formatted
    before, after = (parse(Source(path="p", text=t)).file for t in (text, formatted))
    assert before.items == after.items

    def comments(file):  # type: ignore[no-untyped-def]
        return sorted(file.source.text[c.start : c.end].rstrip() for c in file.comments)

    assert comments(before) == comments(after)


def test_reference_plans_are_the_ones_tested(shared: Path) -> None:
    for path in (shared / "plans").glob("*.plan"):
        assert (Path(__file__).parents[1] / "plans" / path.name).read_bytes() == path.read_bytes(), path.name


def test_values_of_a_sample() -> None:
    plan = load_plan(str(PLANS[0].parent / "ppo-8b-4k.plan")).plan
    assert plan is not None
    train, critic, logprob = plan.stage("actor.train"), plan.stage("critic.train"), plan.stage("actor.logprob")
    assert (train.tp, train.pp, train.dp, train.micro_batch, train.order) == (4, 1, 4, 4, "tp-cp-ep-dp-pp")
    assert (critic.tp, critic.dp, critic.micro_batch, critic.idle) == (4, 4, 1, "offload")
    assert (logprob.with_, logprob.devices, logprob.tp, logprob.dp) == ("actor.train", train.devices, 4, 4)
    assert [s.name for s in train.slots] == ["weight", "master", "exp_avg", "exp_avg_sq"]
    assert [s.name for s in logprob.slots] == ["weight"]
    assert train.sp and not plan.stage("actor.generate").optimizer
    assert plan.stage("actor.generate").kv_cache_bytes == 24 * 2**30
    assert plan.workload.seq_len == 4096 and plan.workload.max_response == 8192
    assert plan.model("ref").base == "actor" and plan.model("ref").frozen
    assert plan.cluster.nodes[0].nic_bytes_per_s == 8 * 50e9
    assert plan.path.endswith("ppo-8b-4k.plan")


def test_lost_node_stays_known() -> None:
    plan = load_plan(str(PLANS[0].parent / "ppo-8b-node-lost.plan")).plan
    assert plan is not None
    assert plan.cluster.lost == ("n1",) and [n.name for n in plan.cluster.nodes] == ["n0"]
    assert "lost = n1" in " ".join(placed_plan_text(plan).split())


def test_every_key() -> None:
    plan = load_plan(str(PLANS[0].parent / "every-key.plan")).plan
    assert plan is not None
    train = plan.stage("actor.train")
    assert train.place is not None and str(train.ranks[0]) == "n0.gpu1" and train.pp_split == (48,)
    slots = {s.name: (s.dtype, s.host) for s in train.slots}
    assert slots == {
        "weight": ("bf16", False),
        "master": ("fp32", True),
        "exp_avg": ("bf16", False),
        "momentum": ("fp32", False),
    }
    assert plan.cluster.pool is not None and plan.cluster.pool.notice_s == 120.0
    assert plan.cluster.nodes[0].nic_bytes_per_s == 50e9
    assert plan.stage("critic.train").fsdp == 4 and plan.stage("critic.train").num_emus == 2
    assert plan.stage("judge.infer").service and plan.stage("judge.infer").devices == ()
    assert [d.index for d in plan.stage("actor.generate").devices] == [0, 1, 2, 3, 4, 6, 5, 7]
    assert plan.checkpoint is not None and plan.checkpoint.path == 'ckpt/every "key"' and plan.checkpoint.every == 20
    assert (plan.workload.staleness, plan.workload.sync_every, plan.workload.partial) == (2, 2, True)
    assert plan.stage("ref.infer").swap == "host" and plan.stage("ref.infer").ep == 4


def test_thousand_gpus_resolve_fast() -> None:
    path = str(PLANS[0].parent / "ppo-8b-1024.plan")
    load_plan(path)
    start = time.process_time()
    result = load_plan(path)
    assert time.process_time() - start < 0.3
    assert result.plan is not None and len(result.plan.stage("actor.train").devices) == 1024
