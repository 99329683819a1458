"""What a placement costs every later RL step: traffic that it sends over node boundaries, as seconds on the busiest
NIC.

Until the planner gives measured costs: a pipeline edge between nodes carries 2 x s x b x h bytes per micro-batch and
direction, a data-parallel ring that visits several nodes 2 (d - 1) / d x 4 B x local parameters per optimizer update
(cost_formulas section 6).
"""

from __future__ import annotations

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray, Layout
from nereus.ir.plan import Plan, Stage


class StepCost:
    """Traffic of one stage: its pipelines are chains of ranks, its data-parallel groups rings."""

    def __init__(self, plan: Plan, stage: Stage, layout: Layout, num_params: int, topology: Topology) -> None:
        self.nic_s = np.array([1.0 / node.nic_bytes_per_s for node in topology.nodes])
        coords = layout.coordinates()
        workload = plan.workload
        self.chains = np.zeros((0, 1), dtype=np.int64)  # rank that leads each tensor-parallel group, along the pipeline
        self.rings = np.zeros((0, 1), dtype=np.int64)
        self.edge_bytes = self.ring_bytes = 0.0
        self.directions = 2 if stage.is_train else 1
        self.peers, self.num_stages = layout.tp, layout.pp  # a group of tp ranks has a ring for each
        if layout.pp > 1:
            passes = workload.epochs if stage.is_train else 1
            self.edge_bytes = (
                2 * workload.seq_len * plan.model(stage.model).arch.hidden * workload.num_samples * passes / layout.dp
            )
            key = (coords["dp"] * layout.cp + coords["cp"]) * layout.pp + coords["pp"]
            lead = np.flatnonzero(coords["tp"] == 0)
            self.chains = lead[np.argsort(key[lead])].reshape(-1, layout.pp)
        if stage.is_train and layout.dp > 1:
            updates = max(1, workload.num_samples // workload.mini_batch) * workload.epochs
            self.ring_bytes = 2 * (layout.dp - 1) / layout.dp * 4 * num_params / layout.num_coords * updates
            key = ((coords["pp"] * layout.tp + coords["tp"]) * layout.cp + coords["cp"]) * layout.dp + coords["dp"]
            self.rings = np.argsort(key).reshape(-1, layout.dp)

    def seconds(self, node_of_rank: IntArray) -> float:
        """Seconds per RL step that the busiest NIC spends on crossing pipeline edges and data-parallel rings."""
        num_nodes = len(self.nic_s)
        out_bytes = np.zeros(num_nodes)
        if len(self.chains):
            chains = node_of_rank[self.chains]
            crossing = chains[:, :-1] != chains[:, 1:]
            for ends in (chains[:, :-1], chains[:, 1:])[: self.directions]:
                out_bytes += self.edge_bytes * np.bincount(ends[crossing], minlength=num_nodes)
        if len(self.rings):
            rings = np.sort(node_of_rank[self.rings], axis=1)
            # NCCL orders a ring by node: it leaves every node that it visits once.
            visit = np.ones(rings.shape, dtype=bool)
            visit[:, 1:] = rings[:, 1:] != rings[:, :-1]
            visit &= rings[:, :1] != rings[:, -1:]
            out_bytes += self.ring_bytes * np.bincount(rings[visit], minlength=num_nodes)
        return float((out_bytes * self.nic_s).max())

    def least(self, rooms: IntArray, nodes: IntArray) -> float:
        """Lower bound of ``seconds`` on ``nodes`` with room for ``rooms`` tensor-parallel groups each: what must cross,
        shared out evenly over their NICs.

        A node whose k groups belong to c pipelines keeps at most k - c edges inside. Unless c is at least dp, no ring
        lies whole in it, and its groups belong to at least k / c rings.
        """
        total: float = self.directions * self.edge_bytes * len(self.chains) * (self.chains.shape[1] - 1)
        depth = self.chains.shape[1] if len(self.chains) else self.num_stages
        for room, count in zip(*np.unique(rooms[rooms > 0], return_counts=True), strict=True):
            pipelines = np.arange(-(-room // depth), room + 1)
            kept = self.directions * self.edge_bytes * (room - pipelines)
            visits = np.where(pipelines >= self.rings.shape[1], 0, -(-room // pipelines)) if len(self.rings) else 0
            total += count * float((self.ring_bytes * self.peers * visits - kept).min())
        return float(max(total, 0.0) / (1.0 / self.nic_s[nodes]).sum())
