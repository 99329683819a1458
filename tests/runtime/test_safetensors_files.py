"""Safetensors checkpoints as holdings: files built by hand here are what ours are read against, and ours by hand."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nereus.ir.arch import Arch, Moe  # noqa: E402
from nereus.ir.fragment import Fragment, fragments_of  # noqa: E402
from nereus.models.naming.base import Where  # noqa: E402
from nereus.models.naming.explicit import ExplicitNaming  # noqa: E402
from nereus.models.naming.hf import HfNaming  # noqa: E402
from nereus.models.tensors import logical_tensors  # noqa: E402
from nereus.runtime.adapters import publish, safetensors_files, safetensors_sums, safetensors_write  # noqa: E402
from nereus.runtime.adapters.base import DTYPE_NAMES, BindError, Binding, BindingBuilder  # noqa: E402
from nereus.runtime.adapters.regions import Claim, area, claims, copy_regions, difference, intersection, logical_shapes  # noqa: E402
from nereus.runtime.adapters.safetensors_header import TensorEntry, read_header  # noqa: E402
from nereus.runtime.adapters.whole import Whole, gather, scatter  # noqa: E402
from nereus.runtime.live import move_here  # noqa: E402

DENSE = Arch(
    family="qwen2", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=20, qkv_bias=True
)
TIED = Arch(
    family="llama", num_layers=1, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=20,
    tied_embeddings=True,
)  # fmt: skip
EXPERTS = Arch(
    family="qwen3_moe", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=20,
    qk_norm=True, moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=8),
)  # fmt: skip

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}


def write_by_hand(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_by_hand(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, start, found = json.loads(raw[8 : 8 + length]), 8 + length, {}
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    for name, entry in header.items():
        if name != "__metadata__":
            lo, hi = entry["data_offsets"]
            flat = torch.frombuffer(bytearray(raw[start + lo : start + hi]), dtype=dtypes[entry["dtype"]])
            found[name] = flat.view(entry["shape"])
    return found


def weights(arch: Arch, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=generator).to(dtype) for t in logical_tensors(arch)}


def as_whole(tensors: dict[str, torch.Tensor]) -> Whole:
    return {(name, "weight"): t.reshape(t.shape[0], -1) for name, t in tensors.items()}


def tp_rank(arch: Arch, tp: int, rank: int, dtype: torch.dtype = torch.float32) -> Binding:
    """What a rank holds under HF names, cut by tensor parallelism; everything else is replicated."""
    naming, where, builder = (
        HfNaming(arch=arch),
        Where(tp=tp, tp_rank=rank, etp=tp, etp_rank=rank),
        BindingBuilder(rank),
    )

    for name, shape in naming.parameters(where).items():
        storage = builder.storage(name, torch.zeros(shape, dtype=dtype))
        cols = shape[-1] if len(shape) > 1 else 1
        segments = naming.segments(name, shape, where)
        builder.fragments.extend(fragments_of(segments, num_cols=cols, slot="weight", storage=storage))
    return builder.finish()


def flat_rank(arch: Arch, ranks: int, rank: int) -> Binding:
    """One flat buffer of the whole model cut in equal parts regardless of tensors, as ZeRO does; the last is short."""
    total = sum(t.numel for t in logical_tensors(arch))
    size = -(-total // ranks)
    low, high, at = rank * size, min((rank + 1) * size, total), 0
    builder = BindingBuilder(rank)
    storage = builder.storage("flat", torch.zeros(size))
    for name, (rows, cols) in logical_shapes(arch).items():
        start, stop = max(low - at, 0), min(high - at, rows * cols)
        if start < stop:
            builder.fragments.append(
                Fragment(
                    tensor=name, slot="weight", storage=storage, row_lo=0, row_hi=rows, col_lo=0, col_hi=cols,
                    start=start, stop=stop, origin=at - low, stride=cols,
                )
            )  # fmt: skip
        at += rows * cols
    return builder.finish()


def equal(found: Whole, expected: Whole) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [DENSE, TIED, EXPERTS], ids=lambda arch: arch.family)
def test_single_file_reads_by_position(tmp_path: Path, arch: Arch, dtype: torch.dtype) -> None:
    tensors = weights(arch, dtype)
    write_by_hand(tmp_path / "model.safetensors", tensors)
    binding = safetensors_files.bind(tmp_path, HfNaming(arch=arch))
    assert equal(gather([binding], logical_shapes(arch)), as_whole(tensors))
    assert len(binding.state.storages) == 1  # one for the file's only dtype, not one a tensor
    for tp in (1, 2):
        ranks = [tp_rank(arch, tp, rank, dtype) for rank in range(tp)]
        for rank in ranks:
            copy_regions(binding, rank)
        assert equal(gather(ranks, logical_shapes(arch)), as_whole(tensors))


def test_sharded_with_index_and_mixed_dtypes(tmp_path: Path) -> None:
    tensors = weights(DENSE, torch.bfloat16)
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = tensors[name].float()
    names = list(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, inside in parts.items():
        write_by_hand(tmp_path / file, {name: tensors[name] for name in inside})
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    binding = safetensors_files.bind(tmp_path, HfNaming(arch=DENSE))
    assert equal(gather([binding], logical_shapes(DENSE)), as_whole(tensors))


@pytest.mark.parametrize("fused", [False, True])
def test_experts_separate_and_stacked(tmp_path: Path, fused: bool) -> None:
    tensors = weights(EXPERTS)
    stored = dict(tensors)
    if fused:
        for layer in range(EXPERTS.num_layers):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                kind: [stored.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in range(4)]
                for kind in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            stored[f"{prefix}.gate_up_proj"] = torch.stack(both)
            stored[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    write_by_hand(tmp_path / "model.safetensors", stored)
    binding = safetensors_files.bind(tmp_path, HfNaming(arch=EXPERTS))
    assert equal(gather([binding], logical_shapes(EXPERTS)), as_whole(tensors))


def test_tied_head_may_be_there_and_the_embedding_is_what_is_read(tmp_path: Path) -> None:
    tensors = weights(TIED)
    # Drifted copies happen; which one counts must not depend on the order in the file.
    stored = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1, **tensors}
    write_by_hand(tmp_path / "model.safetensors", stored)
    rank = tp_rank(TIED, 1, 0)
    copy_regions(safetensors_files.bind(tmp_path, HfNaming(arch=TIED)), rank)
    assert equal(gather([rank], logical_shapes(TIED)), as_whole(tensors))


def test_fp8_with_block_scales(tmp_path: Path) -> None:
    tensors = weights(DENSE, torch.bfloat16)
    stored, expected = {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if name.endswith("_proj.weight"):
            rows, cols = -(-tensor.shape[0] // 8), -(-tensor.shape[1] // 8)
            scale = torch.rand(rows, cols) + number + 0.5
            stored[name], stored[f"{name}_scale_inv"] = tensor.to(torch.float8_e4m3fn), scale
            big = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)[: tensor.shape[0], : tensor.shape[1]]
            expected[name] = (stored[name].float() * big).bfloat16()
        else:
            stored[name] = expected[name] = tensor
    write_by_hand(tmp_path / "model.safetensors", stored)
    with pytest.raises(BindError, match="weight_block_size"):
        safetensors_files.bind(tmp_path, HfNaming(arch=DENSE))
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [8, 8]}}')
    binding = safetensors_files.bind(tmp_path, HfNaming(arch=DENSE))
    assert {storage.dtype for storage in binding.state.storages} == {"fp8", "bf16", "fp32"}
    ranks = [tp_rank(DENSE, 2, rank, torch.bfloat16) for rank in range(2)]
    with pytest.raises(BindError, match=r"q_proj\.weight .*float8_e4m3fn cannot fill torch\.bfloat16"):
        copy_regions(binding, ranks[0])
    for rank in ranks:
        copy_regions(binding, rank, convert=safetensors_files.dequantizer(binding, (8, 8)))
    assert equal(gather(ranks, logical_shapes(DENSE)), as_whole(expected))
    stored["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 3)
    write_by_hand(tmp_path / "model.safetensors", stored)
    with pytest.raises(BindError, match=r"up_proj.*24 x 16 in blocks of 8 x 8 need scales \[3, 2\]"):
        safetensors_files.bind(tmp_path, HfNaming(arch=DENSE))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_reading_touches_only_the_wanted_bytes(tmp_path: Path) -> None:
    arch = replace(DENSE, vocab=200_000)  # 12.8 MB each for embedding and head
    tensors = weights(arch)
    write_by_hand(tmp_path / "model.safetensors", tensors)
    source = safetensors_files.bind(tmp_path, HfNaming(arch=arch))
    assert resident_bytes(tmp_path) == 0
    builder, name = BindingBuilder(0), "model.layers.1.mlp.up_proj.weight"
    storage = builder.storage("up", torch.zeros(12, 16))
    builder.fragments.append(
        Fragment(
            tensor=name, slot="weight", storage=storage, row_lo=12, row_hi=24, col_lo=0, col_hi=16,
            start=0, stop=192, origin=0, stride=16,
        )
    )  # fmt: skip
    target = builder.finish()
    assert copy_regions(source, target) == 12 * 16 * 4
    assert torch.equal(target.memory[0].view(12, 16), tensors[name][12:])
    assert 0 < resident_bytes(tmp_path) <= 4 * 2**20  # the kernel maps a huge page at once where it has one


def resident_bytes(folder: Path) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_writing_to_a_source_never_reaches_the_file(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "model.safetensors", weights(DENSE))
    before = (tmp_path / "model.safetensors").read_bytes()
    for memory in safetensors_files.bind(tmp_path, HfNaming(arch=DENSE)).memory:
        memory.fill_(7.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def _edit(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


UP = "model.layers.0.mlp.up_proj.weight"

FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 100), r"truncated: the header promises \d+ data bytes"),
    "cut header": (lambda p: os.truncate(p, 5), r"5 bytes cannot hold a header"),
    "no header": (
        lambda p: p.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
        r"cannot hold a header of 1099511627776",
    ),
    "not json": (lambda p: p.write_bytes(struct.pack("<Q", 3) + b"{x}"), r"not JSON"),
    "twice": (lambda p: p.write_bytes(struct.pack("<Q", 13) + b'{"a":1,"a":2}'), r"'a' appears twice"),
    "unknown name": (lambda p: _edit(p, lambda h: h.update({"odd": h.pop(UP)})), r"odd \[24, 16\].* none of a qwen2"),
    "wrong shape": (lambda p: _edit(p, lambda h: h[UP].update(shape=[16, 24])), r"up_proj.*\[16, 24\], not \[24, 16\]"),
    "size": (lambda p: _edit(p, lambda h: h[UP].update(shape=[24, 17])), r"up_proj.*takes 1632 bytes.*hold 1536"),
    "dtype": (lambda p: _edit(p, lambda h: h[UP].update(dtype="C64")), r"up_proj.* has dtype 'C64'"),
    "hole": (lambda p: _edit(p, lambda h: h.pop(UP)), r"1536 bytes between .* belong to no tensor"),
    "overlap": (
        lambda p: _edit(p, lambda h: h.update(odd={"dtype": "F32", "shape": [4], "data_offsets": [16, 32]})),
        r"overlaps",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_file_are_named_with_numbers(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    write_by_hand(path, weights(DENSE))
    breaks, text = FAULTS[fault]
    breaks(path)
    with pytest.raises(BindError, match=text):
        safetensors_files.bind(tmp_path, HfNaming(arch=DENSE))


def test_faults_of_a_folder_are_named(tmp_path: Path) -> None:
    naming, tensors = HfNaming(arch=DENSE), weights(DENSE)
    with pytest.raises(BindError, match="does not exist"):
        safetensors_files.bind(tmp_path / "none", naming)
    with pytest.raises(BindError, match="0 other safetensors files"):
        safetensors_files.bind(tmp_path, naming)
    missing = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    write_by_hand(tmp_path / "a.safetensors", missing)
    with pytest.raises(BindError, match=r"lm_head\.weight \(weight\): 320 of 320 elements are missing"):
        safetensors_files.bind(tmp_path, naming)
    assert safetensors_files.bind(tmp_path, naming, allow_missing=(r"^lm_head\.",)).state.fragments
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    with pytest.raises(BindError, match=r"lm_head\.weight is not in a\.safetensors"):
        safetensors_files.bind(tmp_path, naming)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "b.safetensors"}}))
    with pytest.raises(BindError, match=r"b\.safetensors is missing"):
        safetensors_files.bind(tmp_path, naming)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../a.safetensors"}}))
    with pytest.raises(BindError, match="not an index"):
        safetensors_files.bind(tmp_path, naming)
    index.unlink()
    write_by_hand(tmp_path / "a.safetensors", {**tensors, "model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)})
    with pytest.raises(BindError, match=r"layers\.2\.mlp"):
        safetensors_files.bind(tmp_path, naming)
    assert safetensors_files.bind(tmp_path, naming, ignore=(r"\.layers\.2\.",)).state.derived == (
        "model.layers.2.mlp.up_proj.weight",
    )


@pytest.mark.parametrize("arch", [DENSE, TIED, EXPERTS], ids=lambda arch: arch.family)
@pytest.mark.parametrize("limit", [10**9, 3000])
def test_written_by_one_process(tmp_path: Path, arch: Arch, limit: int) -> None:
    tensors, live = weights(arch), tp_rank(arch, 1, 0)
    scatter(as_whole(tensors), live)
    target = tmp_path / "checkpoint"
    written = safetensors_write.save(
        target, live, HfNaming(arch=arch), max_file_bytes=limit, files={"config.json": b"{}"}, metadata={"step": "7"}
    )
    assert written == sum(t.numel() * 4 for t in tensors.values())
    files = sorted(target.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in read_by_hand(file).items()}
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert (target / "config.json").read_bytes() == b"{}"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    if limit == 3000:
        assert all(f.stat().st_size < 3000 + 2000 or len(read_by_hand(f)) == 1 for f in files)
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    else:
        assert [f.name for f in files] == ["model.safetensors"]
    again = safetensors_files.bind(target, HfNaming(arch=arch))
    assert equal(gather([again], logical_shapes(arch)), as_whole(tensors))


def test_conversion_while_writing_and_what_is_carried_over(tmp_path: Path) -> None:
    target, naming = tmp_path / "checkpoint", HfNaming(arch=DENSE)
    for seed in (1, 2):
        tensors, live = weights(DENSE, seed=seed), tp_rank(DENSE, 1, 0)
        scatter(as_whole(tensors), live)
        safetensors_write.save(target, live, naming, dtype="bf16", max_file_bytes=3000 if seed == 1 else 10**9)
        if seed == 1:
            (target / "tokenizer.json").write_text("kept")
    assert sorted(p.name for p in target.iterdir()) == ["model.safetensors", "tokenizer.json"]
    found = read_by_hand(target / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name].bfloat16()) for name in tensors)


def test_incomplete_state_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    live = flat_rank(DENSE, 2, 0)
    with pytest.raises(BindError, match=r"layers\.1\.input_layernorm\.weight \(weight\): 8 of 16 elements.*and 2 more"):
        safetensors_write.save(tmp_path / "checkpoint", live, HfNaming(arch=DENSE))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, naming, live = tmp_path / "checkpoint", HfNaming(arch=DENSE), tp_rank(DENSE, 1, 0)
    scatter(as_whole(weights(DENSE)), live)
    safetensors_write.save(target, live, naming)
    before = (target / "model.safetensors").read_bytes()
    scatter(as_whole(weights(DENSE, seed=5)), live)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda f, n, at: bytes(n) if at > 4000 else pread(f, n, at))  # a disk that forgets
    with pytest.raises(BindError, match=r"rank 0: model\.safetensors: \d+ bytes at \d+ were not read back as written"):
        safetensors_write.save(target, live, naming)
    assert (target / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def saved(folder: Path, limit: int = 10**9) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors, live = weights(DENSE), tp_rank(DENSE, 1, 0)
    scatter(as_whole(tensors), live)
    safetensors_write.save(folder / "checkpoint", live, HfNaming(arch=DENSE), max_file_bytes=limit)
    return folder / "checkpoint", tensors


def change(file: Path, name: str, edit: Callable[[bytearray], None]) -> None:
    """``edit`` the bytes of one tensor in place."""
    raw = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    low, high = (8 + length + at for at in json.loads(raw[8 : 8 + length])[name]["data_offsets"])
    data = raw[low:high]
    edit(data)
    raw[low:high] = data
    file.write_bytes(raw)


def flip(data: bytearray) -> None:
    data[101] ^= 16


def swap_rows(data: bytearray) -> None:
    data[:64], data[64:128] = data[64:128], data[:64]


@pytest.mark.parametrize("edit", [flip, swap_rows])
@pytest.mark.parametrize("limit", [10**9, 3000])
def test_content_that_is_not_what_was_written_is_named(
    tmp_path: Path, limit: int, edit: Callable[[bytearray], None]
) -> None:
    folder, tensors = saved(tmp_path, limit)
    naming = HfNaming(arch=DENSE)
    assert safetensors_files.verify(folder) == sum(t.numel() * 4 for t in tensors.values())
    (file,) = (f for f in folder.glob("*.safetensors") if UP in read_by_hand(f))
    change(file, UP, edit)
    told = rf"1 tensors are not what was written: {re.escape(UP)} in {file.name} \(checksum \w{{16}}, not \w{{16}}\)\."
    for read in (lambda: safetensors_files.bind(folder, naming), lambda: safetensors_files.verify(folder)):
        with pytest.raises(BindError, match=told):
            read()
    assert safetensors_files.bind(folder, naming, verify=False).state.fragments
    with pytest.raises(BindError, match=r"embed_tokens.*missing"):  # what is passed over is not read either
        safetensors_files.bind(folder, naming, ignore=(r"up_proj", r"embed_tokens"), allow_missing=(r"up_proj",))


def test_checksums_travel_in_the_file_and_others_do_without(tmp_path: Path) -> None:
    folder, tensors = saved(tmp_path)
    file, naming = folder / "model.safetensors", HfNaming(arch=DENSE)
    header = read_header(file)
    assert set(json.loads(header.metadata[safetensors_sums.KEY])) == set(tensors) and header.metadata["format"] == "pt"
    moved = tmp_path / "elsewhere.safetensors"
    file.rename(moved)
    change(moved, UP, flip)
    with pytest.raises(BindError, match=r"up_proj\.weight in elsewhere\.safetensors"):
        safetensors_files.bind(moved, naming)
    _edit(moved, lambda h: h["__metadata__"].update({safetensors_sums.KEY: "[1]"}))
    with pytest.raises(BindError, match=r"elsewhere.*no table of checksums"):
        safetensors_files.bind(moved, naming)
    _edit(moved, lambda h: h["__metadata__"].pop(safetensors_sums.KEY))
    assert safetensors_files.bind(moved, naming).state.fragments
    assert safetensors_files.verify(moved) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_parts_of_a_checksum_add_up_whatever_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    entry = TensorEntry(name="some.weight", dtype=DTYPE_NAMES[dtype], shape=(37, 29), begin=0)
    values = (100 * torch.randn(37, 29, generator=generator)).to(dtype)

    def total(rects: list[tuple[int, int, int, int]]) -> int:
        return sum(
            safetensors_sums.sum_of(entry, values[a:b, c:d].contiguous(), row=a, col=c, num_cols=29)
            for a, b, c, d in rects
        ) % (1 << 64)

    whole = total([(0, 37, 0, 29)])
    assert total([(20, 37, 0, 29), (0, 20, 7, 29), (0, 20, 0, 7)]) == whole
    assert total([(row, row + 1, 0, 29) for row in range(37)]) == whole
    values[3], values[4] = values[4].clone(), values[3].clone()
    assert total([(0, 37, 0, 29)]) != whole


def test_a_save_that_ends_before_its_checksums_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tensors = saved(tmp_path)
    live = tp_rank(DENSE, 1, 0)
    scatter(as_whole(weights(DENSE, seed=5)), live)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_write, "_state", full)
    with pytest.raises(BindError, match=r"writing checksums into .*No space left"):
        safetensors_write.save(folder, live, HfNaming(arch=DENSE))
    assert equal(
        gather([safetensors_files.bind(folder, HfNaming(arch=DENSE))], logical_shapes(DENSE)), as_whole(tensors)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("exchange", [True, False])
def test_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    target = tmp_path / "checkpoint"
    for text in ("one", "two"):
        folder = publish.begin(target)
        (folder / "data").write_text(text)
        assert publish.leftovers(target) == (folder,)
        publish.publish(folder, target)
        assert (target / "data").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    target.rename(tmp_path / ".checkpoint.replaced-0123")  # killed between two renames
    assert re.search(r"killed.*\.checkpoint\.replaced-0123", publish.missing(target))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_element_is_claimed_once(ranks: int) -> None:
    """Replicas under tp 2 beside flat partitions over ``ranks``: overlaps of every kind."""
    states = [tp_rank(EXPERTS, 2, r).state for r in (0, 1, 0)] + [
        flat_rank(EXPERTS, ranks, r).state for r in range(ranks)
    ]
    found = claims(states)
    for name, (rows, cols) in logical_shapes(EXPERTS).items():
        counts = torch.zeros(rows, cols, dtype=torch.int32)
        for claim in found[name, "weight"]:
            assert isinstance(claim, Claim)
            counts[claim.rect[0] : claim.rect[1], claim.rect[2] : claim.rect[3]] += 1
        assert torch.equal(counts, torch.ones_like(counts)), name
    replicas = claims([tp_rank(EXPERTS, 1, 0).state] * 3)
    loads = [sum(area(c.rect) for cs in replicas.values() for c in cs if c.holder == holder) for holder in range(3)]
    assert max(loads) - min(loads) <= 320  # no more than the largest tensor


def test_rectangle_difference_partitions() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        a, b = (
            (int(x[0]), int(x[0] + x[1]), int(x[2]), int(x[2] + x[3]))
            for x in (torch.randint(1, 6, (4,), generator=generator) for _ in range(2))
        )
        counts = torch.zeros(12, 12, dtype=torch.int32)
        common = intersection(a, b)
        for r in [*difference(a, b), *([common] if common else [])]:
            counts[r[0] : r[1], r[2] : r[3]] += 1
        expected = torch.zeros_like(counts)
        expected[a[0] : a[1], a[2] : a[3]] = 1
        assert torch.equal(counts, expected)


def test_dtype_names_of_the_format_cover_ours() -> None:
    from nereus.runtime.adapters.safetensors_header import TO_FORMAT

    assert set(TO_FORMAT) == set(DTYPE_NAMES.values())


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("arch", [DENSE, TIED, EXPERTS], ids=lambda arch: arch.family)
def test_a_checkpoint_is_a_source_of_a_move(tmp_path: Path, arch: Arch, readers: int) -> None:
    """Where only some processes see the path, the compiler moves from those: 2 ranks from 1 or 2 readers."""
    tensors = weights(arch)
    write_by_hand(tmp_path / "model.safetensors", tensors)
    naming, new = HfNaming(arch=arch), [tp_rank(arch, 2, rank) for rank in range(2)]
    sources = [safetensors_files.bind(tmp_path, naming, rank=rank) if rank < readers else None for rank in range(2)]
    move_here(sources, new, logical_tensors(arch))
    assert equal(gather(new, logical_shapes(arch)), as_whole(tensors))


def test_a_naming_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    naming: Any = ExplicitNaming.identity({"weight": (4, 8)})
    live = tp_rank(DENSE, 1, 0)
    for call in (
        lambda: safetensors_write.save(tmp_path / "new", live, naming),
        lambda: safetensors_files.bind(tmp_path, naming),
    ):
        with pytest.raises(BindError, match=r"ExplicitNaming does not say which tensors .* HfNaming\(arch="):
            call()
    assert list(tmp_path.iterdir()) == []
