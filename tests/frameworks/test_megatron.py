"""Megatron trainers moved from layout to layout, against Megatron itself.

At every layout: what the adapter describes equals what Megatron's own checkpoint metadata describes, element by
element. After every move: the same whole tensors bit for bit, and the next step's loss, gradient norm, rate and
weights are those that the unmoved trainer computes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from frameworks.harness import run
from frameworks.megatron_models import (
    DENSE,
    LATENT,
    SPARSE,
    TIED,
    At,
    Trainer,
    build,
    compare_with_metadata,
    randomise,
    whole_of,
)
from frameworks.megatron_moves import agree, hand_over

from nereus.ir.arch import Arch


def _along(rank: int, world: int, arch: Arch, layouts: list[At]) -> list[str]:
    """Train at the first layout, move to the next, train there, and so on. What was compared, in words."""
    torch.set_num_threads(1)
    notes, number = [], 0
    trainer = build(arch, layouts[0])
    randomise(trainer, seed=5)
    for target in layouts[1:]:
        for _ in range(2):
            trainer.step(number)
            number += 1
        counted = compare_with_metadata(trainer, whole_of(trainer.adapter().bind(), arch))
        _clear_padding(trainer)
        change = hand_over(trainer, arch, target, number)
        moved = change.trainer
        counted += compare_with_metadata(moved, change.arrived)
        same_padding = _padded(arch, trainer.at) == _padded(arch, target)
        result = moved.step(number)
        if same_padding:
            here = whole_of(moved.adapter().bind(), arch)
            agree(change.expected, result, change.after, here, bf16=target.bf16)
        number += 1
        notes.append(f"{trainer.at} -> {target}: {counted} tensors by metadata, loss {result[0]:.5f}")
        trainer = moved
    return notes


def _padded(arch: Arch, at: At) -> int:
    step = at.vocab_multiple * at.tp
    return -(-arch.vocab // step) * step


def _clear_padding(trainer: Trainer) -> None:
    """Padded words take part in Megatron's softmax, and train. A move leaves them out: the new ones are zero."""
    binding = trainer.adapter().bind()
    covered = [torch.zeros(data.numel(), dtype=torch.bool) for data in binding.memory]
    for f in binding.state.fragments:
        position = torch.arange(f.start, f.stop)
        covered[f.storage][f.origin + position // f.num_cols * f.stride + position % f.num_cols] = True
    for data, known in zip(binding.memory, covered, strict=True):
        data[~known] = 0


CHAINS: dict[str, tuple[Arch, list[At]]] = {
    "distributed": (
        DENSE,
        [
            At(tp=2),
            At(pp=2),
            At(tp=4),  # more ranks than kv heads: raw rows
            At(),
            At(tp=2, pp=2),
            At(tp=2, bucket=2000),  # several buckets
            At(pp=2, first=1),  # uneven: 1 and 3 layers
            At(pp=2, vp=2),  # interleaved: layers 0 2 and 1 3
            At(tp=2),
        ],
    ),
    "tied and padded": (
        replace(TIED, num_layers=2),
        [
            At(tp=2, optimizer="plain"),
            At(pp=2, optimizer="plain"),
            At(optimizer="plain"),
            At(pp=2, tp=2),
            At(tp=4),
            At(tp=4, vocab_multiple=128),  # ranks of nothing but padding
            At(tp=2, vocab_multiple=128),
        ],
    ),
    # Expert data parallelism of its own, and none: Megatron then counts experts among the dense parameters.
    "experts": (SPARSE, [At(ep=4), At(ep=2), At(ep=2, pp=2), At(), At(ep=4)]),
    # Experts cut over ranks otherwise than the rest is, and beside expert parallelism. Where tp cuts the rest, Megatron
    # trains experts with sequence parallelism only.
    "expert tensor parallel": (
        SPARSE,
        [At(tp=2, ep=2), At(tp=2, etp=2), At(etp=4), At(ep=2, etp=2), At(tp=2, pp=2, etp=2)],
    ),
    # Latent attention, a dense first layer, shared experts, router biases that Megatron moves at every step.
    "latent attention": (LATENT, [At(tp=2), At(pp=2), At(ep=4), At(tp=2, ep=2, etp=2), At(tp=4)]),
    # The distributed optimizer shards over dp x cp.
    "context parallel": (
        replace(DENSE, num_layers=2),
        [At(cp=2), At(tp=2), At(tp=2, cp=2), At(cp=4), At(pp=2)],
    ),
    "bf16": (
        replace(DENSE, num_layers=2),
        [At(tp=2, bf16=True), At(pp=2, bf16=True), At(bf16=True, optimizer="plain"), At(tp=4, bf16=True)],
    ),
}


def _all(rank: int, world: int) -> dict[str, list[str]]:
    return {name: _along(rank, world, arch, layouts) for name, (arch, layouts) in CHAINS.items()}


@pytest.fixture(scope="module")
def moves() -> list[dict[str, list[str]]]:
    """All chains in one start of the processes: starting costs more than most moves."""
    return run(4, _all, timeout=600)


@pytest.mark.parametrize("name", list(CHAINS))
def test_moves_keep_everything(name: str, moves: list[dict[str, list[str]]]) -> None:
    for found in moves:
        assert len(found[name]) == len(CHAINS[name][1]) - 1
        assert all(int(note.split(": ")[1].split()[0]) > 20 for note in found[name]), found[name]
