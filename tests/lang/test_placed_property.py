"""Random plans: whatever resolves survives its placed form, and every rank has one device."""

from __future__ import annotations

import dataclasses

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from nereus.lang.api import pinned, placed_plan_text, resolve_text
from nereus.lang.render import render


@st.composite
def stages(draw: st.DrawFn, name: str) -> str:
    nodes = draw(st.sampled_from(["n0", "n[0-1]", "[n1, n0]", "n0.gpu[0-3]", "[n0.gpu[4,6], n1.gpu[1,0]]", "m0"]))
    keys = [f"on = {nodes}"]
    for key in ("tp", "pp", "cp"):
        keys.append(f"{key} = {draw(st.sampled_from([1, 1, 2, 4]))}")
    options = ["zero = 1", "fsdp = full", "fsdp = 2", "sp = false", "order = tp-cp-ep-dp-pp", "order = dp-tp-cp-pp"]
    options += [
        "idle = offload",
        "backend = megatron",
        "backend = fsdp",
        "vp = 2",
        "state { weight = fp32  extra = int8 @host }",
        "state { exp_avg = bf16 @host(0.375) }",
        "optimizer = muon",
    ]
    keys += draw(st.lists(st.sampled_from(options), max_size=3, unique_by=lambda o: o.split()[0]))
    return f"stage {name} {{ {'  '.join(keys)} }}\n"


@st.composite
def plans(draw: st.DrawFn) -> str:
    text = (
        'cluster { node n[0-1] { gpus = 8 x "h100-sxm-80gb" }  node m0 { gpus = 4 x "l40s-48gb"  nic = 3 Gbit/s } }\n'
    )
    actor = draw(st.sampled_from(["llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "llama-3.2-1b"]))
    lora = draw(
        st.sampled_from(["", "lora { rank = 8 }", "lora { rank = 16  alpha = 0.5  targets = (o_proj, q_proj) }"])
    )
    text += f'model actor = "{actor}" {{ {lora} }}\n'
    text += (
        f"model ref = actor {{ frozen = true  {draw(st.sampled_from(['', 'lora = none', 'lora { rank = 2 }']))} }}\n"
    )
    text += 'model critic = "llama-3.2-1b" { head = value }\n'
    text += f"workload {{ algorithm = ppo  prompts = {draw(st.sampled_from([64, 96, 840]))}  samples = 2 }}\n"
    text += draw(stages("actor.train"))
    if draw(st.booleans()):
        text += draw(stages("critic.train"))
    for guest in (
        "actor.logprob { with = actor.train }",
        "ref.infer { with = actor.train }",
        "ref.infer { with = actor.train  swap = host }",
    ):
        if draw(st.booleans()) and guest.split()[0] not in text:
            text += f"stage {guest}\n"
    if draw(st.booleans()):
        text += "stage critic.infer { with = actor.train }\n"
    return text


@settings(max_examples=250, deadline=None)
@given(plans())
def test_placed_form_is_the_same_plan(text: str) -> None:
    result = resolve_text(text)
    event("resolves" if result.plan else "refused")
    assume(result.plan is not None)
    assert result.plan is not None
    plan = pinned(result.plan)
    for stage in plan.stages:
        assert len(stage.devices) == len(set(stage.devices)) == stage.tp * stage.pp * stage.cp * stage.dp
        assert sum(stage.pp_split) == plan.model(stage.model).arch.num_layers and len(stage.pp_split) == stage.pp
        assert stage.dp * stage.cp % stage.num_shards == 0
    # Any permutation may be pinned.
    turned = dataclasses.replace(
        plan,
        stages=tuple(dataclasses.replace(s, place=None if s.place is None else s.place[::-1]) for s in plan.stages),
    )
    for form in (plan, turned):
        again = resolve_text(placed_plan_text(form), path=form.path)
        assert again.plan == form, render(again.diagnostics, color=False)
