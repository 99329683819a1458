"""Presets against the published parameter counts."""

from __future__ import annotations

import pytest

from nereus.models.presets import preset, preset_names
from nereus.models.tensors import num_params

# Source: the "Model size" of each model card, which the hub computes from the safetensors headers. Tied embeddings
# count once; DeepSeek-V3 is the main model without its multi-token-prediction layer (671.0 of 684.5 billion).
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.3-70b": 70_553_706_496,
    "deepseek-llm-7b": 6_910_365_696,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    # The Qwen3 cards of the three smallest say 0.8, 2.0 and 4.0 billion with the stored copy of the tied head.
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_111_936,
}


def test_every_preset_has_a_published_count() -> None:
    assert set(preset_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameter_count(name: str) -> None:
    assert num_params(preset(name)) == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_counts_are_exact_but_for_buffers() -> None:
    """Moonlight's published count has 1,728 numbers more than its parameters; all others agree to the last one."""
    differing = {name for name, count in PUBLISHED.items() if num_params(preset(name)) != count}
    assert differing == {"moonlight-16b-a3b"}


def test_a_value_head_replaces_the_output_matrix() -> None:
    arch = preset("llama-3.1-8b")
    assert num_params(arch) - num_params(arch, "value") == (arch.vocab - 1) * arch.hidden
    tied = preset("llama-3.2-1b")
    assert num_params(tied, "value") - num_params(tied) == tied.hidden


def test_unknown_preset() -> None:
    with pytest.raises(KeyError):
        preset("llama-9-1b")
