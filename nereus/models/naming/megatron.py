"""Names and local shapes of megatron-core's GPTModel: local specs, and Transformer Engine's with fused norms.

``linear_qkv``: for each kv head its query heads' rows, then k, then v; the fused rows are cut evenly over tp, wherever
that falls (also inside a head, where tp > kv heads). ``linear_fc1`` of a gated MLP: each rank's gate rows, then its up
rows. The vocabulary is padded; padded rows are no segment. Layer and expert numbers in names count locally: ``Where``
says which they are. ``_extra_state`` is no parameter.

Refused: attention output gates, biases other than of q, k, v, LayerNorm's biases, learned positions, multi-token
prediction, gates of shared experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nereus.ir.arch import Arch
from nereus.ir.fragment import Segment
from nereus.ir.tensor import LogicalTensor, matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.tensors import logical_tensors

#: Path components of wrappers (DDP, Float16Module, torch.compile).
WRAPPERS = frozenset({"module", "_orig_mod"})
EMBEDDING = "model.embed_tokens.weight"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))")


def unwrapped(parameter: str) -> str:
    """The name as GPTModel itself gives it."""
    parts = parameter.split(".")
    while parts and parts[0] in WRAPPERS:
        del parts[0]
    return ".".join(part for part in parts if part != "_orig_mod")


class _Refused(Exception):
    """Why a parameter is not known; ``segments`` adds its name and shape."""


#: A local form of a parameter: its shape, and what lies in it.
_Form = tuple[tuple[int, ...], tuple[Segment, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronNaming:
    """``Naming`` of GPTModel. ``fused_norms`` (Transformer Engine's names) and ``grouped_experts`` (TEGroupedMLP)
    choose what ``parameters`` lists; ``segments`` knows both. ``vocab_multiple``: ``make_vocab_size_divisible_by``: the
    padded vocabulary is a multiple of it times tp, and less than one such step is padding.
    """

    arch: Arch
    head: str = "lm"
    fused_norms: bool = False
    grouped_experts: bool = False
    vocab_multiple: int = 128

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]:
        """Segments of a local parameter, in its own order of rows. Raises UnknownParameter."""
        local = tuple(shape)
        try:
            forms = self._forms(unwrapped(parameter), local, where)
        except _Refused as error:
            raise UnknownParameter(f"Megatron parameter '{parameter}' {list(local)}: {error}") from None
        for expected, segments in forms:
            if expected == local:
                return segments
        expected_text = " or ".join(str(list(expected)) for expected, _ in forms)
        raise UnknownParameter(
            f"Megatron parameter '{parameter}' has shape {list(local)}; at tp {where.tp_rank} of {where.tp}, expert tp "
            f"{where.etp_rank} of {where.etp}, this {self.arch.family} model has {expected_text}: the architecture or "
            "the coordinates are others, or the layer has parts (output gates, ...) that are not described"
        )

    def parameters(self, where: Where) -> dict[str, tuple[int, ...]]:
        """Local names and shapes of a process that holds ``where.layers``; the first layer brings the embedding, the
        last one final norm and head, with a second copy of a tied embedding where the first layer is elsewhere. The
        bias of the router is a buffer, and listed too. Raises UnknownParameter where tp cannot cut the model."""
        arch = self.arch
        layers = tuple(range(arch.num_layers)) if where.layers is None else tuple(where.layers)
        first, last = 0 in layers, arch.num_layers - 1 in layers
        step = self.vocab_multiple * where.tp
        vocab = (-(-arch.vocab // step) * step // where.tp, arch.hidden)
        names: list[str] = []
        found: dict[str, tuple[int, ...]] = {}
        if first:
            found["embedding.word_embeddings.weight"] = vocab
        for number, layer in enumerate(layers):
            names += (f"decoder.layers.{number}.{name}" for name in self._layer_names(layer, where))
        if last:
            names.append("decoder.final_layernorm.weight")
        for name in names:
            try:
                found[name] = self._forms(name, (), where)[0][0]
            except _Refused as error:
                raise UnknownParameter(f"Megatron parameter '{name}': {error}") from None
        if last and self.head == "value":
            found["output_layer.weight"] = (1, arch.hidden)
        elif last and not (arch.tied_embeddings and first):
            found["output_layer.weight"] = vocab
        return found

    # -- names --------------------------------------------------------------------------------------------------------

    def _layer_names(self, layer: int, where: Where) -> Iterator[str]:
        arch, moe = self.arch, self.arch.moe
        sparse = moe is not None and layer >= moe.first_dense_layers
        attention = "self_attention"
        if arch.mla is not None:
            # Transformer Engine fuses the latent norms into the up projections, not the input's.
            yield "input_layernorm.weight"
            if arch.mla.q_lora_rank is None:
                yield f"{attention}.linear_q_proj.weight"
            else:
                yield f"{attention}.linear_q_down_proj.weight"
                norm = "linear_q_up_proj.layer_norm_weight" if self.fused_norms else "q_layernorm.weight"
                yield f"{attention}.{norm}"
                yield f"{attention}.linear_q_up_proj.weight"
            yield f"{attention}.linear_kv_down_proj.weight"
            norm = "linear_kv_up_proj.layer_norm_weight" if self.fused_norms else "kv_layernorm.weight"
            yield f"{attention}.{norm}"
            yield f"{attention}.linear_kv_up_proj.weight"
        else:
            yield f"{attention}.linear_qkv.layer_norm_weight" if self.fused_norms else "input_layernorm.weight"
            yield f"{attention}.linear_qkv.weight"
            if arch.qkv_bias:
                yield f"{attention}.linear_qkv.bias"
            if arch.qk_norm:
                yield f"{attention}.q_layernorm.weight"
                yield f"{attention}.k_layernorm.weight"
        yield f"{attention}.linear_proj.weight"
        if not sparse:
            yield "mlp.linear_fc1.layer_norm_weight" if self.fused_norms else "pre_mlp_layernorm.weight"
            yield "mlp.linear_fc1.weight"
            yield "mlp.linear_fc2.weight"
            return
        assert moe is not None
        yield "pre_mlp_layernorm.weight"
        yield "mlp.router.weight"
        if moe.router_bias:
            yield "mlp.router.expert_bias"
        for number in range(moe.num_experts if where.experts is None else len(where.experts)):
            for name in ("linear_fc1", "linear_fc2"):
                grouped = f"mlp.experts.{name}.weight{number}"
                yield grouped if self.grouped_experts else f"mlp.experts.local_experts.{number}.{name}.weight"
        if moe.num_shared_experts:
            yield "mlp.shared_experts.linear_fc1.weight"
            yield "mlp.shared_experts.linear_fc2.weight"

    # -- forms --------------------------------------------------------------------------------------------------------

    def _forms(self, name: str, shape: tuple[int, ...], where: Where) -> tuple[_Form, ...]:
        if name == "embedding.word_embeddings.weight":
            return (self._vocabulary(EMBEDDING, shape, where),)
        if name == "output_layer.weight":
            if self.head == "value":
                return (self._whole("score.weight"),)
            return (self._vocabulary(EMBEDDING if self.arch.tied_embeddings else "lm_head.weight", shape, where),)
        if name == "decoder.final_layernorm.weight":
            return (self._whole("model.norm.weight"),)
        matched = _LAYER.fullmatch(name)
        if matched is not None:
            layer = _global(int(matched[1]), where.layers, self.arch.num_layers, "layer")
            expert = _EXPERT.fullmatch(matched[2])
            if expert is not None:
                return (self._expert(layer, int(expert[1] or expert[4] or 0), expert[2] or expert[3], where),)
            maker = self._makers(layer, where).get(matched[2])
            if maker is not None:
                return maker()
        raise _Refused(
            f"none of a {self.arch.family} model with head '{self.head}'; declare what it is, or leave it out of the "
            "model"
        )

    def _makers(self, layer: int, where: Where) -> dict[str, Callable[[], tuple[_Form, ...]]]:
        """What layer ``layer`` has: by the name inside the layer."""
        arch, moe = self.arch, self.arch.moe
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"

        def whole(tensor: str) -> Callable[[], tuple[_Form, ...]]:
            return lambda: (self._whole(tensor),)

        def rows(*tensors: str) -> Callable[[], tuple[_Form, ...]]:
            return lambda: (self._rows(tensors, where.tp, where.tp_rank),)

        def columns(tensor: str) -> Callable[[], tuple[_Form, ...]]:
            return lambda: (self._columns(tensor, where.tp, where.tp_rank),)

        def either(*tensors: str) -> Callable[[], tuple[_Form, ...]]:
            # Transformer Engine repeats a latent down projection, Megatron's own layer cuts its rows.
            return lambda: (self._stacked(tensors), *self._rows_or_none(tensors, where))

        found = {
            "input_layernorm.weight": whole(f"{prefix}.input_layernorm.weight"),
            "pre_mlp_layernorm.weight": whole(f"{prefix}.post_attention_layernorm.weight"),
            "self_attention.linear_proj.weight": columns(f"{attention}.o_proj.weight"),
        }
        if arch.mla is None:
            found["self_attention.linear_qkv.layer_norm_weight"] = found["input_layernorm.weight"]
            found["self_attention.linear_qkv.weight"] = lambda: (self._qkv(layer, "weight", where),)
            if arch.qkv_bias:
                found["self_attention.linear_qkv.bias"] = lambda: (self._qkv(layer, "bias", where),)
            if arch.qk_norm:
                found["self_attention.q_layernorm.weight"] = whole(f"{attention}.q_norm.weight")
                found["self_attention.k_layernorm.weight"] = whole(f"{attention}.k_norm.weight")
        else:
            latent = f"{attention}.kv_a_proj_with_mqa.weight"
            kv_norm = whole(f"{attention}.kv_a_layernorm.weight")
            found["self_attention.linear_kv_down_proj.weight"] = either(latent)
            found["self_attention.kv_layernorm.weight"] = kv_norm
            found["self_attention.linear_kv_up_proj.layer_norm_weight"] = kv_norm
            found["self_attention.linear_kv_up_proj.weight"] = rows(f"{attention}.kv_b_proj.weight")
            if arch.mla.q_lora_rank is None:
                found["self_attention.linear_q_proj.weight"] = rows(f"{attention}.q_proj.weight")
            else:
                q_norm = whole(f"{attention}.q_a_layernorm.weight")
                found["self_attention.linear_q_down_proj.weight"] = either(f"{attention}.q_a_proj.weight")
                found["self_attention.linear_qkv_down_proj.weight"] = either(f"{attention}.q_a_proj.weight", latent)
                found["self_attention.linear_qkv_down_proj.layer_norm_weight"] = found["input_layernorm.weight"]
                found["self_attention.q_layernorm.weight"] = q_norm
                found["self_attention.linear_q_up_proj.layer_norm_weight"] = q_norm
                found["self_attention.linear_q_up_proj.weight"] = rows(f"{attention}.q_b_proj.weight")
        if moe is None or layer < moe.first_dense_layers:
            found["mlp.linear_fc1.layer_norm_weight"] = found["pre_mlp_layernorm.weight"]
            found["mlp.linear_fc1.weight"] = rows(f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight")
            found["mlp.linear_fc2.weight"] = columns(f"{prefix}.mlp.down_proj.weight")
            return found
        block = self._block(layer)
        found["mlp.router.weight"] = whole(f"{block}.gate.weight")
        if moe.router_bias:
            found["mlp.router.expert_bias"] = whole(f"{block}.gate.e_score_correction_bias")
        if moe.num_shared_experts:
            shared = f"{block}.shared_experts"
            found["mlp.shared_experts.linear_fc1.weight"] = rows(
                f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"
            )
            found["mlp.shared_experts.linear_fc2.weight"] = columns(f"{shared}.down_proj.weight")
        return found

    def _block(self, layer: int) -> str:
        return f"model.layers.{layer}." + ("block_sparse_moe" if self.arch.family == "mixtral" else "mlp")

    def _tensor(self, name: str) -> LogicalTensor:
        tensor = _by_name(self.arch, self.head).get(name)
        if tensor is None:
            raise _Refused(f"a {self.arch.family} model with head '{self.head}' has no {name}")
        return tensor

    def _whole(self, name: str) -> _Form:
        tensor = self._tensor(name)
        return tensor.shape, (_segment(tensor, (0, tensor.shape[0]), 0),)

    def _stacked(self, names: Sequence[str]) -> _Form:
        return self._rows(names, 1, 0)

    def _rows_or_none(self, names: Sequence[str], where: Where) -> tuple[_Form, ...]:
        try:
            return (self._rows(names, where.tp, where.tp_rank),)
        except _Refused:
            return ()

    def _rows(self, names: Sequence[str], degree: int, rank: int) -> _Form:
        """This rank's rows of each of ``names``, one after the other."""
        found, at_row, cols = [], 0, 0
        for name in names:
            tensor = self._tensor(name)
            size = _share(tensor, 0, degree)
            found.append(_segment(tensor, (rank * size, (rank + 1) * size), at_row))
            at_row += size
            cols = tensor.shape[1]
        return (at_row, cols), tuple(found)

    def _columns(self, name: str, degree: int, rank: int) -> _Form:
        tensor = self._tensor(name)
        size = _share(tensor, 1, degree)
        rows = tensor.shape[0]
        segment = Segment(tensor=name, row_lo=0, row_hi=rows, col_lo=rank * size, col_hi=(rank + 1) * size, at_row=0)
        return (rows, size), (segment,)

    def _qkv(self, layer: int, kind: str, where: Where) -> _Form:
        """Rows ``rank / tp .. (rank + 1) / tp`` of the fused matrix: any part of any head."""
        arch = self.arch
        per_group = arch.num_heads // arch.num_kv_heads * arch.head_dim
        parts, period = (per_group, arch.head_dim, arch.head_dim), per_group + 2 * arch.head_dim
        total = period * arch.num_kv_heads
        if total % where.tp:
            raise _Refused(f"{total} fused rows of q, k and v cannot be cut over tp={where.tp}")
        tensors = [
            self._tensor(f"model.layers.{layer}.self_attn.{name}.{kind}") for name in ("q_proj", "k_proj", "v_proj")
        ]
        size = total // where.tp
        lo, hi = where.tp_rank * size, (where.tp_rank + 1) * size
        found = []
        for group in range(lo // period, -(-hi // period)):
            start = group * period
            for tensor, rows in zip(tensors, parts, strict=True):
                first, last = max(lo, start), min(hi, start + rows)
                if first < last:
                    shift = group * rows - start
                    found.append(_segment(tensor, (first + shift, last + shift), first - lo))
                start += rows
        return ((size,) if kind == "bias" else (size, arch.hidden)), tuple(found)

    def _vocabulary(self, name: str, shape: tuple[int, ...], where: Where) -> _Form:
        """What the local shape says: every rank has as many rows, the last of them are padding."""
        vocab, hidden, step = self.arch.vocab, self.arch.hidden, self.vocab_multiple * where.tp
        if len(shape) != 2 or shape[1] != hidden:
            raise _Refused(f"not rows of {hidden} columns, a part of the vocabulary of {vocab}")
        rows = shape[0]
        if not vocab <= rows * where.tp < vocab + step:
            raise _Refused(
                f"{rows} rows on each of {where.tp} ranks are {rows * where.tp}, not {vocab} padded to a multiple of "
                f"{self.vocab_multiple} x {where.tp} or less; vocab_multiple, the vocabulary or tp is another one"
            )
        lo = min(where.tp_rank * rows, vocab)
        hi = min(lo + rows, vocab)
        # A rank may hold nothing but padding.
        return shape, (_segment(self._tensor(name), (lo, hi), 0),) if lo < hi else ()

    def _expert(self, layer: int, local: int, matrix: str, where: Where) -> _Form:
        moe = self.arch.moe
        if moe is None or layer < moe.first_dense_layers:
            raise _Refused(f"layer {layer} of this {self.arch.family} model has no experts")
        expert = _global(local, where.experts, moe.num_experts, "expert")
        gate, up, down = ("w1", "w3", "w2") if self.arch.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        prefix = f"{self._block(layer)}.experts.{expert}"
        if matrix == "linear_fc1":
            names = (f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight")
            return self._rows(names, where.etp, where.etp_rank)
        return self._columns(f"{prefix}.{down}.weight", where.etp, where.etp_rank)


@lru_cache(maxsize=32)
def _by_name(arch: Arch, head: str) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in logical_tensors(arch, head)}


def _global(local: int, held: Sequence[int] | None, count: int, what: str) -> int:
    """Global number of a process's ``local``-th layer or expert."""
    if held is not None:
        if local >= len(held):
            raise _Refused(f"{what} {local} of a process that holds {len(held)} ({what}s {list(held)})")
        local = held[local]
    if not 0 <= local < count:
        raise _Refused(f"the model has no {what} {local}, but {count}")
    return local


def _share(tensor: LogicalTensor, dim: int, degree: int) -> int:
    extent = matrix_shape(tensor.shape)[dim]
    units = tensor.cut.groups if tensor.cut is not None and tensor.cut.dim == dim else extent
    if units % degree:
        raise _Refused(
            f"{units} units of {tensor.name} ({extent} {('rows', 'columns')[dim]}) do not divide by {degree}"
        )
    return extent // degree


def _segment(tensor: LogicalTensor, rows: tuple[int, int], at_row: int) -> Segment:
    cols = matrix_shape(tensor.shape)[1]
    return Segment(tensor=tensor.name, row_lo=rows[0], row_hi=rows[1], col_lo=0, col_hi=cols, at_row=at_row)
