"""Tenplex: state goes through per-node stores in host memory and is always read from the first replica.

Rules (arXiv 2312.05181, SOSP'24; kungfu-team/tenplex): the state of a job is a collection of tensors in a store in
each node's host memory. On a change every worker writes its state to the store of its node; each new worker's
partition is put together there by range queries, and a range that several replicas hold is read from data-parallel
rank 0, from its node's store over the network if need be (no load balancing); workers are started anew and load their
partitions. Ranks as listed. GPUs never hold old and new state together; the stores do. One collection holds the state
sets that change; the others are left alone.
"""

from __future__ import annotations

import numpy as np

from nereus.ir.layout import IntArray
from nereus.models.priors import ENGINE_START_S, SPAWN_S
from nereus.sim.baselines.answer import Answer, Step, Transfer, everything, positive, refusal
from nereus.sim.baselines.direct import lost
from nereus.sim.baselines.problem import Problem


class FirstReplica:
    name = "first replica"
    system = "Tenplex"

    def solve(self, problem: Problem) -> Answer:
        gone = lost(problem)
        if gone is not None:
            return refusal(self.name, problem, gone)
        devices = problem.num_devices
        changed = set(problem.changed())
        save: list[Transfer] = []
        query: list[Transfer] = []
        load: list[Transfer] = []
        for number, table in enumerate(problem.diff.tables):
            geometry = problem.diff.geometries[problem.diff.geometry_of[number]]
            moving = [
                i for i, group in enumerate(table.new_groups) if geometry.new_sets[group.state_set].stage in changed
            ]
            sizes = table.num_bytes
            of_class = table.intervals_of_classes()
            saved: dict[int, list[IntArray]] = {}
            wanted: dict[int, list[IntArray]] = {}
            asked: dict[tuple[int, int], list[IntArray]] = {}
            for cls, intervals in enumerate(of_class):
                holders = problem.diff.holders[number][cls]
                wanters = sorted(
                    {p for g in table.class_wanters[cls] if g in moving for p in table.new_groups[g].places}
                )
                if not wanters or not holders:
                    continue
                # Every holder writes what it has; the first one answers.
                for place in holders:
                    if place < devices:
                        saved.setdefault(place, []).append(intervals)
                first = holders[0] % devices + devices
                for place in wanters:
                    store = place % devices + devices
                    if place < devices:
                        wanted.setdefault(place, []).append(intervals)
                    if store != first:
                        asked.setdefault((first, store), []).append(intervals)
            save += [_transfer(p, p + devices, number, parts, sizes) for p, parts in saved.items()]
            query += [_transfer(src, dst, number, parts, sizes) for (src, dst), parts in asked.items()]
            load += [_transfer(p + devices, p, number, parts, sizes) for p, parts in wanted.items()]
        return self._answer(problem, changed, save, query, load)

    def _answer(
        self, problem: Problem, changed: set[str], save: list[Transfer], query: list[Transfer], load: list[Transfer]
    ) -> Answer:
        zero = np.zeros(problem.num_spaces, dtype=np.int64)
        base = zero.copy()
        base[: problem.num_devices] = np.maximum(
            problem.life.before_bytes, problem.after_bytes()[: problem.num_devices]
        )
        gone, come = zero.copy(), zero.copy()
        for stage in problem.storages.stages:
            size = problem.set_bytes(stage)
            base += size.kept + size.old
            if stage in changed:
                gone += size.old + size.kept
                come += size.new + size.kept
        in_gpus = np.arange(problem.num_spaces) < problem.num_devices
        written, gathered = zero.copy(), zero.copy()
        for t in save:
            written[problem.topology.space_of_place(t.dst)] += t.num_bytes
        for t in load:  # partitions that stay in host memory are among what comes
            gathered[problem.topology.space_of_place(t.src)] += t.num_bytes
        engines = any(op.kind == "engine-start" for op in problem.life.ops)
        steps = (
            Step(
                name="save",
                devices=problem.alive_devices,
                transfers=tuple(save),
                acquired=positive(written),
                released=positive(np.where(in_gpus, gone, 0)),
            ),
            Step(
                name="query",
                devices=problem.alive_devices,
                transfers=tuple(query),
                acquired=positive(gathered + np.where(in_gpus, 0, come)),
                after=(0,),
            ),
            Step(
                name="load",
                devices=problem.alive_devices,
                transfers=tuple(load),
                acquired=positive(np.where(in_gpus, come, 0)),
                released=positive(written + gathered + np.where(in_gpus, 0, gone)),
                fixed_s=ENGINE_START_S if engines else SPAWN_S,
                after=(1,),
                barrier=True,
            ),
        )
        groups = problem.life.seconds("build-groups")
        return Answer(
            baseline=self.name,
            problem=problem,
            placed=problem.new,
            tables=problem.diff.tables,
            final=everything(problem.diff.tables),
            steps=steps,
            base_bytes=base,
            outside_s=problem.drain_s() + groups + problem.commit_s(),
        )


def _transfer(src: int, dst: int, table: int, parts: list[IntArray], sizes: IntArray) -> Transfer:
    intervals = np.concatenate(parts)
    return Transfer(src, dst, table, intervals, int(sizes[intervals].sum()))
