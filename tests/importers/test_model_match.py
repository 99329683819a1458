"""Model paths and the presets that they mean."""

from __future__ import annotations

import pytest

from nereus.lang.importers.model_match import match_model


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("Qwen/Qwen2-7B-Instruct", "qwen2-7b"),
        ("$HDFS_ROOT/ckpt/Qwen2.5-32B-Instruct/", "qwen2.5-32b"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("/models/qwen3-4b-sft-SGLang-RL", "qwen3-4b"),
        ("checkpoint/multiturn-sft-qwen-2.5-7b-instruct/global_step_372", "qwen2.5-7b"),
        ("deepseek-ai/deepseek-llm-7b-chat", "deepseek-llm-7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("sfairXC/FsfairX-LLaMA3-RM-v0.1", "llama-3-8b"),
        ("Skywork/Skywork-Reward-V2-Llama-3.2-3B", "llama-3.2-3b"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "moonlight-16b-a3b"),
    ],
)
def test_known_models(path: str, preset: str) -> None:
    assert match_model(path).preset == preset


@pytest.mark.parametrize(
    "path", ["Qwen/Qwen2.5-VL-7B-Instruct", "google/gemma-2-2b-it", "Qwen/Qwen3-VL-30B-A3B", "$LLM", "", "///", "7b"]
)
def test_other_shapes_are_not_taken_for_presets(path: str) -> None:
    assert match_model(path).preset is None


def test_close_presets_are_suggested() -> None:
    assert "qwen2.5-7b" in match_model("Qwen/Qwen2.5-VL-7B").suggestions
