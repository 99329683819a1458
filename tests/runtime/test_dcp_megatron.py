"""Keys of Megatron's checkpoints against its fused matrices built by hand; real folders are in tests/frameworks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as torch_dcp  # noqa: E402

from nereus.ir.arch import Arch, Moe  # noqa: E402
from nereus.models.naming.megatron import MegatronNaming  # noqa: E402
from nereus.models.tensors import logical_tensors  # noqa: E402
from nereus.runtime.adapters import dcp  # noqa: E402
from nereus.runtime.adapters.base import BindError  # noqa: E402
from nereus.runtime.adapters.regions import logical_shapes  # noqa: E402
from nereus.runtime.adapters.whole import gather  # noqa: E402

ARCH = Arch(
    family="qwen3_moe", num_layers=2, hidden=6, num_heads=4, num_kv_heads=2, head_dim=2, ffn=8, vocab=10,
    moe=Moe(num_experts=3, experts_per_token=1, expert_ffn=4),
)  # fmt: skip
NAMING = MegatronNaming(arch=ARCH, vocab_multiple=4)


def whole(shift: float = 0) -> dict[str, torch.Tensor]:
    found, first = {}, 1.0
    for tensor in logical_tensors(ARCH):
        found[tensor.name] = torch.arange(first, first + tensor.numel).reshape(tensor.shape) + shift
        first += tensor.numel
    return found


def stored(values: dict[str, torch.Tensor], *, experts_apart: bool) -> dict[str, torch.Tensor]:
    """As Megatron stores a model: layers, and experts of a layer, stacked."""
    found = {"decoder.final_layernorm.weight": values["model.norm.weight"]}
    for name, tensor in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        padding = torch.full((6, 6), -1.0)  # more than this tp would pad: the checkpoint was written at another
        found[f"{name}.weight"] = torch.cat([values[f"{tensor}.weight"], padding])

    def stack(name: str, make: object) -> None:
        found[f"decoder.layers.{name}"] = torch.stack([make(f"model.layers.{n}.") for n in range(2)])  # type: ignore[operator]

    def qkv(layer: str) -> torch.Tensor:
        parts = [values[f"{layer}self_attn.{p}_proj.weight"].chunk(2) for p in "qkv"]
        return torch.cat([part for group in zip(*parts, strict=True) for part in group])

    def fc1(layer: str, expert: int) -> torch.Tensor:
        return torch.cat([values[f"{layer}mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up")])

    stack("input_layernorm.weight", lambda layer: values[f"{layer}input_layernorm.weight"])
    stack("mlp.linear_fc1.layer_norm_weight", lambda layer: values[f"{layer}post_attention_layernorm.weight"])
    stack("self_attention.linear_qkv.weight", qkv)
    stack("self_attention.linear_proj.weight", lambda layer: values[f"{layer}self_attn.o_proj.weight"])
    for p in "qk":
        name = f"self_attn.{p}_norm.weight"
        if f"model.layers.0.{name}" in values:
            stack(f"self_attention.{p}_layernorm.weight", lambda layer, name=name: values[f"{layer}{name}"])
    stack("mlp.router.weight", lambda layer: values[f"{layer}mlp.gate.weight"])
    for name, make in (
        ("linear_fc1", fc1),
        ("linear_fc2", lambda layer, expert: values[f"{layer}mlp.experts.{expert}.down_proj.weight"]),
    ):
        if experts_apart:
            for expert in range(3):
                stack(f"mlp.experts.experts.{expert}.{name}.weight", lambda layer, m=make, e=expert: m(layer, e))
        else:
            stack(
                f"mlp.experts.experts.{name}.weight",
                lambda layer, m=make: torch.stack([m(layer, expert) for expert in range(3)]),
            )
    return found


def save(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch_dcp.save(state, checkpoint_id=str(folder), no_dist=True)


@pytest.mark.parametrize("experts_apart", [False, True])
def test_every_element_of_weights_and_masters(tmp_path: Path, experts_apart: bool) -> None:
    values, masters = whole(), whole(0.5)
    state = stored(values, experts_apart=experts_apart)
    state |= {f"optimizer.state.param.{k}": v for k, v in stored(masters, experts_apart=experts_apart).items()}
    state |= {f"chained_1.optimizer.state.exp_avg.{k}": v for k, v in stored(values, experts_apart=False).items()}
    save(tmp_path, state)
    found = gather([dcp.bind(tmp_path, NAMING).binding], logical_shapes(ARCH))
    assert {slot for _, slot in found} == {"weight", "master", "exp_avg"}
    for slot, expected in (("weight", values), ("master", masters), ("exp_avg", values)):
        for name, value in expected.items():
            assert torch.equal(found[name, slot].reshape(value.shape), value), (name, slot)


def test_what_is_not_understood_is_named(tmp_path: Path) -> None:
    state = stored(whole(), experts_apart=False)
    state["decoder.layers.self_attention.linear_gate.weight"] = torch.zeros(2, 6, 6)
    state["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"] = torch.zeros(9)
    state["decoder.layers.mlp.router.weight"] = torch.zeros(3)
    save(tmp_path, state)
    with pytest.raises(BindError) as error:
        dcp.bind(tmp_path, NAMING)
    text = str(error.value)
    assert "3 keys are not understood" in text
    assert "self_attention.linear_gate.weight" in text and "saved along Megatron's buckets" in text
    assert re.search(r"router\.weight \[3\]: .*\[3\]", text)


def test_too_few_or_too_many_layers(tmp_path: Path) -> None:
    state = stored(whole(), experts_apart=False)
    name = "decoder.layers.input_layernorm.weight"
    save(tmp_path / "more", {**state, name: torch.zeros(3, 6)})
    with pytest.raises(BindError, match="the model has no layer 2, but 2"):
        dcp.bind(tmp_path / "more", NAMING)
    save(tmp_path / "less", {**state, name: torch.zeros(1, 6)})
    with pytest.raises(BindError, match=r"model\.layers\.1\.input_layernorm\.weight .*6 of 6 elements are missing"):
        dcp.bind(tmp_path / "less", NAMING)
