"""Jobs built one operation at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nereus.sim.job import FloatArray, IntArray, Job, Resources
from nereus.sim.network import NO_PORTS, Network

#: Source and destination of an operation that moves nothing.
NOWHERE = -2


class JobBuilder:
    """Operations in order; ``src`` and ``dst`` are places."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.fixed_s: list[float] = []
        self.rows: list[tuple[int, ...]] = []  # bytes, src, dst, then columns of the job
        self.edges: list[tuple[int, int]] = []

    def op(
        self,
        name: str,
        after: Iterable[int] = (),
        *,
        fixed_s: float = 0.0,
        num_bytes: int = 0,
        src: int = NOWHERE,
        dst: int = NOWHERE,
        space: int = -1,
        acquired: int = 0,
        released: int = 0,
        takes: int = -1,
        gives: int = -1,
    ) -> int:
        """Number of the new operation, which follows those of ``after``."""
        number = len(self.names)
        self.names.append(name)
        self.fixed_s.append(fixed_s)
        self.rows.append((num_bytes, src, dst, space, acquired, released, takes, gives))
        self.edges += [(before, number) for before in after]
        return number

    def ends(self) -> tuple[IntArray, IntArray]:
        """Source and destination of every operation."""
        table = self._table()
        return table[:, 1], table[:, 2]

    def ports(self, network: Network, chosen: IntArray) -> tuple[IntArray, FloatArray]:
        """Ports and weights of all operations: those of ``chosen`` pass the network's, the others none."""
        src, dst = self.ends()
        ports = np.tile(np.array(NO_PORTS, dtype=np.int64), (len(src), 1))
        weights: FloatArray = np.ones(ports.shape)
        if len(chosen):
            ports[chosen], weights[chosen] = network.ports(src[chosen], dst[chosen])
        return ports, weights

    def job(self, resources: Resources, ports: IntArray, weights: FloatArray, *, blocking: bool) -> Job:
        table = self._table()
        return Job(
            resources=resources,
            name=tuple(self.names),
            fixed_s=np.array(self.fixed_s, dtype=np.float64),
            num_bytes=table[:, 0],
            ports=ports,
            weights=weights,
            space=table[:, 3],
            acquired=table[:, 4],
            released=table[:, 5],
            takes=table[:, 6],
            gives=table[:, 7],
            edges=np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            blocking=blocking,
        )

    def _table(self) -> IntArray:
        return np.array(self.rows, dtype=np.int64).reshape(-1, 8)
