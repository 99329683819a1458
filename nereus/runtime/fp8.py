"""FP8 weights with block scales, made once from the bf16 values that are exported.

Each 128 x 128 block of a matrix is divided by scale = max |x| / 448 and rounded to e4m3fn; the scale itself
(``weight_scale_inv`` in checkpoints: multiply to get the value back) is kept in fp32. A trainer that quantised its fp32
master instead would give the engine other weights than the bf16 ones that it computes its own log-probabilities with,
so only bf16 is accepted. Blocks do not see one another: to quantise the whole matrix and cut it on block borders, or to
cut it there first, is the same bit for bit.

The arithmetic is that of vLLM's and DeepGEMM's ``per_block_cast_to_fp8`` (plain fp32 scales). Scales rounded to powers
of two (ue8m0), and the orders into which kernels rearrange scales, are made by the engine after loading.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nereus.models.fp8 import BLOCK, scale_shape

FP8_MAX = 448.0  # largest finite e4m3fn
#: Blocks of zeros, or smaller than this, get the scale of a block whose largest value is this.
LEAST_AMAX = 1e-4


class Fp8Error(ValueError):
    """A tensor that cannot be quantised or cut; the text says why."""


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """``values`` [rows, cols] e4m3fn and ``scale_inv`` [ceil(rows / 128), ceil(cols / 128)] fp32."""

    values: torch.Tensor
    scale_inv: torch.Tensor

    def cut(self, dim: int, start: int, stop: int) -> BlockFp8:
        """Rows (``dim`` 0) or columns ``start .. stop``. Raises Fp8Error where a border lies inside a block."""
        check_cut(self.values.shape[dim], start, stop)
        values = self.values.narrow(dim, start, stop - start)
        scales = self.scale_inv.narrow(dim, start // BLOCK, -(-stop // BLOCK) - start // BLOCK)
        return BlockFp8(values.contiguous(), scales.contiguous())


def check_cut(extent: int, start: int, stop: int) -> None:
    """Raises Fp8Error unless ``start .. stop`` of a dimension of ``extent`` is made of whole blocks."""
    if not 0 <= start < stop <= extent:
        raise Fp8Error(f"{start} .. {stop} is no range of {extent}")
    for border in (start, stop):
        if border % BLOCK and border != extent:
            raise Fp8Error(f"{start} .. {stop} of {extent} cuts a block of {BLOCK} at {border}")


def quantise(weight: torch.Tensor) -> BlockFp8:
    """``weight``: a bf16 matrix, whole or a part of whole blocks. Raises Fp8Error for any other dtype, and where a
    value is not finite."""
    if weight.dtype != torch.bfloat16:
        raise Fp8Error(f"fp8 is made from the exported bf16 weight, not from {weight.dtype}: export it first")
    if weight.dim() != 2 or not weight.numel():
        raise Fp8Error(f"block scales are for matrices, not for shape {list(weight.shape)}")
    rows, cols = weight.shape
    num_rows, num_cols = scale_shape(rows, cols)
    padded = weight.new_zeros((num_rows * BLOCK, num_cols * BLOCK))
    padded[:rows, :cols] = weight
    blocks = padded.view(num_rows, BLOCK, num_cols, BLOCK)
    amax = blocks.abs().float().amax(dim=(1, 3), keepdim=True)
    if not bool(amax.isfinite().all()):
        raise Fp8Error("a weight that is not finite cannot be quantised")
    scale = amax.clamp(LEAST_AMAX) / FP8_MAX
    values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
    values = values.view(num_rows * BLOCK, num_cols * BLOCK)[:rows, :cols].contiguous()
    return BlockFp8(values, scale.view(num_rows, num_cols))


def dequantise(quantised: BlockFp8, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What the engine computes with: value times the scale of its block."""
    rows, cols = quantised.values.shape
    expected = scale_shape(rows, cols)
    if tuple(quantised.scale_inv.shape) != expected:
        raise Fp8Error(f"[{rows}, {cols}] needs scales {list(expected)}, not {list(quantised.scale_inv.shape)}")
    scale = quantised.scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return (quantised.values.float() * scale).to(dtype)
