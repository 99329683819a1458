"""Which nodes there are and which of verl's pools each role uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.ir.diagnostic import Severity
from nereus.lang.importers.hydra import Config
from nereus.lang.importers.plan_text import Block
from nereus.lang.importers.result import Reports
from nereus.lang.importers.verl_launch import FULLY_ASYNC, ONE_STEP_OFF, SPLIT, Launch

DEFAULT_GPU = "h100-sxm-80gb"
_MAX_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices that a group of stages shares."""

    devices: str  # n[0-3]
    gpus: int


@dataclass(slots=True)
class Nodes:
    """Groups of nodes in the order in which they are named."""

    gpu: str
    gpu_comment: str
    entries: list[Block] = field(default_factory=list)
    num_nodes: int = 0

    def add(self, nodes: int, gpus: int, comment: str) -> str:
        """A group of like nodes; returns its name as a device expression."""
        first, last = self.num_nodes, self.num_nodes + nodes - 1
        self.num_nodes += nodes
        name = f"n{first}" if nodes == 1 else f"n[{first}-{last}]"
        block = Block(header=f"node {name}", comment=comment)
        block.add("gpus", f'{gpus} x "{self.gpu}"', self.gpu_comment if not self.entries else "")
        self.entries.append(block)
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    train: Pool
    generate: Pool
    critic: Pool
    reward: Pool


def read_pools(launch: Launch, nodes_asked: int | None, cluster: Nodes) -> Pools:
    """Adds the nodes to ``cluster``; ``nodes_asked`` replaces ``trainer.nnodes``."""
    config, kind = launch.config, launch.kind
    nodes = nodes_asked or max(1, _count(config, "trainer.nnodes", 1))
    gpus = max(1, _count(config, "trainer.n_gpus_per_node", 8))
    origin = "--nodes" if nodes_asked else config.origin("trainer.nnodes", "trainer.nnodes")
    if kind in (ONE_STEP_OFF, FULLY_ASYNC):
        train, generate = _async_pools(config, cluster, nodes, gpus)
        critic = train
    elif kind == SPLIT:
        train, critic = _split_pools(cluster, nodes, gpus, origin)
        generate = train
    else:
        train = Pool(devices=cluster.add(nodes, gpus, origin), gpus=nodes * gpus)
        generate = critic = train
    reward = critic if kind == SPLIT else train
    if config.flag("reward_model.enable") and config.flag("reward_model.enable_resource_pool"):
        count = max(1, _count(config, "reward_model.nnodes", 1))
        each = max(1, _count(config, "reward_model.n_gpus_per_node", 8))
        reward = Pool(devices=cluster.add(count, each, "pool of the reward model"), gpus=count * each)
    _check_size(config.reports, config, {train, generate, critic, reward})
    return Pools(train=train, generate=generate, critic=critic, reward=reward)


def _count(config: Config, key: str, fallback: int) -> int:
    value = config.integer(key, least=0)
    return fallback if value is None else value


def _check_size(reports: Reports, config: Config, pools: set[Pool]) -> None:
    total = sum(pool.gpus for pool in pools)
    if total > _MAX_GPUS:
        reports.add(
            "NRS2505",
            Severity.ERROR,
            f"{total:,} GPUs are more than a plan describes ({_MAX_GPUS:,})",
            config.place("trainer.nnodes"),
        )


def _async_pools(config: Config, cluster: Nodes, nodes: int, gpus: int) -> tuple[Pool, Pool]:
    other_nodes = max(1, _count(config, "rollout.nnodes", 1))
    other_gpus = max(1, _count(config, "rollout.n_gpus_per_node", 8))
    if nodes == other_nodes and gpus + other_gpus <= 8:
        comment = "both pools fit into one node, where Ray packs them: trainer first (assumed)"
        name = cluster.add(nodes, gpus + other_gpus, comment)
        return (
            Pool(devices=f"{name}.gpu{_range(0, gpus)}", gpus=nodes * gpus),
            Pool(devices=f"{name}.gpu{_range(gpus, other_gpus)}", gpus=nodes * other_gpus),
        )
    train = Pool(devices=cluster.add(nodes, gpus, "trainer.nnodes"), gpus=nodes * gpus)
    name = cluster.add(other_nodes, other_gpus, "rollout.nnodes: generation has a pool of its own")
    return train, Pool(devices=name, gpus=other_nodes * other_gpus)


def _split_pools(cluster: Nodes, nodes: int, gpus: int, origin: str) -> tuple[Pool, Pool]:
    """verl's split placement: halves of each node of a single-node job, else halves of the nodes."""
    if nodes < 2 and gpus > 1:
        name = cluster.add(nodes, gpus, origin)
        half = gpus // 2
        return (
            Pool(devices=f"{name}.gpu{_range(0, half)}", gpus=half),
            Pool(devices=f"{name}.gpu{_range(half, half)}", gpus=half),
        )
    half = max(1, nodes // 2)
    first = cluster.add(half, gpus, "pool of actor, generation and reference")
    second = cluster.add(half, gpus, "pool of critic and reward model")
    return Pool(devices=first, gpus=half * gpus), Pool(devices=second, gpus=half * gpus)


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"[{first}-{first + count - 1}]"
