"""Random models of every family between random layouts: each element of each shard, by position, there and back.

What every device must hold is worked out by ``nereus.runtime.reference``, which shares nothing with the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from runtime.tiny import cluster, plan, stage

from nereus.ir.arch import Arch, Lora, Mla, Moe
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Plan, Slot
from nereus.models.slots import default_slots
from nereus.runtime.run import run_pair

EIGHT = cluster(4, 4)
MOE = Moe(num_experts=4, experts_per_token=2, expert_ffn=8)
DENSE: dict[str, Any] = {"num_layers": 4, "hidden": 6, "num_heads": 8, "num_kv_heads": 2, "head_dim": 2, "ffn": 16}
ARCHS = {
    "llama": Arch(family="llama", vocab=300, **DENSE),
    "mistral": Arch(family="mistral", vocab=192, **DENSE | {"num_kv_heads": 4}),
    "qwen2.5, tied": Arch(family="qwen2", vocab=300, tied_embeddings=True, qkv_bias=True, **DENSE),
    "qwen3": Arch(family="qwen3", vocab=260, qk_norm=True, **DENSE),
    "mixtral": Arch(family="mixtral", vocab=128, moe=MOE, **DENSE),
    "qwen3-moe": Arch(family="qwen3_moe", vocab=300, qk_norm=True, moe=MOE, **DENSE),
    "deepseek-v3": Arch(
        family="deepseek_v3",
        vocab=300,
        moe=replace(MOE, num_shared_experts=1, shared_expert_ffn=8, first_dense_layers=1, router_bias=True),
        mla=Mla(q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=2),
        **DENSE | {"num_kv_heads": 8},
    ),
    "moonlight": Arch(
        family="deepseek_v3",
        vocab=256,
        moe=replace(MOE, num_shared_experts=2, shared_expert_ffn=16),
        mla=Mla(q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=2),
        **DENSE | {"num_kv_heads": 8},
    ),
}


@st.composite
def layouts(draw: st.DrawFn, model: Model, optimizer: str) -> Plan:
    arch = model.arch
    backend = draw(st.sampled_from(["megatron", "megatron", "fsdp", "deepspeed", None]))
    count = draw(st.sampled_from([8, 8, 6, 4, 3, 2, 1]))
    pp = draw(st.sampled_from([p for p in (1, 2, 4) if count % p == 0]))
    tp = draw(st.sampled_from([t for t in (1, 2, 4, 8) if count % (t * pp) == 0]))
    assume(backend == "megatron" or arch.vocab % tp == 0)  # all other dimensions divide
    vp = draw(st.sampled_from([v for v in (1, 2, 4) if pp > 1 and 4 % (pp * v) == 0] or [1]))
    alike = count // (tp * pp)  # dp x cp: ranks that hold the same weights, over which optimizer state is sharded
    cp = draw(st.sampled_from([c for c in (1, 1, 2, 4) if alike % c == 0]))
    more: dict[str, Any] = {"backend": backend, "tp": tp, "pp": pp, "cp": cp, "optimizer": optimizer}
    if vp > 1:
        more |= {"vp": vp, "chunks": (4 // (pp * vp),) * (pp * vp)}
    elif pp == 2:
        more["pp_split"] = draw(st.sampled_from([(2, 2), (1, 3), (3, 1)]))
    ep, etp = 1, tp
    if arch.moe is not None:
        inside = tp * alike
        etp = draw(st.sampled_from([e for e in (1, 2, 4, 8) if inside % e == 0 and 8 % e == 0]))
        ep = draw(st.sampled_from([e for e in (1, 2, 4) if inside % (e * etp) == 0]))
        more |= {"ep": ep, "etp": etp}
    if backend == "fsdp" and ep == 1 and etp == tp and alike > 1:
        more["fsdp"] = draw(st.sampled_from([d for d in range(2, alike + 1) if alike % d == 0]))
    elif backend != "fsdp" and alike > 1:
        more["zero"] = draw(st.sampled_from([0, 1, 3] if backend != "megatron" else [0, 1]))
    more["order"] = draw(st.sampled_from([ORDER_MEGATRON, ORDER_REPLICA, "dp-tp-cp-pp"]))
    more["slots"] = default_slots(trains=True, precision="bf16", optimizer=optimizer)
    if draw(st.booleans()):  # moments in another dtype, one of them in host memory
        more["slots"] = tuple(
            Slot(name=s.name, dtype="bf16", host=s.name == "exp_avg") if s.name.startswith("exp") else s
            for s in more["slots"]
        )
    if draw(st.booleans()):  # optimizer state partly in host memory
        share = draw(st.sampled_from([0.25, 0.5, 0.9]))
        more["slots"] = tuple(
            replace(s, host=True, host_share=share) if s.name != "weight" else s for s in more["slots"]
        )
    devices = tuple(draw(st.permutations(EIGHT.devices)))[:count]
    return plan(stage(model, "train", devices, place=devices, **more), on=EIGHT, models=(model,))


@st.composite
def chains(draw: st.DrawFn, name: str) -> list[Plan]:
    lora = draw(st.sampled_from([None, None, Lora(rank=2, alpha=4.0, targets=())]))
    head = draw(st.sampled_from(["lm", "lm", "value"])) if lora is None else "lm"
    model = Model(name="actor", arch=ARCHS[name], source="tiny", head=head, lora=lora)
    optimizer = draw(st.sampled_from(["adam", "muon"]))
    first, second, third = (draw(layouts(model, optimizer)) for _ in range(3))
    return [first, second, third, first]


@pytest.mark.parametrize("name", ARCHS)
def test_there_and_back(name: str) -> None:
    @settings(max_examples=5, deadline=None, phases=(Phase.generate,))
    @given(chains(name))
    def check(plans: list[Plan]) -> None:
        slots = {frozenset((s.name, s.dtype) for s in p.stages[0].slots) for p in plans}
        assume(len(slots) == 1)  # another dtype is another slot: refused, tested elsewhere
        try:
            report = run_pair(plans[0], plans[1], chain=plans[2:], scale="none")
        except DiagnosticError as error:
            raise AssertionError([d.headline for d in error.diagnostics]) from error
        assert report.ok, [(d.headline, d.notes) for d in report.diagnostics]
        assert len(report.steps) == 3
        assert all(step.num_elements > 0 for step in report.steps)

    check()
