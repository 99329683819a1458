"""peft's names and settings, as its documentation gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs, loras

from nereus.ir.arch import Arch, Lora
from nereus.ir.tensor import matrix_shape
from nereus.models.lora import linear_kinds
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.peft import PeftNaming, UnknownAdapter, config_of, lora_from_config
from nereus.models.presets import preset
from nereus.models.tensors import logical_tensors

LLAMA = preset("llama-3.2-1b")
LORA = Lora(rank=8, alpha=16, targets=("q_proj", "v_proj"))
NAMING = PeftNaming(arch=LLAMA, lora=LORA)
Q = "model.layers.0.self_attn.q_proj"


def test_names_of_a_wrapped_module() -> None:
    names = NAMING.parameters(Where())
    assert names[f"base_model.model.{Q}.base_layer.weight"] == (2048, 2048)
    assert names[f"base_model.model.{Q}.lora_A.default.weight"] == (8, 2048)
    assert names["base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight"] == (512, 8)
    assert names["base_model.model.model.layers.0.self_attn.k_proj.weight"] == (512, 2048)
    assert names["base_model.model.model.embed_tokens.weight"] == (128256, 2048)


def test_names_of_a_file() -> None:
    files = NAMING.file_names()
    assert len(files) == 2 * 2 * LLAMA.num_layers
    assert files[f"base_model.model.{Q}.lora_A.weight"] == f"{Q}.lora_A.weight"


def test_a_value_head_is_saved_whole() -> None:
    naming = PeftNaming(arch=LLAMA, lora=LORA, head="value", adapter="critic")
    assert naming.module_name("score.weight") == "base_model.model.score.modules_to_save.critic.weight"
    assert naming.logical_name("base_model.model.score.modules_to_save.critic.weight") == "score.weight"
    assert naming.file_names()["base_model.model.score.weight"] == "score.weight"


@settings(max_examples=60, deadline=None)
@given(
    arch=archs(), head=st.sampled_from(["lm", "value"]), adapter=st.sampled_from(["default", "actor"]), data=st.data()
)
def test_every_parameter_comes_back_as_its_tensor(arch: Arch, head: str, adapter: str, data: st.DataObject) -> None:
    lora = data.draw(loras(linear_kinds(logical_tensors(arch))))
    naming = PeftNaming(arch=arch, lora=lora, head=head, adapter=adapter)
    shapes = {t.name: matrix_shape(t.shape) for t in logical_tensors(arch, head, lora)}
    held = dict.fromkeys(shapes, 0)
    for name, shape in naming.parameters(Where()).items():
        for s in naming.segments(f"module.{name}", shape, Where()):
            held[s.tensor] += (s.row_hi - s.row_lo) * (s.col_hi - s.col_lo)
    assert held == {name: rows * cols for name, (rows, cols) in shapes.items()}
    for key, logical in naming.file_names().items():
        (segment,) = naming.segments(key, shapes[logical], Where())
        assert segment.tensor == logical


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"base_model.model.{Q}.lora_A.other.weight", "adapter 'other'"),
        (f"base_model.model.{Q}.lora_magnitude_vector.default.weight", "none of a llama model"),
        (f"base_model.model.{Q}.lora_B.default.bias", "none of a llama model"),
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.default.weight", "none of a llama model"),
        ("base_model.model.score.original_module.weight", "untrained copy"),
        (f"base_model.model.{Q}.lora_A.default.weight", "not [8, 2048]"),
    ],
)
def test_what_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnknownParameter) as caught:
        NAMING.segments(name, (7, 2048), Where())
    assert why in str(caught.value) and f"'{name}'" in str(caught.value)


CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "bias": "none"}


def test_settings() -> None:
    assert lora_from_config(CONFIG, LLAMA) == LORA
    assert lora_from_config({**CONFIG, "use_rslora": True, "r": 4}, LLAMA).alpha == 32.0  # 32 / 4 = 16 / sqrt(4)
    assert lora_from_config({**CONFIG, "target_modules": "all-linear"}, LLAMA).targets == ()
    every = list(linear_kinds(logical_tensors(LLAMA)))
    assert lora_from_config({**CONFIG, "target_modules": every}, LLAMA).targets == ()


@settings(max_examples=40, deadline=None)
@given(arch=archs(), head=st.sampled_from(["lm", "value"]), data=st.data())
def test_written_settings_read_back(arch: Arch, head: str, data: st.DataObject) -> None:
    known = linear_kinds(logical_tensors(arch))
    lora = data.draw(loras(known))
    again = lora_from_config(config_of(lora, arch, head=head), arch, head=head)
    in_order = tuple(k for k in known if k in lora.targets)
    assert again == replace(lora, targets=() if in_order == known else in_order)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "lora_only"}, "bias"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "r = 0"),
        ({"r": True}, "r = True"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": ".*q_proj"}, "pattern"),
        ({"target_modules": ["q_proj", "c_attn"]}, "c_attn"),
        ({"peft_type": "IA3"}, "LORA"),
    ],
)
def test_refused_settings(change: dict[str, object], word: str) -> None:
    with pytest.raises(UnknownAdapter, match=word):
        lora_from_config({**CONFIG, **change}, LLAMA)


def test_refused_for_experts_and_for_no_object() -> None:
    with pytest.raises(UnknownAdapter, match="name them"):
        lora_from_config({**CONFIG, "target_modules": "all-linear"}, preset("qwen3-30b-a3b"))
    with pytest.raises(UnknownAdapter, match="JSON object"):
        lora_from_config([CONFIG], LLAMA)
