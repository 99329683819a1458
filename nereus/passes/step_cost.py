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


def node_traffic_s(
    plan: Plan, stage: Stage, layout: Layout, node_of_rank: IntArray, num_params: int, topology: Topology
) -> float:
    """Seconds per RL step that the busiest NIC spends on ``stage``'s crossing pipeline edges and data-parallel
    rings."""
    out_bytes = np.zeros(len(topology.nodes))
    coords = layout.coordinates()
    workload = plan.workload
    if layout.pp > 1:
        directions = 2 if stage.is_train else 1
        passes = workload.epochs if stage.is_train else 1
        edge_bytes = (
            2 * workload.seq_len * plan.model(stage.model).arch.hidden * workload.num_samples * passes / layout.dp
        )
        lead = coords["tp"] == 0
        key = (coords["dp"] * layout.cp + coords["cp"]) * layout.pp + coords["pp"]
        node_of_stage = np.zeros(layout.dp * layout.cp * layout.pp, dtype=np.int64)
        node_of_stage[key[lead]] = node_of_rank[lead]
        chains = node_of_stage.reshape(-1, layout.pp)
        crossing = chains[:, :-1] != chains[:, 1:]
        for ends in ((chains[:, :-1], chains[:, 1:]), (chains[:, 1:], chains[:, :-1]))[:directions]:
            np.add.at(out_bytes, ends[0][crossing], edge_bytes)
    if stage.is_train and layout.dp > 1:
        updates = max(1, workload.num_samples // workload.mini_batch) * workload.epochs
        ring_bytes = 2 * (layout.dp - 1) / layout.dp * 4 * num_params / layout.num_coords * updates
        key = ((coords["pp"] * layout.tp + coords["tp"]) * layout.cp + coords["cp"]) * layout.dp + coords["dp"]
        node_of_member = np.zeros(layout.num_ranks, dtype=np.int64)
        node_of_member[key] = node_of_rank
        rings = np.sort(node_of_member.reshape(-1, layout.dp), axis=1)
        # NCCL orders a ring by node: it leaves every node that it visits once.
        first_visit = np.ones_like(rings, dtype=bool)
        first_visit[:, 1:] = rings[:, 1:] != rings[:, :-1]
        spans = rings[:, 0] != rings[:, -1]
        np.add.at(out_bytes, rings[first_visit & spans[:, None]], ring_bytes)
    nic = np.array([node.nic_bytes_per_s for node in topology.nodes])
    return float((out_bytes / nic).max())
