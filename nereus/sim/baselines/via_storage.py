"""Checkpoint via storage (UCP, Megatron's distributed checkpoint): save, restart at the new layout, load.

Rules (UCP, arXiv 2406.18820; MCP, megatron-core ``dist_checkpointing``): every element of the state is written once to
storage, the job ends, processes start in the new layout, and every rank reads all that it holds. Half-precision weights
are rounded from the fp32 masters on load and are not stored. Frozen models lie in storage already. The whole job
restarts, changed or not. Ranks as listed; no copy goes between devices.

Figures are calibrated, not measured: a restart of 150 s (published for 30B on 32 GPUs by LiveR, arXiv 2605.22014) and
storage that all ranks share at 1.3 GB/s, which together give the 330 s that the Nereus paper measured at best for MCP
on an 8B model (2 x 112 GB in 180 s) and, with the conversion that UCP makes between save and load (4 x 192 GB), its
696 s for actor and critic. A cluster with a faster file system scales the storage part down, not the restart.
"""

from __future__ import annotations

import numpy as np

from nereus.ir.layout import IntArray
from nereus.sim.baselines.answer import STORAGE, Answer, Step, Transfer, everything, positive, refusal
from nereus.sim.baselines.direct import lost
from nereus.sim.baselines.problem import Problem, build_problem

STORAGE_BYTES_PER_S = 1.3e9
RESTART_S = 150.0


class ViaStorage:
    name = "via storage"
    system = "UCP / MCP"

    def solve(self, problem: Problem) -> Answer:
        gone = lost(problem)
        if gone is not None:
            return refusal(self.name, problem, gone)
        problem = build_problem(problem.old, problem.new, derive=True)
        save: list[Transfer] = []
        load: list[Transfer] = []
        frozen = {model.name for model in problem.old.models if model.frozen}
        for number, table in enumerate(problem.diff.tables):
            sizes = table.num_bytes
            reads: dict[int, list[IntArray]] = {}
            writes: dict[int, list[IntArray]] = {}
            for cls, intervals in enumerate(table.intervals_of_classes()):
                holders = problem.diff.holders[number][cls]
                wanters = sorted({p for g in table.class_wanters[cls] for p in table.new_groups[g].places})
                if not holders or not wanters:
                    continue
                read = False
                for place in wanters:
                    own = table.derived.get(place)
                    part = intervals if own is None else np.setdiff1d(intervals, own, assume_unique=True)
                    if len(part):
                        reads.setdefault(place, []).append(part)
                        read = True
                if read:
                    writes.setdefault(holders[0], []).append(intervals)
            for place, parts in writes.items():
                part = np.concatenate(parts)
                num_bytes = 0 if table.model in frozen else int(sizes[part].sum())
                save.append(Transfer(place, STORAGE, number, part, num_bytes))
            for place, parts in reads.items():
                part = np.concatenate(parts)
                load.append(Transfer(STORAGE, place, number, part, int(sizes[part].sum())))
        before, after = (np.zeros(problem.num_spaces, dtype=np.int64) for _ in range(2))
        before[: problem.num_devices] = problem.life.before_bytes
        after += problem.after_bytes()
        for stage in problem.storages.stages:
            size = problem.set_bytes(stage)
            before += size.kept + size.old
            after += size.kept + size.new
        devices = problem.alive_devices
        return Answer(
            baseline=self.name,
            problem=problem,
            placed=problem.new,
            tables=problem.diff.tables,
            final=everything(problem.diff.tables),
            steps=(
                Step(name="save", devices=devices, transfers=tuple(save), released=positive(before)),
                Step(
                    name="restart and load",
                    devices=devices,
                    transfers=tuple(load),
                    acquired=positive(after),
                    fixed_s=RESTART_S,
                    after=(0,),
                    barrier=True,
                ),
            ),
            base_bytes=before,
            outside_s=problem.drain_s(),
            storage_bytes_per_s=STORAGE_BYTES_PER_S,
        )
