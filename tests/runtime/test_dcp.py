"""torch.distributed.checkpoint folders as holdings, in one process. Several processes: tests/frameworks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as torch_dcp  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from nereus.ir.arch import Arch, Moe  # noqa: E402
from nereus.ir.fragment import Fragment, Segment, fragments_of  # noqa: E402
from nereus.models.naming.base import Where  # noqa: E402
from nereus.models.naming.explicit import ExplicitNaming  # noqa: E402
from nereus.models.naming.hf import HfNaming  # noqa: E402
from nereus.models.tensors import logical_tensors  # noqa: E402
from nereus.runtime.adapters import dcp, dcp_job, dcp_write  # noqa: E402
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder  # noqa: E402
from nereus.runtime.adapters.boxes import chunk_fragments, rect_boxes  # noqa: E402
from nereus.runtime.adapters.regions import copy_regions, logical_shapes  # noqa: E402
from nereus.runtime.adapters.whole import Whole, gather, scatter  # noqa: E402

TIED = Arch(
    family="qwen2", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=20, qkv_bias=True,
    tied_embeddings=True,
)  # fmt: skip
EXPERTS = Arch(
    family="qwen3_moe", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=20,
    qk_norm=True, moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=8),
)  # fmt: skip
SLOTS = ("weight", "exp_avg", "exp_avg_sq")


def whole_state(arch: Arch, seed: int = 0) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    shapes = logical_shapes(arch)
    return {(name, slot): torch.randn(shape, generator=generator) for slot in SLOTS for name, shape in shapes.items()}


def live(arch: Arch, whole: Whole | None = None) -> Binding:
    """A process that holds everything under the names of modules, stacked experts included."""
    naming, builder = HfNaming(arch=arch), BindingBuilder(0)
    for name, shape in naming.parameters(Where()).items():
        segments = naming.segments(name, shape, Where())
        cols = shape[-1] if len(shape) > 1 else 1
        for slot in SLOTS:
            storage = builder.storage(f"{name}.{slot}", torch.zeros(shape))
            builder.fragments.extend(fragments_of(segments, num_cols=cols, slot=slot, storage=storage))
    binding = builder.finish()
    if whole is not None:
        scatter(whole, binding)
    return binding


def flat(arch: Arch, whole: Whole) -> Binding:
    """All tensors behind one another in one buffer in two fragments each, cut inside a row: up to six rectangles."""
    builder = BindingBuilder(0)
    for slot in SLOTS:
        at, shapes = 0, logical_shapes(arch)
        storage = builder.storage(slot, torch.zeros(sum(rows * cols for rows, cols in shapes.values())))
        for name, (rows, cols) in shapes.items():
            middle = rows * cols // 3 + 1
            for start, stop in ((0, middle), (middle, rows * cols)):
                builder.fragments.append(
                    Fragment(
                        tensor=name, slot=slot, storage=storage, row_lo=0, row_hi=rows, col_lo=0, col_hi=cols,
                        start=start, stop=stop, origin=at, stride=cols,
                    )
                )  # fmt: skip
            at += rows * cols
    binding = builder.finish()
    scatter(whole, binding)
    return binding


def state_dict(binding: Binding, *, nested: bool = True) -> dict[str, Any]:
    """What torch's get_state_dict would give for the module that ``live`` stands for."""
    model, optim = {}, {}
    for storage, memory in zip(binding.state.storages, binding.memory, strict=True):
        name, slot = storage.name.rsplit(".", 1)
        (model if slot == "weight" else optim.setdefault(name, {}))[name if slot == "weight" else slot] = memory
    return {"model": model, "optim": {"state": optim}} if nested else model


def shaped(arch: Arch, binding: Binding) -> dict[str, Any]:
    shapes = HfNaming(arch=arch).parameters(Where())
    found = state_dict(binding)
    found["model"] = {name: tensor.view(shapes[name]) for name, tensor in found["model"].items()}
    found["optim"]["state"] = {
        name: {slot: tensor.view(shapes[name]) for slot, tensor in slots.items()}
        for name, slots in found["optim"]["state"].items()
    }
    return found


def equal(found: Whole, expected: Whole) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("arch", [TIED, EXPERTS], ids=lambda arch: arch.family)
def test_saved_by_torch(tmp_path: Path, arch: Arch) -> None:
    whole = whole_state(arch)
    state = shaped(arch, live(arch, whole))
    if arch.tied_embeddings:
        state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"]
    for slots in state["optim"]["state"].values():
        slots["step"] = torch.tensor(3.0)
    state["optim"]["param_groups"] = [{"lr": 0.5, "params": list(state["model"])}]
    state["rng"] = {"cpu": torch.tensor(7), "arch": arch}  # of a class that torch does not load unasked
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    holding = dcp.bind(tmp_path, HfNaming(arch=arch))
    assert equal(gather([holding.binding], logical_shapes(arch)), whole)
    assert holding.entries["optim.param_groups.0.lr"] == 0.5
    assert holding.entries["rng.cpu"] == 7
    assert holding.unread == ("rng.arch",)
    optimizer = dcp_job.job_state_of(holding)["optimizer"]
    assert optimizer["groups"] == [{"lr": 0.5}] and optimizer["scalar_kinds"] == {"step": "fp32"}
    assert optimizer["tensors"].keys() == logical_shapes(arch).keys()
    for entry in optimizer["tensors"].values():
        expected = {"group": 0, "slots": {"exp_avg": "fp32", "exp_avg_sq": "fp32"}, "scalars": {"step": 3.0}}
        assert entry == expected
    target = live(arch)
    copy_regions(dcp.bind(tmp_path, HfNaming(arch=arch), wanted=target.state).binding, target)
    assert equal(gather([target], logical_shapes(arch)), whole)


@pytest.mark.parametrize("arch", [TIED, EXPERTS], ids=lambda arch: arch.family)
@pytest.mark.parametrize("hold", [live, flat], ids=["modules", "flat"])
def test_written_here_and_loaded_by_torch(tmp_path: Path, arch: Arch, hold: Any) -> None:
    target = tmp_path / "checkpoint"
    for seed in (1, 2):  # the second replaces the first
        whole = whole_state(arch, seed)
        entries = {"optim": {"param_groups": [{"lr": 0.25 * seed}]}, "step": torch.tensor(seed)}
        binding = hold(arch, whole)
        written = dcp_write.save(target, binding, HfNaming(arch=arch), entries=entries)
        tied = arch.vocab * arch.hidden if arch.tied_embeddings else 0  # torch stores a tied head under both names
        assert written == 4 * (3 * sum(t.numel for t in logical_tensors(arch)) + tied)
        state = shaped(arch, live(arch))
        state["optim"]["param_groups"] = [{"lr": 0.0}]
        if arch.tied_embeddings:
            state["model"]["lm_head.weight"] = torch.zeros(arch.vocab, arch.hidden)
        torch_dcp.load(state, checkpoint_id=target, no_dist=True)
        found = live(arch)
        for storage, memory in zip(found.state.storages, found.memory, strict=True):
            name, slot = storage.name.rsplit(".", 1)
            source = state["model"][name] if slot == "weight" else state["optim"]["state"][name][slot]
            memory.copy_(source.view(-1))
        assert equal(gather([found], logical_shapes(arch)), whole)
        assert state["optim"]["param_groups"] == [{"lr": 0.25 * seed}]
        if arch.tied_embeddings:
            assert torch.equal(state["model"]["lm_head.weight"], whole["model.embed_tokens.weight", "weight"])
        holding = dcp.bind(target, HfNaming(arch=arch))
        assert equal(gather([holding.binding], logical_shapes(arch)), whole)
        assert holding.entries["step"] == seed
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_only_wanted_chunks_are_opened(tmp_path: Path) -> None:
    arch, whole = TIED, whole_state(TIED)
    torch_dcp.save(shaped(arch, live(arch, whole)), checkpoint_id=tmp_path, no_dist=True)
    builder, name = BindingBuilder(0), "model.layers.1.mlp.up_proj.weight"
    storage = builder.storage("part", torch.zeros(2 * 16))
    builder.fragments.append(
        Fragment(
            tensor=name, slot="exp_avg", storage=storage, row_lo=5, row_hi=7, col_lo=0, col_hi=16, start=0, stop=32,
            origin=0, stride=16,
        )
    )  # fmt: skip
    target = builder.finish()
    source = dcp.bind(tmp_path, HfNaming(arch=arch), wanted=target.state).binding
    assert [s.name.rsplit(":", 1)[1] for s in source.state.storages] == [f"optim.state.{name}.exp_avg"]
    assert copy_regions(source, target) == 2 * 16 * 4
    assert torch.equal(target.memory[0].view(2, 16), whole[name, "exp_avg"][5:7])


def test_chunks_saved_transposed_are_right(tmp_path: Path) -> None:
    arch, whole = TIED, whole_state(TIED)
    state = shaped(arch, live(arch, whole))["model"]
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].T.contiguous().T
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = gather([dcp.bind(tmp_path, HfNaming(arch=arch)).binding], logical_shapes(arch))
    assert torch.equal(found[name, "weight"], whole[name, "weight"])


def test_what_is_not_understood_is_named(tmp_path: Path) -> None:
    arch, naming = TIED, HfNaming(arch=TIED)
    state = shaped(arch, live(arch, whole_state(arch)))

    def refused(text: str, change: dict[str, Any], **options: Any) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        torch_dcp.save({**state, **change}, checkpoint_id=folder, no_dist=True)
        with pytest.raises(BindError, match=text):
            dcp.bind(folder, naming, **options)

    up = "model.layers.0.mlp.up_proj.weight"
    refused(r"ema\.model\.norm\.weight \[16\]", {"ema": {"model.norm.weight": torch.ones(16)}})
    refused(r"up_proj\.weight \[16, 24\].*not \[24, 16\]", {"model": {**state["model"], up: torch.ones(16, 24)}})
    refused(r"up_proj.*complex64", {"model": {**state["model"], up: torch.ones(24, 16, dtype=torch.complex64)}})
    without = {name: tensor for name, tensor in state["model"].items() if name != up}
    refused(r"layers\.0\.mlp\.up_proj\.weight \(weight\): 384 of 384 elements are missing", {"model": without})
    refused(r"two copies of the weights", {"module": state["model"]})
    good = tmp_path / "good"
    torch_dcp.save({**state, "ema": {"model.norm.weight": torch.ones(16)}}, checkpoint_id=good, no_dist=True)
    assert dcp.bind(good, naming, ignore=(r"^ema\.",)).binding.state.derived == ("ema.model.norm.weight",)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    naming, folder = HfNaming(arch=TIED), tmp_path / "checkpoint"
    with pytest.raises(BindError, match="does not exist"):
        dcp.bind(folder, naming)
    torch_dcp.save(shaped(TIED, live(TIED, whole_state(TIED))), checkpoint_id=folder, no_dist=True)
    (data,) = folder.glob("*.distcp")
    raw = data.read_bytes()
    os.truncate(data, len(raw) - 100)
    with pytest.raises(BindError, match=rf"__0_0\.distcp is truncated: {len(raw) - 100} bytes, but .* at {len(raw)}"):
        dcp.bind(folder, naming)
    data.write_bytes(b"x" * len(raw))
    with pytest.raises(BindError, match=r"at byte \d+ is no stream of torch\.save"):
        dcp.bind(folder, naming)
    data.unlink()
    with pytest.raises(BindError, match=r"__0_0\.distcp is missing"):
        dcp.bind(folder, naming)
    (folder / ".metadata").write_bytes(pickle.dumps(3)[:-1])
    with pytest.raises(BindError, match="cannot be read"):
        dcp.bind(folder, naming)
    (folder / ".metadata").unlink()
    with pytest.raises(BindError, match=r"no \.metadata"):
        dcp.bind(folder, naming)


def test_incomplete_moments_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    full = live(TIED, whole_state(TIED))
    kept = tuple(
        f if (f.tensor, f.slot) != ("model.norm.weight", "exp_avg") else Fragment(**{**_fields(f), "stop": 10})
        for f in full.state.fragments
    )
    cut = Binding(type(full.state)(rank=0, storages=full.state.storages, fragments=kept), full.memory)
    with pytest.raises(BindError, match=r"model\.norm\.weight \(exp_avg\): 6 of 16 elements are missing"):
        dcp_write.save(tmp_path / "checkpoint", cut, HfNaming(arch=TIED))
    assert not list(tmp_path.iterdir())


def _fields(fragment: Fragment) -> dict[str, Any]:
    return {name: getattr(fragment, name) for name in Fragment.__dataclass_fields__}


@given(st.data())
def test_boxes_are_the_rectangles_they_stand_for(data: st.DataObject) -> None:
    """Any box of a parameter of 1 to 4 dims, and any rectangle of its matrix, by position."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    matrix = (-1, shape[-1]) if len(shape) > 1 else (-1, 1)
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    rows, cols = numbers.view(matrix).shape
    spans = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    offsets, sizes = tuple(lo for lo, _ in spans), tuple(hi - lo for lo, hi in spans)
    stored = numbers[tuple(slice(lo, hi) for lo, hi in spans)].contiguous().view(-1)
    whole = Segment(tensor="t", row_lo=0, row_hi=rows, col_lo=0, col_hi=cols, at_row=0)
    seen = 0
    for fragment in chunk_fragments([whole], shape, (offsets, sizes), slot="weight", storage=0, origin=0):
        part = numbers.view(matrix)[fragment.row_lo : fragment.row_hi, fragment.col_lo : fragment.col_hi].reshape(-1)
        assert [int(stored[fragment.offset(p)]) for p in range(fragment.stop)] == part.tolist()
        seen += fragment.numel
    assert seen == stored.numel()

    row_lo, row_hi = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    col_lo, col_hi = sorted(data.draw(st.tuples(st.integers(0, cols), st.integers(0, cols))))
    if row_lo < row_hi and col_lo < col_hi:
        found = []
        for (at, size), (r0, r1, c0, c1) in rect_boxes(shape, (row_lo, row_hi, col_lo, col_hi)):
            part = numbers[tuple(slice(o, o + s) for o, s in zip(at, size, strict=True))]
            assert part.reshape(-1).tolist() == numbers.view(matrix)[r0:r1, c0:c1].reshape(-1).tolist()
            found += part.reshape(-1).tolist()
        assert sorted(found) == sorted(numbers.view(matrix)[row_lo:row_hi, col_lo:col_hi].reshape(-1).tolist())


def test_a_naming_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    naming: Any = ExplicitNaming.identity({"weight": (4, 8)})
    for call in (lambda: dcp_write.save(tmp_path / "new", live(TIED), naming), lambda: dcp.bind(tmp_path, naming)):
        with pytest.raises(BindError, match=r"ExplicitNaming does not say which tensors .* HfNaming\(arch="):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_job_state_is_refused_and_not_made_up_from_the_rest() -> None:
    naming = HfNaming(arch=TIED)
    facts = {"optimizer": {}, "scheduler": {"_last_lr": [0.25]}, "scaler": None, "carried": {}, "version": 9}
    packed = dcp_job.entries_of(facts, naming)[dcp_job.JOB_STATE]

    def read(value: object, unread: tuple[str, ...] = ()) -> dict[str, Any]:
        entries = {} if unread else {dcp_job.JOB_STATE: value}
        return dcp_job.job_state_of(dcp.Holding(BindingBuilder(0).finish(), entries=entries, unread=unread))

    assert read(packed) == facts
    for at in range(0, len(packed), 7):
        spoilt = bytearray(packed)
        spoilt[at] ^= 4
        with pytest.raises(BindError, match="nereus_job_state of the checkpoint does not match its checksum"):
            read(bytes(spoilt))
    for value, unread in ((b"", ()), ("text", ()), (packed[:-1], ()), (None, (dcp_job.JOB_STATE,))):
        with pytest.raises(BindError, match="damaged"):
            read(value, unread)


class _Runs:
    """Leaves a file behind where a pickle is obeyed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_metadata_that_would_run_something_is_refused(tmp_path: Path) -> None:
    folder, trace = tmp_path / "checkpoint", tmp_path / "trace"
    torch_dcp.save(shaped(TIED, live(TIED, whole_state(TIED))), checkpoint_id=folder, no_dist=True)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = _Runs(str(trace))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(BindError, match=r"\.metadata cannot be read: UnpicklingError: it names posix\.mkdir"):
        dcp.bind(folder, HfNaming(arch=TIED))
    assert not trace.exists()
