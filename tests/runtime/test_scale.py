from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from runtime.tiny import cluster, plan, stage

from nereus.ir.plan import Model
from nereus.models.legality import tp_refusals
from nereus.models.presets import preset, preset_names
from nereus.runtime.scale import Scale, parse_scale, scale_arch, scale_plans, scale_split, state_bytes

SIXTEEN = cluster(8, 8)


def llama(**more: object) -> tuple[object, ...]:
    model = Model(name="actor", arch=preset("llama-3.1-8b"), source="llama-3.1-8b")
    return model, plan(stage(model, "train", SIXTEEN.devices, **more), on=SIXTEEN, models=(model,))


def test_degrees_stay_legal_for_both_plans_and_models_shrink_alike() -> None:
    _, old = llama(tp=2, pp=2)
    _, new = llama(tp=16)
    small_old, small_new = scale_plans((old, new), "auto")
    assert small_old.models == small_new.models
    arch = small_old.models[0].arch
    assert (arch.num_heads, arch.num_kv_heads) == (32, 8)
    assert tp_refusals(arch, 2) == tp_refusals(arch, 16) == ()
    assert arch.hidden == 128
    assert arch.num_layers == 4
    assert small_old.stages[0].pp_split == (2, 2)
    assert state_bytes(small_old) < 400 * 2**20


def test_uneven_stays_uneven() -> None:
    assert scale_split((8, 8, 8, 8), 8) == (2, 2, 2, 2)
    assert scale_split((11, 11, 10), 6) in ((3, 2, 1), (2, 3, 1))
    assert scale_split((3, 4, 4, 4, 2), 6) == (1, 1, 1, 2, 1) or sum(scale_split((3, 4, 4, 4, 2), 6)) == 6
    with pytest.raises(ValueError, match="3 layers do not make 4"):
        scale_split((8, 8, 8, 8), 3)
    model, old = llama(fsdp=16)
    _, uneven = llama(pp=4, pp_split=(7, 9, 9, 7))
    three = plan(stage(model, "train", SIXTEEN.devices[:6], fsdp=6), on=SIXTEEN, models=(model,))  # type: ignore[arg-type]
    _, small, small_uneven = scale_plans((old, three, uneven), Scale(width=64, layers=6))
    arch = small.models[0].arch
    for name in ("hidden", "ffn", "vocab"):
        original, scaled = getattr(preset("llama-3.1-8b"), name), getattr(arch, name)
        assert scaled < original
        assert (scaled % 6 == 0) == (original % 6 == 0)
        assert (scaled % 16 == 0) == (original % 16 == 0)
    assert len(set(small_uneven.stages[0].pp_split)) > 1
    assert sum(small_uneven.stages[0].pp_split) == arch.num_layers


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_shrinks_and_stays_whole(name: str) -> None:
    arch = preset(name)
    small = scale_arch(arch, Scale(width=64), ())
    assert small.hidden <= max(64, arch.hidden // 8)
    assert small.num_heads == arch.num_heads
    assert small.num_layers == 4
    assert tp_refusals(small, 1) == ()


def test_none_changes_nothing_and_a_value_head_stays() -> None:
    _, old = llama(tp=2)
    assert scale_plans((old,), "none") == (old,)
    model = Model(name="critic", arch=preset("llama-3.1-8b"), source="llama-3.1-8b", head="value")
    critic = plan(stage(model, "train", SIXTEEN.devices), on=SIXTEEN, models=(model,))
    (small,) = scale_plans((critic,), "auto")
    assert replace(small.models[0], arch=model.arch) == model


@pytest.mark.parametrize("text", ["", "big", "0", "64,0", "64,4,512,1", "-8", "64,,4", "1.5"])
def test_bad_scales_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="scale"):
        parse_scale(text)


def test_good_scales() -> None:
    assert parse_scale("auto") == "auto"
    assert parse_scale("64") == Scale(width=64)
    assert parse_scale("64,8,1000") == Scale(width=64, layers=8, vocab=1000)


def test_chunks_of_an_interleaved_schedule_shrink_with_their_stages() -> None:
    _, old = llama(pp=2, vp=2, pp_split=(16, 16), chunks=(8, 8, 8, 8))
    _, new = llama(pp=2, vp=2, pp_split=(15, 17), chunks=(7, 8, 8, 9))
    small_old, small_new = (p.stages[0] for p in scale_plans((old, new), Scale(width=64, layers=6)))
    for small in (small_old, small_new):
        assert small.pp_split == (sum(small.chunks[::2]), sum(small.chunks[1::2]))
        assert sum(small.chunks) == 8 and len(small.chunks) == 4
    assert small_old.chunks == (2, 2, 2, 2) != small_new.chunks
