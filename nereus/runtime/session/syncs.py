"""Weight syncs of one epoch: a stage's weights into another's objects, compiled once and run again from then on.

Only the processes of the two stages take part, or of some replicas of the second: whatever else there is, engines of
other models and other replicas included, goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nereus.ir.layout import layout_of
from nereus.ir.plan import Plan
from nereus.ir.tensor import LogicalTensor
from nereus.runtime.adapters.base import Adapter
from nereus.runtime.executor import ExecutionFailed
from nereus.runtime.faults import WRONG_STATE, Fault
from nereus.runtime.live import ALL, Connections, MoveError, Prepared, prepare_among
from nereus.runtime.session.members import Member
from nereus.runtime.session.record import Record


@dataclass(frozen=True, slots=True)
class Sync:
    """From one stage to another; ``replicas``: those of its data-parallel ranks that get the weights, () for all."""

    source: str
    target: str
    replicas: tuple[int, ...]

    def key(self) -> str:
        return f"{self.source}-{self.target}-{'-'.join(map(str, self.replicas)) or 'all'}"

    def members(self, plan: Plan, members: Iterable[Member], parts: Mapping[str, str]) -> tuple[int, ...]:
        """Numbers of the processes that take part. ValueError where the plan has no such stage or replica."""
        found: set[int] = set()
        for name, replicas in ((self.source, ()), (self.target, self.replicas)):
            stage = plan.find_stage(name)
            if stage is None:
                raise ValueError(f"the plan has no stage {name}")
            if wrong := [replica for replica in replicas if not 0 <= replica < stage.dp]:
                raise ValueError(f"{name} has {stage.dp} replicas, and no number {wrong[0]}")
            ranks = layout_of(stage).coordinates()["dp"]
            devices = {
                device
                for device, replica in zip(stage.ranks, ranks, strict=True)
                if not replicas or int(replica) in replicas
            }
            part = parts.get(name, "")
            found |= {m.number for m in members if m.device in devices and m.seat.part == part}
        return tuple(sorted(found))


class Syncs:
    """``epoch``: the current one; ``stop``: why not to wait for others any longer."""

    def __init__(
        self,
        record: Record,
        *,
        epoch: int,
        deadline_s: float,
        stop: Callable[[], Fault | None],
        transport: str,
    ) -> None:
        self._record, self._epoch, self._deadline_s, self._stop = record, epoch, deadline_s, stop
        self._transport = transport
        self._prepared: dict[Sync, Prepared] = {}
        self._connections: dict[tuple[int, ...], Connections] = {}  # by who takes part
        self._counts: dict[Sync, int] = {}

    def abort(self, reason: str) -> None:
        """From another thread: whatever a sync waits for ends at once."""
        for connections in list(self._connections.values()):
            connections.abort(reason)

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()
        self._connections.clear()
        self._prepared.clear()

    def waits(self, sync: Sync) -> bool:
        """Whether a process that has the weights waits in the next ``run`` of it."""
        return self._record.has(f"{self._name(sync, self._counts.get(sync, 0) + 1)}/asked")

    def run(
        self,
        sync: Sync,
        old: Adapter | None,
        new: Adapter | None,
        tensors: Sequence[LogicalTensor],
        numbers: Sequence[int],
    ) -> int:
        """In all processes of ``numbers``; bytes that arrived here. Raises Fault."""
        count = self._counts[sync] = self._counts.get(sync, 0) + 1
        name = self._name(sync, count)
        if old is not None:
            self._record.put(f"{name}/asked", True)
        try:
            prepared = self._prepared.get(sync)
            if prepared is None:
                prepared = self._prepared[sync] = prepare_among(
                    old.bind if old is not None else None,
                    new.bind if new is not None else None,
                    tensors,
                    store=self._record.store,
                    name=name,
                    rank=numbers.index(self._record.me),
                    size=len(numbers),
                    drop=(ALL,),
                    deadline_s=self._deadline_s,
                    stop=self._stop,
                )
            connections = self._connections.get(tuple(numbers))
            if connections is None:
                connections = Connections(stop=self._stop, kind=self._transport)
                self._connections[tuple(numbers)] = connections
            num_bytes = prepared.run(self._record.store, name, self._deadline_s, connections).received_bytes
            if count > 1 and self._record.me == numbers[0]:  # all have come to this one
                before = self._name(sync, count - 1)
                self._record.forget(f"{before}/asked")
                self._record.forget_moves(before)
            return num_bytes
        except MoveError as error:
            raise Fault(WRONG_STATE, f"{sync.source} to {sync.target}: {error}", where=self._record.where) from None
        except ExecutionFailed as error:
            raise error.fault from None

    def _name(self, sync: Sync, count: int) -> str:
        return f"epoch/{self._epoch}/sync/{sync.key()}/{count}"
