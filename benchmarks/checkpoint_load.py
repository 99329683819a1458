"""Reading a torch DCP checkpoint at another layout, beside torch: `python benchmarks/checkpoint_load.py [FOLDER]`.

Four processes save a model cut by rows (FSDP's way). Two processes then load it cut by rows, by columns (tensor
parallelism of o and down) and whole, in turns: torch.distributed.checkpoint.load, ours (metadata, chunk headers and the
copy of the intersections), and a memcpy of as many bytes. Files are in the page cache after the first turn, which does
not count. Ratios are medians over the turns; seconds on a shared machine mean little.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NUM_SAVERS, NUM_LOADERS = 4, 2
TURNS = 4
WIDTH, LAYERS, FFN, VOCAB = 1024, 4, 2816, 4096

LAYOUTS = {"rows": 0, "columns": 1, "whole": None}


def _arch():  # type: ignore[no-untyped-def]
    from nereus.ir.arch import Arch

    return Arch(
        family="llama",
        num_layers=LAYERS,
        hidden=WIDTH,
        num_heads=16,
        num_kv_heads=4,
        head_dim=WIDTH // 16,
        ffn=FFN,
        vocab=VOCAB,
    )


def _state(mesh, dim: int | None, fill: bool):  # type: ignore[no-untyped-def]
    """Parameter -> DTensor, cut along ``dim``; what has no such dim is whole."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from nereus.models.naming.base import Where
    from nereus.models.naming.hf import HfNaming

    found = {}
    for number, (name, shape) in enumerate(HfNaming(arch=_arch()).parameters(Where()).items()):
        cut = [Replicate()] if dim is None or dim >= len(shape) else [Shard(dim)]
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + number
        found[name] = distribute_tensor(whole if fill else torch.zeros(shape), mesh, cut)
    return found


def _join(rank: int, size: int, store: str):  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,))


def save(rank: int, folder: str, store: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp

    mesh = _join(rank, NUM_SAVERS, store)
    torch_dcp.save({"model": _state(mesh, 0, True)}, checkpoint_id=folder)
    dist.destroy_process_group()


def load(rank: int, folder: str, store: str, results: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from nereus.models.naming.base import Where
    from nereus.models.naming.hf import HfNaming
    from nereus.runtime.adapters import dcp
    from nereus.runtime.adapters.base import BindingBuilder
    from nereus.runtime.adapters.boxes import chunk_fragments
    from nereus.runtime.adapters.regions import copy_regions

    mesh, naming = _join(rank, NUM_LOADERS, store), HfNaming(arch=_arch())
    lines = []

    def timed(work: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - start

    for label, dim in LAYOUTS.items():
        theirs, ours = _state(mesh, dim, False), _state(mesh, dim, False)
        builder = BindingBuilder(rank)
        for name, tensor in ours.items():
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
            storage, shape = builder.storage(name, tensor.to_local()), tuple(tensor.shape)
            segments, box = naming.segments(name, shape, Where()), (tuple(offsets), tuple(sizes))
            builder.fragments.extend(chunk_fragments(segments, shape, box, slot="weight", storage=storage, origin=0))
        target = builder.finish()
        source = torch.ones(sum(memory.numel() for memory in target.memory))
        sink = torch.zeros_like(source)

        def read(target=target) -> None:  # type: ignore[no-untyped-def]
            copy_regions(dcp.bind(folder, naming, wanted=target.state).binding, target)

        def torch_read(theirs=theirs) -> None:  # type: ignore[no-untyped-def]
            torch_dcp.load({"model": theirs}, checkpoint_id=folder)

        def memcpy(sink=sink, source=source) -> None:  # type: ignore[no-untyped-def]
            sink.copy_(source)

        seconds: list[list[float]] = [[timed(work) for work in (torch_read, read, memcpy)] for _ in range(TURNS + 1)]
        assert all(torch.equal(theirs[name].to_local(), ours[name].to_local()) for name in ours)
        medians = [statistics.median(turn[column] for turn in seconds[1:]) for column in range(3)]
        ratios = [statistics.median(turn[0] / turn[1] for turn in seconds[1:])]
        ratios.append(statistics.median(turn[1] / turn[2] for turn in seconds[1:]))
        num_bytes = NUM_LOADERS * source.numel() * 4
        lines.append(
            f"{label:<8} {num_bytes / 1e6:8.0f} {medians[0]:10.3f} {medians[1]:10.3f} {medians[2]:10.3f} "
            f"{ratios[0]:14.2f} {ratios[1]:14.2f}"
        )
    if rank == 0:
        Path(results).write_text("\n".join(lines))
    dist.destroy_process_group()


def main() -> int:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        checkpoint, results = f"{folder}/checkpoint", f"{folder}/results"
        mp.spawn(save, args=(checkpoint, f"{folder}/store-save"), nprocs=NUM_SAVERS)
        mp.spawn(load, args=(checkpoint, f"{folder}/store-load", results), nprocs=NUM_LOADERS)
        print(
            f"{'loaded':<8} {'MB':>8} {'torch s':>10} {'nereus s':>10} {'memcpy s':>10} "
            f"{'torch / nereus':>14} {'nereus / copy':>14}"
        )
        print(Path(results).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
