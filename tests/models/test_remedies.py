"""What NRS4001 offers is written into the plan and checked again: it is legal, and it fits."""

from __future__ import annotations

import re

import pytest

from nereus.ir.diagnostic import Diagnostic, Severity
from nereus.lang.api import resolve_text
from nereus.models.memory import check_memory

HEAD = """cluster {{ node n[0-{last}] {{ gpus = 8 x "{gpu}"  host_mem = 2 TiB }} }}
model actor = "{model}"
model ref = actor {{ frozen = true }}
workload {{ algorithm = grpo  prompts = 64  samples = 8  mini_batch = 256  prompt_len = 1024  response_len = 3072 }}
"""


def plan_text(keys: dict[str, str], *, model: str, gpu: str, nodes: int) -> str:
    written = "  ".join(f"{key} = {value}" for key, value in keys.items() if value != "default")
    where = "n0" if nodes == 1 else f"n[0-{nodes - 1}]"
    return (
        HEAD.format(last=nodes - 1, gpu=gpu, model=model)
        + f"stage actor.train {{ on = {where}  {written} }}\n"
        + "stage actor.logprob { with = actor.train }\nstage ref.infer { with = actor.train  swap = host }\n"
    )


def refused(text: str) -> Diagnostic:
    plan = resolve_text(text).plan
    assert plan is not None
    return next(d for d in check_memory(plan) if d.code == "NRS4001" and d.headline.startswith("actor.train "))


def offered(found: Diagnostic) -> dict[str, int]:
    marker = "fits_with:"
    return {key[len(marker) :]: int(value) for key, value in found.data if key.startswith(marker)}


MOE = {"backend": "megatron", "ep": "4", "zero": "1", "recompute": "full"}


@pytest.mark.parametrize(
    ("keys", "model", "gpu", "nodes", "wanted"),
    [
        (MOE, "qwen3-30b-a3b", "h100-sxm-80gb", 2, ("zero = 2", "tp = 2", "pp = 2", "ep = 8")),
        ({**MOE, "etp": "1"}, "qwen3-30b-a3b", "h100-sxm-80gb", 2, ("zero = 2", "tp = 4", "pp = 2", "ep = 8")),
        ({**MOE, "dp": "16"}, "qwen3-30b-a3b", "h100-sxm-80gb", 2, ("tp = 2  dp = 8", "pp = 2  dp = 8")),
        ({"ep": "8", "recompute": "full"}, "mixtral-8x7b", "h100-sxm-80gb", 2, ("zero = ",)),
        (
            {**MOE, "ep": "2", "pp": "2", "vp": "1", "pp_split": "(23, 25)"},
            "qwen3-30b-a3b",
            "h100-sxm-80gb",
            2,
            ("pp = 4  vp = default  pp_split = default",),
        ),
        ({"backend": "fsdp", "fsdp": "4"}, "qwen2.5-7b", "a100-sxm-40gb", 1, ("fsdp = full",)),
    ],
)
def test_each_offer_is_legal_and_fits(
    keys: dict[str, str], model: str, gpu: str, nodes: int, wanted: tuple[str, ...]
) -> None:
    found = refused(plan_text(keys, model=model, gpu=gpu, nodes=nodes))
    offers = offered(found)
    assert found.help is not None and found.help.startswith("fits with: ")
    for text in wanted:
        assert any(text in offer for offer in offers), (text, offers)
    for offer, num_bytes in offers.items():
        changed = {**keys, **dict(re.findall(r"(\w+) = (\w+)", offer))}
        result = resolve_text(plan_text(changed, model=model, gpu=gpu, nodes=nodes))
        errors = [d for d in result.diagnostics if d.severity is Severity.ERROR]
        assert result.plan is not None and not errors, (offer, errors)
        assert not [d for d in check_memory(result.plan) if d.severity is Severity.ERROR], offer
        assert f"{offer} ({num_bytes / 1e9:.1f} GB)" in found.help


def test_where_nothing_fits_it_says_what_was_tried() -> None:
    found = refused(plan_text({"backend": "megatron", "ep": "8"}, model="deepseek-v3", gpu="a100-sxm-40gb", nodes=2))
    assert offered(found) == {}
    assert found.help is not None and "tp, pp, ep" in found.help and "more or larger GPUs" in found.help
