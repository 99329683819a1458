"""HF names against the modules that transformers builds: every parameter known, every logical tensor covered once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frameworks.hf_models import FAMILIES, arch, config

from nereus.ir.tensor import matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.hf import HfNaming
from nereus.models.tensors import logical_tensors


def _state(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameters and persistent buffers; of two names of one tensor the first."""
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    persistent = model.state_dict()
    return names | {name: tuple(b.shape) for name, b in model.named_buffers() if name in persistent}


def _assert_covers(naming: HfNaming, state: dict[str, tuple[int, ...]]) -> None:
    counts = {
        t.name: torch.zeros(matrix_shape(t.shape), dtype=torch.int32) for t in logical_tensors(naming.arch, naming.head)
    }
    for name, shape in state.items():
        rows, cols = 1, shape[-1] if len(shape) > 1 else 1
        for extent in shape[:-1] if len(shape) > 1 else shape:
            rows *= extent
        taken = torch.zeros((rows, cols), dtype=torch.int32)
        for s in naming.segments(name, shape, Where()):
            counts[s.tensor][s.row_lo : s.row_hi, s.col_lo : s.col_hi] += 1
            taken[s.at_row : s.at_row + s.row_hi - s.row_lo, s.at_col : s.at_col + s.col_hi - s.col_lo] += 1
        assert bool((taken == 1).all()), f"{name}: an element of the parameter in no segment, or in two"
    for name, count in counts.items():
        assert bool((count == 1).all()), f"{name}: an element on no parameter, or on two"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_known_and_every_tensor_covered_once(family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(family, tie_word_embeddings=tied))
    model.tie_weights()
    naming = HfNaming(arch=arch(family, tie_word_embeddings=tied))
    state = _state(model)
    _assert_covers(naming, state)
    assert naming.parameters(Where()) == state
    if tied:
        assert naming.segments("lm_head.weight", (96, 64), Where())[0].tensor == "model.embed_tokens.weight"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek_v3"])
def test_value_models(family: str) -> None:
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config(family, num_labels=1))
    _assert_covers(HfNaming(arch=arch(family), head="value"), _state(model))


def test_a_bias_of_the_value_head_is_refused_by_name() -> None:
    from transformers import AutoModelForTokenClassification

    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config("qwen2", num_labels=1))
    naming = HfNaming(arch=arch("qwen2"), head="value")
    unknown = []
    for name, shape in _state(model).items():
        try:
            naming.segments(name, shape, Where())
        except UnknownParameter as error:
            unknown.append(str(error))
    assert len(unknown) == 1 and "'score.bias'" in unknown[0]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in ("mixtral", "qwen3_moe", "deepseek_v3")])
def test_the_module_holds_the_values_that_the_checkpoint_names(family: str, tmp_path: Any) -> None:
    """transformers' own writer is the oracle: it takes the fused parameters apart under the published names."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family))
    if family == "deepseek_v3":
        model.model.layers[1].mlp.gate.e_score_correction_bias.uniform_()
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    naming = HfNaming(arch=arch(family))
    flat = HfNaming(arch=arch(family), fused_experts=False)
    assert flat.parameters(Where()) == {name: tuple(t.shape) for name, t in published.items()}
    state = model.state_dict()
    seen = set()
    for name, shape in naming.parameters(Where()).items():
        matrix = state[name].reshape(-1, shape[-1]) if len(shape) > 1 else state[name].reshape(-1, 1)
        for s in naming.segments(name, shape, Where()):
            whole = published[s.tensor].reshape(matrix_shape(published[s.tensor].shape))
            mine = matrix[s.at_row : s.at_row + s.row_hi - s.row_lo, s.at_col : s.at_col + s.col_hi - s.col_lo]
            assert torch.equal(mine, whole[s.row_lo : s.row_hi, s.col_lo : s.col_hi]), (name, s)
            seen.add(s.tensor)
    assert seen == set(published)
