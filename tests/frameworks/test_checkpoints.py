"""Checkpoints against those who write and read them: transformers' folders of safetensors, torch's DCP under FSDP2."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from frameworks import hf_models  # noqa: E402
from frameworks.gathering import bindings_of_all  # noqa: E402
from frameworks.harness import RunFailed, run  # noqa: E402

from nereus.ir.arch import Arch  # noqa: E402
from nereus.ir.fragment import Fragment, RankState, fragments_of  # noqa: E402
from nereus.models.naming.base import Where  # noqa: E402
from nereus.models.naming.hf import HfNaming  # noqa: E402
from nereus.models.tensors import logical_tensors  # noqa: E402
from nereus.runtime.adapters import dcp, dcp_job, dcp_state, dcp_write, safetensors_files, safetensors_write  # noqa: E402
from nereus.runtime.adapters.base import Binding, BindingBuilder  # noqa: E402
from nereus.runtime.adapters.boxes import chunk_fragments  # noqa: E402
from nereus.runtime.adapters.fsdp2 import Fsdp2  # noqa: E402
from nereus.runtime.adapters.regions import copy_regions, logical_shapes  # noqa: E402
from nereus.runtime.adapters.whole import Whole, gather  # noqa: E402
from nereus.runtime.live import move  # noqa: E402

FAMILIES = ["llama", "qwen2", "mixtral", "qwen3_moe", "deepseek_v3"]
TIED = {"tie_word_embeddings": True}


def build(family: str, seed: int = 0, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_models.config(family, **more))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape))
    return model.float().eval()


def logical(state: dict[str, torch.Tensor], arch: Arch) -> Whole:
    """A module's tensors by logical name, taken apart here by hand."""
    found: Whole = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            block = name.removesuffix("gate_up_proj").replace(".mlp.", block_name(arch))
            for expert, both in enumerate(tensor):
                for kind, half in zip(expert_names(arch)[:2], both.chunk(2), strict=True):
                    found[f"{block}{expert}.{kind}.weight", "weight"] = half
        elif name.endswith("experts.down_proj"):
            block = name.removesuffix("down_proj").replace(".mlp.", block_name(arch))
            for expert, down in enumerate(tensor):
                found[f"{block}{expert}.{expert_names(arch)[2]}.weight", "weight"] = down
        elif not (arch.tied_embeddings and name == "lm_head.weight"):
            found[name.replace(".mlp.", block_name(arch)), "weight"] = tensor.reshape(tensor.shape[0], -1)
    return found


def block_name(arch: Arch) -> str:
    return ".block_sparse_moe." if arch.family == "mixtral" else ".mlp."


def expert_names(arch: Arch) -> tuple[str, str, str]:
    return ("w1", "w3", "w2") if arch.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")


def equal(found: Whole, expected: Whole) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def bind_module(arch: Arch, tensors: dict[str, tuple[str, torch.Tensor]], rank: int = 0) -> Binding:
    """``tensors``: storage name -> (parameter, whole tensor or DTensor). Places come from torch's own arithmetic."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    naming, builder = HfNaming(arch=arch), BindingBuilder(rank)
    for label, (name, tensor) in tensors.items():
        slot, shape = label.split(" ")[1], tuple(tensor.shape)
        segments = naming.segments(name, shape, Where())
        if isinstance(tensor, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            storage = builder.storage(label, tensor.to_local())
            box = (tuple(offsets), tuple(sizes))
            builder.fragments.extend(chunk_fragments(segments, shape, box, slot=slot, storage=storage, origin=0))
        else:
            storage, cols = builder.storage(label, tensor), shape[-1] if len(shape) > 1 else 1
            builder.fragments.extend(fragments_of(segments, num_cols=cols, slot=slot, storage=storage))
    return builder.finish()


def weights_of(model: Any) -> dict[str, tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("correction_bias"))]
    return {f"{name} weight": (name, tensor.detach()) for name, tensor in named}


# --- HF safetensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["5GB", "20KB"])
@pytest.mark.parametrize(
    ("family", "more"), [*((f, {}) for f in FAMILIES), ("qwen3", TIED)], ids=[*FAMILIES, "qwen3-tied"]
)
def test_saved_by_transformers(tmp_path: Path, family: str, more: dict[str, Any], limit: str) -> None:
    model, arch = build(family, **more), hf_models.arch(family, **more)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (limit == "20KB")
    source = safetensors_files.bind(tmp_path, HfNaming(arch=arch))
    assert equal(gather([source], logical_shapes(arch)), logical(model.state_dict(), arch))
    other = build(family, seed=1, **more)
    copy_regions(source, bind_module(arch, weights_of(other)))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("limit", [10**9, 20_000])
@pytest.mark.parametrize(
    ("family", "more"), [*((f, {}) for f in FAMILIES), ("qwen3", TIED)], ids=[*FAMILIES, "qwen3-tied"]
)
def test_written_here_and_loaded_by_transformers(tmp_path: Path, family: str, more: dict[str, Any], limit: int) -> None:
    from transformers import AutoModelForCausalLM

    model, arch = build(family, **more), hf_models.arch(family, **more)
    files = {"config.json": model.config.to_json_string().encode()}
    target, binding = tmp_path / "checkpoint", bind_module(arch, weights_of(model))
    safetensors_write.save(target, binding, HfNaming(arch=arch), max_file_bytes=limit, files=files)
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)


def _save_shards(rank: int, world_size: int, family: str, seed: int, target: str, kill: int) -> int:
    """Each rank holds its FSDP2 shard of the model; ``kill``: this rank dies in the middle of its writing."""
    from torch.distributed.fsdp import fully_shard

    model, arch = build(family, seed), hf_models.arch(family)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if rank == kill:
        write, calls = safetensors_write._write_at, []

        def torn(descriptor: int, data: memoryview, offset: int) -> None:
            calls.append(offset)
            if len(calls) == 5:
                write(descriptor, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            write(descriptor, data, offset)

        safetensors_write._write_at = torn
    binding = bind_module(arch, weights_of(model), rank)
    return safetensors_write.save(target, binding, HfNaming(arch=arch), max_file_bytes=30_000)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_four_ranks_write_safetensors_and_a_killed_one_leaves_the_old(tmp_path: Path) -> None:
    target, arch = tmp_path / "checkpoint", hf_models.arch("qwen3_moe")
    written = run(4, _save_shards, "qwen3_moe", 0, str(target), -1, timeout=300)
    expected = logical(build("qwen3_moe").state_dict(), arch)
    assert sum(written) == sum(4 * tensor.numel() for tensor in expected.values()) and min(written) > 0
    source = safetensors_files.bind(target, HfNaming(arch=arch))
    assert equal(gather([source], logical_shapes(arch)), expected)
    before = digest(target)
    with pytest.raises(RunFailed):
        run(3, _save_shards, "qwen3_moe", 7, str(target), 2, timeout=300)
    assert digest(target) == before


# --- torch DCP ------------------------------------------------------------------------------------------------------


def train(family: str, seed: int, steps: int | None, *, lr: float = 1e-2, **more: Any) -> tuple[Any, Any]:
    """An FSDP2 model and its optimizer after ``steps`` updates (0: moments are there, and zero; None: none yet)."""
    from torch.distributed.fsdp import fully_shard

    model = build(family, seed, **more)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if steps is None:
        return model, optimizer
    for step in range(max(steps, 1)):
        tokens = torch.arange(step, step + 16)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        if steps == 0:
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.mul_(0.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def bind_job(arch: Arch, model: Any, optimizer: Any, rank: int) -> Binding:
    tensors = weights_of(model)
    for name, parameter in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name} {slot}"] = (name, optimizer.state[parameter][slot])
    return bind_module(arch, tensors, rank)


def nested(model: Any, optimizer: Any, flatten: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, optim = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": optim}


def one_more(arch: Arch, model: Any, optimizer: Any, rank: int) -> Whole:
    """State after one more update."""
    tokens = torch.arange(40, 56)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return gather(bindings_of_all(bind_job(arch, model, optimizer, rank)), logical_shapes(arch))


def _save(rank: int, world_size: int, family: str, more: dict[str, Any], folder: str) -> Any:
    """By torch in both of its styles, and by us."""
    import torch.distributed.checkpoint as torch_dcp

    arch = hf_models.arch(family, **more)
    model, optimizer = train(family, 0, 2, **more)
    for flatten in (False, True):
        torch_dcp.save(nested(model, optimizer, flatten), checkpoint_id=f"{folder}/{flatten}")
    live = bind_job(arch, model, optimizer, rank)
    adapter = Fsdp2(model, optimizer, naming=HfNaming(arch=arch))
    entries = dcp_job.entries_of(adapter.job_state(), HfNaming(arch=arch))
    dcp_write.save(f"{folder}/ours", live, HfNaming(arch=arch), entries=entries)
    whole = gather(bindings_of_all(live), logical_shapes(arch))
    return whole if rank == 0 else None


def _read(rank: int, world_size: int, family: str, more: dict[str, Any], folder: str) -> Any:
    """Theirs by us into an FSDP2 job of another size and into a flat partition of everything; ours by torch."""
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    arch = hf_models.arch(family, **more)
    naming, shapes = HfNaming(arch=arch), logical_shapes(arch)
    results = []
    for flatten in (False, True):
        model, optimizer = train(family, 5, 0, **more)
        live = bind_job(arch, model, optimizer, rank)
        holding = dcp.bind(f"{folder}/{flatten}", naming, rank=rank, wanted=live.state)
        num_bytes = copy_regions(holding.binding, live)
        assert num_bytes == sum(f.numel * 4 for f in live.state.fragments)
        results.append(gather(bindings_of_all(live), shapes))
        peer, peer_optimizer = train(family, 6, 0, **more)
        state = nested(peer, peer_optimizer, flatten)
        torch_dcp.load(state, checkpoint_id=f"{folder}/{flatten}")
        loaded = bind_job(arch, peer, peer_optimizer, rank)  # torch loads into the live tensors
        results.append(gather(bindings_of_all(loaded), shapes))
        assert not holding.unread
        partition = flat(shapes, ("weight", "exp_avg", "exp_avg_sq"), rank, world_size)
        copy_regions(dcp.bind(f"{folder}/{flatten}", naming, wanted=partition.state).binding, partition)
        results.append(gather(bindings_of_all(partition), shapes))
        results.append(_moved(f"{folder}/{flatten}", f"{folder}/moved-{flatten}", family, more, rank, world_size))
    # Who goes on from where: torch from torch's, torch from ours, our adapter from either.
    after = []
    for name in ("False", "ours"):
        model, optimizer = train(family, 9, 0, **more)
        state = nested(model, optimizer, False)
        torch_dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        results.append(gather(bindings_of_all(bind_job(arch, model, optimizer, rank)), shapes))
        assert {float(slots["step"]) for slots in optimizer.state.values()} == {2.0}
        after.append(one_more(arch, model, optimizer, rank))
    for name in ("False", "True", "ours"):
        model, optimizer = train(family, 8, None, lr=0.5, **more)
        adapter = Fsdp2(model, optimizer, naming=naming)
        job_state = dcp_job.job_state_of(
            dcp.bind(f"{folder}/{name}", naming, wanted=RankState(rank=rank, storages=(), fragments=()))
        )
        adapter.prepare(job_state)
        live = adapter.bind()
        copy_regions(dcp.bind(f"{folder}/{name}", naming, wanted=live.state).binding, live)
        adapter.finish(job_state)
        assert [c.name for c in adapter.checklist() if c.check() is not None] == []
        after.append(one_more(arch, model, optimizer, rank))
    assert all(equal(found, after[0]) for found in after) and not equal(after[0], results[0])
    return results if rank == 0 else None


def _moved(folder: str, target: str, family: str, more: dict[str, Any], rank: int, world_size: int) -> Whole:
    """Their chunks by a compiled move into an FSDP2 job; from there by another into a folder, which torch loads."""
    import torch.distributed.checkpoint as torch_dcp

    arch = hf_models.arch(family, **more)
    naming, tensors = HfNaming(arch=arch), logical_tensors(arch)
    live = bind_job(arch, *train(family, 10, 0, **more), rank)
    holding, chunks = dcp_state.sources(Path(folder), naming, rank, world_size, verify=True)
    assert len(chunks) > 1 and not holding.unread
    report = move(chunks, live, tensors)
    assert sum(received for _, received in report.received) > 0
    kinds = {(f.tensor, f.slot): "fp32" for binding in bindings_of_all(live) for f in binding.state.fragments}
    parameters = dcp_state.parameters(naming, kinds)
    if rank == 0:
        Path(target).mkdir()
    torch.distributed.barrier()
    sink = dcp_state.Sink.lay_out(Path(target), rank, dcp_state.shares(parameters, world_size)[rank])
    move(live, sink.binding, tensors)
    stored: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(stored, sink.finish())
    if rank == 0:
        dcp_state.write_metadata(Path(target), [one for own in stored for one in own], {})
    torch.distributed.barrier()
    peer, optimizer = train(family, 11, 0, **more)
    state = nested(peer, optimizer, False)
    del state["optim"]["param_groups"]
    for slots in state["optim"]["state"].values():
        slots.pop("step", None)
    torch_dcp.load(state, checkpoint_id=target)
    return gather(bindings_of_all(bind_job(arch, peer, optimizer, rank)), logical_shapes(arch))


def flat(shapes: dict[str, tuple[int, int]], slots: Any, rank: int, world_size: int) -> Binding:
    """ZeRO's way: all tensors behind one another, cut in equal parts wherever that falls."""
    builder = BindingBuilder(rank)
    names = [name for name in shapes if not name.endswith("correction_bias")]
    total = sum(shapes[name][0] * shapes[name][1] for name in names)
    size = -(-total // world_size)
    for slot in slots:
        at, low, high = 0, rank * size, min((rank + 1) * size, total)
        storage = builder.storage(slot, torch.zeros(size))
        for name in names:
            rows, cols = shapes[name]
            start, stop = max(low - at, 0), min(high - at, rows * cols)
            if start < stop:
                builder.fragments.append(
                    Fragment(
                        tensor=name, slot=slot, storage=storage, row_lo=0, row_hi=rows, col_lo=0, col_hi=cols,
                        start=start, stop=stop, origin=at - low, stride=cols,
                    )
                )  # fmt: skip
            at += rows * cols
    return builder.finish()


@pytest.mark.parametrize(
    ("family", "more", "ranks"), [("qwen2", TIED, 2), ("qwen3_moe", {}, 3)], ids=["qwen2-tied", "qwen3_moe"]
)
def test_from_four_ranks_to_fewer(tmp_path: Path, family: str, more: dict[str, Any], ranks: int) -> None:
    expected = run(4, _save, family, more, str(tmp_path), timeout=300)[0]
    assert {slot for _, slot in expected} == {"weight", "exp_avg", "exp_avg_sq"}
    found = run(ranks, _read, family, more, str(tmp_path), timeout=300)[0]
    assert len(found) == 10
    for whole in found:
        assert equal(whole, expected)


def _write_here(
    rank: int, world_size: int, family: str, more: dict[str, Any], target: str, seed: int, kill: int
) -> Any:
    arch = hf_models.arch(family, **more)
    model, optimizer = train(family, seed, 2, **more)
    live = bind_job(arch, model, optimizer, rank)
    whole = gather(bindings_of_all(live), logical_shapes(arch))
    if rank == kill:
        resolve, calls = dcp_write._Planner.resolve_data, []

        def torn(self: Any, item: Any) -> Any:
            calls.append(item)
            if len(calls) == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return resolve(self, item)

        dcp_write._Planner.resolve_data = torn
    dcp_write.save(target, live, HfNaming(arch=arch))
    return whole if rank == 0 else None


def test_killed_while_writing_dcp(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    expected = run(2, _write_here, "qwen2", TIED, str(target), 0, -1, timeout=300)[0]
    before = digest(target)
    with pytest.raises(RunFailed):
        run(2, _write_here, "qwen2", TIED, str(target), 1, 1, timeout=300)
    assert digest(target) == before
    arch = hf_models.arch("qwen2", **TIED)
    holding = dcp.bind(target, HfNaming(arch=arch))
    assert equal(gather([holding.binding], logical_shapes(arch)), expected)
