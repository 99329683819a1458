"""GPUs, nodes and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.units import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """One row of the hardware data sheets (``nereus/models/data/hardware.csv``)."""

    id: str
    name: str
    vendor: str
    mem_gb: float
    bf16_tflops: float
    hbm_bytes_per_s: float
    #: Per GPU and direction, to all peers in the node together / to one peer.
    intra_bytes_per_s: float
    intra_peer_bytes_per_s: float
    #: Host link (PCIe), per GPU and direction.
    pcie_bytes_per_s: float
    default_nic_bytes_per_s: float  # per GPU; a node has gpus x this unless the plan says otherwise

    @property
    def capacity_bytes(self) -> int:
        """What a plan may use until calibrated: 0.9 x mem_gb x 1e9."""
        return round(0.9 * self.mem_gb * GB)


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A GPU by its place: ``n0.gpu3``."""

    node: str
    index: int

    def __repr__(self) -> str:  # what the dataclass would say; its own is slow, and plans name thousands
        return f"Device(node={self.node!r}, index={self.index!r})"

    def __str__(self) -> str:
        return f"{self.node}.gpu{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    gpu: GpuType
    num_gpus: int
    host_mem_bytes: int
    #: Per node and direction, all rails together.
    nic_bytes_per_s: float
    #: NICs that are bound to GPUs: each serves an equal run of them with its part of the rate. 1: all GPUs share all.
    rails: int = 1

    @property
    def rail_bytes_per_s(self) -> float:
        return self.nic_bytes_per_s / self.rails

    def rail(self, gpu: int) -> int:
        """Which of the node's rails serves a GPU (the last one for GPUs that the node no longer has)."""
        return min(gpu * self.rails // self.num_gpus, self.rails - 1)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(self.name, i) for i in range(self.num_gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Elastic limits of the cluster, in GPUs; ``notice_s``: warning time before a node leaves."""

    min_gpus: int | None = None
    max_gpus: int | None = None
    standby_gpus: int = 0
    notice_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    nodes: tuple[Node, ...]
    #: Nodes that were removed (``remove = n1``): gone, so nothing on them is a source.
    lost: tuple[str, ...] = ()
    pool: Pool | None = None

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(d for node in self.nodes for d in node.devices)
