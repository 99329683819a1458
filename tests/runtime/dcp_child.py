"""Four ranks that save the tests' model by torch alone: ``dcp_child.py FOLDER ROWS COLUMNS STEPS STORE``.

All tensors are DTensors over a mesh of ROWS x COLUMNS, cut by rows over its first axis, and matrices by columns over
its second; weights and moments are those of the unmoved run after so many steps."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import torch.multiprocessing
from runtime.session_job import unmoved
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def save(rank: int, folder: str, rows: int, columns: int, steps: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(rows, columns))
    adapter = unmoved(steps)
    assert adapter.optimizer is not None
    model, optim = get_state_dict(adapter.module, adapter.optimizer)

    def cut(value: torch.Tensor) -> torch.Tensor:
        second = Shard(1) if columns > 1 and value.dim() > 1 else Replicate()
        return distribute_tensor(value, mesh, [Shard(0), second])

    model = {name: cut(value) for name, value in model.items()}
    for slots in optim["state"].values():
        slots.update({key: cut(value) for key, value in slots.items() if value.dim()})
    torch_dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = (sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
    # Forked: torch is imported once, and has started no thread yet.
    torch.multiprocessing.start_processes(save, args=args, nprocs=4, start_method="fork")
