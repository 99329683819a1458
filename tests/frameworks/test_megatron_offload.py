"""Megatron's HybridDeviceOptimizer: state of whole parameters in host memory until a fraction is reached, and moved.

Its own code runs. On a CPU nothing lies on a GPU, so it would put nothing aside: the shim lets the CPU's memory stand
for the GPU's, and what ``cpu()`` returns for the host's (``cpu_shim.apart_from_host``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from frameworks.harness import run
from frameworks.megatron_models import DENSE, SPARSE, At, Trainer, build, randomise, whole_of
from frameworks.megatron_moves import agree, hand_over

from nereus import describe
from nereus.runtime.adapters import megatron_hybrid
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.coordinates import from_megatron
from nereus.runtime.describe import LiveStage

SMALL = replace(DENSE, num_layers=2)


def _hybrids(trainer: Trainer) -> list[Any]:
    leaves = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    return [leaf.optimizer for leaf in leaves if not getattr(leaf, "is_stub_optimizer", False)]


def _check_places(trainer: Trainer, binding: Binding) -> tuple[int, int]:
    """What lies in host memory is what the rule says, and is really there. (elements there, of all that is stepped)"""
    from frameworks.cpu_shim import HostTensor

    there = total = 0
    expected = set()
    for hybrid in _hybrids(trainer):
        params = [param for group in hybrid.param_groups for param in group["params"]]
        size, gone = sum(param.numel() for param in params), 0
        for param in params:
            assert (gone < size * trainer.at.offload) == megatron_hybrid.in_host(hybrid, param)
            if megatron_hybrid.in_host(hybrid, param):
                gone += param.numel()
                expected |= {value.data_ptr() for value in hybrid.state[param].values() if value.numel() > 1}
        assert gone >= size * trainer.at.offload
        there, total = there + gone, total + size
    flagged = set()
    for storage, data in zip(binding.state.storages, binding.memory, strict=True):
        assert storage.host == isinstance(data, HostTensor), storage.name
        if storage.host:
            flagged.add(data.data_ptr())
            assert storage.name.rpartition(" ")[2] in ("master", "exp_avg", "exp_avg_sq")
    # The fp32 weight that is stepped on the host is a copy of the one on the GPU: derived, no storage of its own.
    copies = {hybrid_copy.data_ptr() for h in _hybrids(trainer) for hybrid_copy in h.cpu_copys_map_gpu_param}
    assert flagged - expected == set() and expected - flagged <= copies
    return there, total


def _along(rank: int, world: int, arch: Any, layouts: list[At]) -> list[tuple[str, int, int]]:
    """Train, move, train there, and so on; what of the optimizer lay in host memory after each move."""
    torch.set_num_threads(1)
    found, number = [], 0
    trainer = build(arch, layouts[0])
    randomise(trainer, seed=5)
    for hybrid in _hybrids(trainer):  # Megatron reloads fp32 copies only
        if megatron_hybrid.is_hybrid(hybrid):
            megatron_hybrid.copy_to_host(hybrid)
    for target in layouts[1:]:
        for _ in range(2):
            trainer.step(number)
            number += 1
        change = hand_over(trainer, arch, target, number)
        moved, after = change.trainer, change.after
        assert {values["step"] for values in change.job["groups"].values()} == {number}
        if target.offload is not None:
            found.append((str(target), *_check_places(moved, change.filled)))
        result = moved.step(number)
        here = whole_of(moved.adapter().bind(), arch)
        agree(change.expected, result, after, here, bf16=target.bf16)
        if replace(target, offload=trainer.at.offload) == trainer.at:  # the same sums, stepped elsewhere
            for key, values in after.items():
                if key[1] != "weight":
                    torch.testing.assert_close(here[key], values, rtol=1e-5, atol=1e-7)
        number += 1
        trainer = moved
    return found


CHAINS: dict[str, tuple[Any, list[At]]] = {
    # As Megatron-LM's arguments demand: precision-aware, masters are the hybrid optimizer's.
    "bf16": (
        SMALL,
        [
            At(tp=2, bf16=True, precise=True, offload=0.5),
            At(tp=2, bf16=True, precise=True, offload=0.25),
            At(pp=2, bf16=True, precise=True, offload=0.25),
            At(tp=4, bf16=True),  # all on GPUs, without it
            At(bf16=True, precise=True, offload=0.75),
            At(tp=2, bf16=True, precise=True, offload=1.0),
            At(tp=2, bf16=True, offload=0.5),  # masters are Megatron's, their host copies are derived
            At(tp=2, pp=2, bf16=True, precise=True, offload=0.5),
        ],
    ),
    # Megatron cannot build it over the distributed optimizer of fp32 weights: their shards are no leaves.
    "fp32": (
        SMALL,
        [
            At(tp=2, optimizer="plain", offload=0.5),
            At(pp=2, optimizer="plain", offload=0.3),
            At(tp=2),
            At(tp=4, optimizer="plain", offload=0.9),
        ],
    ),
    "experts": (
        SPARSE,
        [
            At(ep=4, bf16=True, precise=True, offload=0.5),
            At(ep=2, pp=2, bf16=True, precise=True, offload=0.5),
            At(bf16=True, precise=True, offload=0.25),
            At(ep=2, bf16=True, precise=True, offload=0.75),
        ],
    ),
}


def _all(rank: int, world: int) -> dict[str, list[tuple[str, int, int]]]:
    return {name: _along(rank, world, arch, layouts) for name, (arch, layouts) in CHAINS.items()}


@pytest.fixture(scope="module")
def moves() -> list[dict[str, list[tuple[str, int, int]]]]:
    return run(4, _all, timeout=600)


@pytest.mark.parametrize("name", list(CHAINS))
def test_moves_keep_everything(name: str, moves: list[dict[str, list[tuple[str, int, int]]]]) -> None:
    offloading = [at for at in CHAINS[name][1][1:] if at.offload is not None]
    for found in moves:
        assert [text for text, _, _ in found[name]] == [str(at) for at in offloading]
    for number, at in enumerate(offloading):
        there, total = (sum(found[name][number][i] for found in moves) for i in (1, 2))
        assert total * at.offload <= there <= total


def _described(rank: int, world: int) -> tuple[str, tuple[str, ...]]:
    trainer = build(SMALL, At(bf16=True, precise=True, offload=0.5, vocab_multiple=128))
    live = LiveStage(
        model="actor", kind="train", arch=SMALL, source="tiny.json", backend="megatron", zero=1,
        settings=(("sp", trainer.config.sequence_parallel),),
    )  # fmt: skip
    found = describe([(live, from_megatron(), trainer.adapter().bind().state)], gpu="h100-sxm-80gb")
    return found.text, found.notes


def test_a_live_job_is_described_with_its_share() -> None:
    ((text, notes),) = run(1, _described)
    shares = {name: float(share) for name, share in re.findall(r"(\w+) += +fp32 @host\(([\d.]+)\)", text)}
    assert shares.keys() == {"master", "exp_avg", "exp_avg_sq"} and all(0.5 <= s < 1 for s in shares.values()), text
    # Megatron walks from the model's end, a plan from its beginning.
    assert [note.split()[1] for note in notes if "another memory" in note] == list(shares)


def _refused(rank: int, world: int) -> list[str]:
    torch.set_num_threads(1)
    found = []
    for at, spoil in (
        (At(optimizer="plain", bf16=True, offload=0.5), lambda trainer: None),
        (At(optimizer="plain", offload=0.5), lambda trainer: next(trainer.chunks[0].parameters()).data.add_(1)),
    ):
        trainer = build(SMALL, at)
        spoil(trainer)
        with pytest.raises(BindError) as error:
            trainer.adapter().bind()
        found.append(str(error.value))
    return found


def test_what_megatron_would_step_wrongly_is_refused() -> None:
    (found,) = run(1, _refused)
    assert "none of its optimizers steps" in found[0] and "use_distributed_optimizer" in found[0]
    assert "is not the parameter" in found[1] and "the next step would undo that" in found[1]
