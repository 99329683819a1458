"""Plain transformers models: every family bound whole, and one built on the meta device adopts memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frameworks.hf_models import FAMILIES, arch, config

from nereus.ir.tensor import matrix_shape
from nereus.models.naming.hf import HfNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.live import move_here

_LONG = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG |= {"original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "llama, scaled positions": ("llama", {"rope_parameters": _LONG}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_on_the_meta_device_adopts_what_another_holds(case: str) -> None:
    from transformers import AutoModelForCausalLM

    family, sizes = CASES[case]
    naming = HfNaming(arch=arch(family, **sizes))
    torch.manual_seed(0)
    old = AutoModelForCausalLM.from_config(config(family, **sizes))
    source = PlainTorch(old, naming=naming)
    with torch.device("meta"):
        new = AutoModelForCausalLM.from_config(config(family, **sizes))
    new.tie_weights()
    target = PlainTorch(new, naming=naming)
    facts, tensors = source.job_state(), logical_tensors(naming.arch)
    before, binding = source.bind(), target.allocate(source.job_state())
    held = sum(fragment.numel for fragment in before.state.fragments)
    assert held == sum(matrix_shape(t.shape)[0] * matrix_shape(t.shape)[1] for t in tensors)
    move_here([before], [binding], tensors)
    target.adopt(binding, facts)
    target.finish(facts)
    assert [(c.name, c.check()) for c in target.checklist() if c.check() is not None] == []
    assert all(torch.equal(a, b) for a, b in zip(old.state_dict().values(), new.state_dict().values(), strict=True))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(new(tokens, use_cache=False).logits, old(tokens, use_cache=False).logits)
