"""``VllmNaming`` against vLLM's own model classes and loaders: names, shapes and the place of every element, for every
family, at several tensor, expert and data parallel coordinates."""

from __future__ import annotations

import traceback

import pytest
import torch
from frameworks.harness import run
from frameworks.vllm_models import FAMILIES, Builder, Coordinates, full_weights

from nereus.ir.tensor import matrix_shape
from nereus.models.naming.vllm import VllmNaming, canonical
from nereus.runtime.adapters.base import Binding, BindingBuilder
from nereus.runtime.adapters.whole import Whole, scatter

DENSE = (Coordinates(), Coordinates(tp=2), Coordinates(tp=4))
EXPERTS = (
    *DENSE,
    Coordinates(tp=2, ep=True),
    Coordinates(tp=4, ep=True),
    Coordinates(dp=2),  # every expert cut over both replicas
    Coordinates(dp=2, ep=True),
    Coordinates(tp=2, dp=2, ep=True),  # tokens cut in front of the experts: shared experts whole
)
CASES = [
    (family, at)
    for family in FAMILIES
    for at in (EXPERTS if any(m in family for m in ("moe", "mixtral", "deepseek")) else DENSE)
]


def _all(rank: int, world_size: int) -> dict[tuple[str, Coordinates], str | int]:
    """For every case the number of elements compared, or what is wrong."""
    found: dict[tuple[str, Coordinates], str | int] = {}
    for family in FAMILIES:
        builder = Builder(family)
        for case in CASES:
            if case[0] == family:
                try:
                    found[case] = _compare(builder, case[1])
                except Exception:
                    found[case] = traceback.format_exc()
    return found


def _compare(builder: Builder, at: Coordinates) -> int:
    from nereus.runtime.adapters.vllm_layout import where_of

    naming = VllmNaming(arch=builder.arch)
    weights = full_weights(builder.arch)
    whole: Whole = {(n, "weight"): w.reshape(matrix_shape(w.shape)) for n, w in weights.items()}
    compared = 0
    for dp_rank, tp_rank in at.ranks():
        model = builder.build(at, dp_rank, tp_rank, weights)
        live = {canonical(n): p.data for n, p in model.named_parameters()}
        where = where_of(model)
        shapes = {}
        for coordinates in where.values():
            shapes |= {
                n: s
                for n, s in naming.parameters(coordinates).items()
                if coordinates is not where[""] or ".experts.routed_experts." not in n
            }
        assert set(live) == set(shapes)
        for name, tensor in live.items():
            if at.dp == 1 or ".shared_experts." not in name:
                assert tuple(tensor.shape) == shapes[name], name
            mine = where.get(name.rpartition(".")[0], where[""])
            expected = torch.zeros_like(tensor)
            binding = _bound(naming, name, expected, mine)
            scatter(whole, binding)
            assert torch.equal(expected, tensor), f"{name} at {mine}"
            compared += tensor.numel()
    return compared


def _bound(naming: VllmNaming, name: str, memory: torch.Tensor, where: object) -> Binding:
    from nereus.ir.fragment import fragments_of

    builder = BindingBuilder(rank=0)
    shape = tuple(memory.shape)
    builder.fragments += fragments_of(
        naming.segments(name, shape, where),  # type: ignore[arg-type]
        num_cols=shape[-1] if len(shape) > 1 else 1,
        slot="weight",
        storage=builder.storage(name, memory),
    )
    return builder.finish()


@pytest.fixture(scope="module")
def compared() -> dict[tuple[str, Coordinates], str | int]:
    (found,) = run(1, _all, init=False, timeout=400)
    return found


@pytest.mark.parametrize(("family", "at"), CASES, ids=lambda v: str(v) if isinstance(v, str) else f"{v}")
def test_names_shapes_and_every_element_as_vllm_loads_them(
    compared: dict[tuple[str, Coordinates], str | int], family: str, at: Coordinates
) -> None:
    result = compared[family, at]
    assert isinstance(result, int), result
    assert result > 100_000
