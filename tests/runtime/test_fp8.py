"""FP8 from bf16, once: blocks do not see one another, and nothing else is accepted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs

from nereus.ir.arch import Arch
from nereus.models.fp8 import BLOCK, has_scale, legal_fp8_etp, legal_fp8_tp, scale_name, scale_tensors
from nereus.models.tensors import logical_tensors
from nereus.runtime.fp8 import FP8_MAX, BlockFp8, Fp8Error, dequantise, quantise


def _same(a: BlockFp8, b: BlockFp8) -> bool:
    return torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scale_inv, b.scale_inv)


def _weight(rows: int, cols: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand((rows, 1), generator=generator) * spread
    return (torch.randn((rows, cols), generator=generator) * scale).to(torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400),
    cols=st.integers(1, 400),
    dim=st.sampled_from([0, 1]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1e-8, 0.02, 1.0, 1e4]),
    data=st.data(),
)
def test_cut_then_quantised_is_quantised_then_cut(
    rows: int, cols: int, dim: int, seed: int, spread: float, data: st.DataObject
) -> None:
    weight = _weight(rows, cols, seed, spread)
    extent = weight.shape[dim]
    borders = [*range(0, extent, BLOCK), extent]
    start = data.draw(st.sampled_from(borders[:-1]))
    stop = data.draw(st.sampled_from([b for b in borders if b > start]))
    assert _same(quantise(weight).cut(dim, start, stop), quantise(weight.narrow(dim, start, stop - start)))


@settings(max_examples=25, deadline=None)
@given(arch=archs(), data=st.data())
def test_every_rank_of_a_legal_layout_may_quantise_its_own_part(arch: Arch, data: st.DataObject) -> None:
    etp = data.draw(st.sampled_from(legal_fp8_etp(arch, form="separate")))
    tp = data.draw(st.sampled_from(legal_fp8_tp(arch, etp=etp, form="separate", limit=8)))
    scales = {t.name: t for t in scale_tensors(arch)}
    done: set[tuple[int, ...]] = set()
    for tensor in logical_tensors(arch):
        if not has_scale(tensor) or tensor.shape in done or tensor.cut is None:
            continue
        done.add(tensor.shape)
        scale, degree = scales[scale_name(tensor.name)], tp if tensor.expert is None else etp
        whole = _weight(tensor.shape[0], tensor.shape[1], len(done))
        both = quantise(whole)
        assert tuple(both.scale_inv.shape) == scale.shape
        for rank in range(degree):
            lo, hi = tensor.cut.interval(tensor.shape[tensor.cut.dim], degree, rank)
            assert scale.cut is not None
            first, last = scale.cut.interval(scale.shape[scale.cut.dim], degree, rank)
            own = quantise(whole.narrow(tensor.cut.dim, lo, hi - lo))
            assert _same(own, both.cut(tensor.cut.dim, lo, hi))
            assert torch.equal(own.scale_inv, both.scale_inv.narrow(scale.cut.dim, first, last - first))


def test_values_and_scales() -> None:
    weight = torch.zeros(130, 256, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1], weight[129, 200] = 448.0, 1.0, -7.0
    made = quantise(weight)
    assert made.scale_inv.shape == (2, 2)
    assert made.scale_inv[0, 0] == 1.0 and made.scale_inv[1, 1] == torch.tensor(7.0) / FP8_MAX
    assert torch.equal(dequantise(made), weight)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 200), cols=st.integers(1, 200), seed=st.integers(0, 1000))
def test_error_is_that_of_four_bits(rows: int, cols: int, seed: int) -> None:
    weight = _weight(rows, cols, seed)
    made = quantise(weight)
    back = dequantise(made, torch.float32)
    scale = made.scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    # Half a step: 2^-4 of a normal value, half of 2^-9 below; and what the reciprocal of the scale loses.
    bound = torch.maximum(weight.float().abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)
    assert bool(((back - weight.float()).abs() <= bound).all())


def test_from_the_master_it_would_be_other_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn((256, 256), generator=generator) * 0.02
    exported = quantise(master.to(torch.bfloat16))
    with pytest.raises(Fp8Error, match="exported bf16"):
        quantise(master)
    # What that refusal is worth: the same arithmetic on the master gives other bytes.
    blocks = master.view(2, BLOCK, 2, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
    other = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view(256, 256)
    differing = (other.view(torch.uint8) != exported.values.view(torch.uint8)).float().mean()
    assert differing > 0.01


@pytest.mark.parametrize(
    ("start", "stop", "why"),
    [(0, 100, "cuts a block of 128 at 100"), (64, 256, "at 64"), (128, 128, "no range"), (0, 400, "no range")],
)
def test_borders(start: int, stop: int, why: str) -> None:
    made = quantise(_weight(300, 130, 0))
    with pytest.raises(Fp8Error, match=why):
        made.cut(0, start, stop)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), "matrices"),
        (torch.zeros((0, 4), dtype=torch.bfloat16), "matrices"),
        (torch.full((2, 2), float("nan"), dtype=torch.bfloat16), "finite"),
        (torch.full((2, 2), float("inf"), dtype=torch.bfloat16), "finite"),
        (torch.zeros((2, 2), dtype=torch.float16), "exported bf16"),
    ],
)
def test_refused(weight: torch.Tensor, why: str) -> None:
    with pytest.raises(Fp8Error, match=why):
        quantise(weight)


def test_scales_of_another_shape() -> None:
    made = quantise(_weight(130, 10, 0))
    with pytest.raises(Fp8Error, match=r"needs scales \[2, 1\]"):
        dequantise(BlockFp8(made.values, made.scale_inv[:1]))
