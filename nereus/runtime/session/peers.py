"""Second copies of what only one process holds, in a peer's host memory: what a loss does not take with it.

Which parts are held by one process alone follows from what all of them hold, so it is known before anything is lost.
Each process has a ward, on another machine where there is one, and keeps its ward's sole parts as they were at one
boundary. They come by a compiled move, verified, into one of two sets of buffers in turn: a loss in the middle of it
leaves the other one whole, and either all processes have the new copy or none has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from nereus.ir.fragment import Fragment, RankState
from nereus.ir.plan import Plan
from nereus.runtime.adapters.base import Adapter, Binding
from nereus.runtime.adapters.safetensors_files import TORCH_DTYPES
from nereus.runtime.executor import ExecutionFailed
from nereus.runtime.faults import WRONG_STATE, Fault
from nereus.runtime.live import ALL, Connections, MoveError, Prepared, prepare_among
from nereus.runtime.session.change import tensors_of
from nereus.runtime.session.members import Member
from nereus.runtime.session.record import Record
from nereus.runtime.session.snapshot import Held


@dataclass(frozen=True, slots=True)
class Mirror:
    """A ward's sole parts at boundary ``version``, by stage."""

    ward: int
    version: int
    stages: dict[str, Held] = field(default_factory=dict)


def wards(members: Sequence[Member]) -> dict[int, int]:
    """Whose parts each process keeps, by number: all move on by as many places as bring most to another machine."""
    count = len(members)
    apart = {
        shift: sum(m.host != members[(at + shift) % count].host for at, m in enumerate(members))
        for shift in range(1, count)
    }
    if not apart:
        return {}
    shift = max(apart, key=lambda s: (apart[s], -s))
    return {members[(at + shift) % count].number: member.number for at, member in enumerate(members)}


def sole(states: Mapping[int, RankState | None]) -> dict[int, tuple[Fragment, ...]]:
    """What of each process nobody else holds, as whole fragments."""
    holders: dict[tuple[object, ...], set[int]] = {}
    for number, state in states.items():
        for f in state.fragments if state is not None else ():
            holders.setdefault(_place(f), set()).add(number)
    return {
        number: tuple(f for f in state.fragments if len(holders[_place(f)]) == 1) if state is not None else ()
        for number, state in states.items()
    }


def _place(f: Fragment) -> tuple[object, ...]:
    return (f.tensor, f.slot, f.row_lo, f.row_hi, f.col_lo, f.col_hi, f.start, f.stop)


class Peers:
    """Of one epoch. ``every``: boundaries from copy to copy, 0 for none; ``mirror``: the newest copy that is whole."""

    def __init__(
        self,
        record: Record,
        *,
        epoch: int,
        every: int,
        deadline_s: float,
        stop: Callable[[], Fault | None],
        transport: str,
    ) -> None:
        self._record, self._epoch, self._every = record, epoch, every
        self._deadline_s, self._stop = deadline_s, stop
        self.mirror: Mirror | None = None
        #: Of the newest copy, in every process.
        self.version: int | None = None
        self._stages: list[str] = []
        self._wards: dict[int, int] = {}
        self._buffers: list[dict[str, Binding]] = []
        self._prepared: dict[tuple[int, str], Prepared] = {}
        self._side = 0  # of the next copy
        self._connections = Connections(stop=stop, kind=transport)

    def due(self, version: int) -> bool:
        return self._every > 0 and (self.version is None or version % self._every == 0)

    def abort(self, reason: str) -> None:
        """From another thread."""
        self._connections.abort(reason)

    def forget(self) -> None:
        """The objects' state is another one than at any boundary before; the next boundary has a copy."""
        self.mirror = self.version = None

    def close(self) -> None:
        self._connections.close()
        self._prepared.clear()
        self._buffers.clear()
        self.mirror = self.version = None

    def copy(self, plan: Plan, members: Sequence[Member], adapters: Mapping[str, Adapter], version: int) -> None:
        """In all processes of the plan, whose objects are those of ``version``. Raises Fault; the copy before stays."""
        me, numbers = self._record.me, [m.number for m in members]
        side = self._side
        key = f"epoch/{self._epoch}/peers"
        if not self._buffers:
            self._lay_out(plan, members, adapters, key)
        states = {name: dict(adapter.job_state()) for name, adapter in adapters.items()}
        self._record.put(f"{key}/{version}/{me}", states)
        if self.version is not None:  # all have come to this boundary, and so are done with the copy before
            self._record.forget(f"{key}/{self.version}/{me}")
            if me == numbers[0]:
                self._record.forget_moves(*(f"{key}/{self.version}/{stage}" for stage in self._stages))
        for stage in self._stages:
            name = f"{key}/{version}/{stage}"
            try:
                prepared = self._prepared.get((side, stage))
                if prepared is None:
                    adapter = adapters.get(stage)
                    prepared = self._prepared[side, stage] = prepare_among(
                        adapter.bind if adapter is not None else None,
                        self._buffers[side].get(stage),
                        tensors_of(plan.model(stage.partition(".")[0])),
                        store=self._record.store,
                        name=name,
                        rank=numbers.index(me),
                        size=len(numbers),
                        drop=(ALL,),
                        check_replicas=False,
                        deadline_s=self._deadline_s,
                        stop=self._stop,
                    )
                prepared.run(self._record.store, name, self._deadline_s, self._connections)
            except MoveError as error:
                raise Fault(WRONG_STATE, f"the copy of {stage}: {error}", where=self._record.where) from None
            except ExecutionFailed as error:
                raise error.fault from None
        self.version = version
        self._side = 1 - side  # not after a failure: what was half written is written again, not what is whole
        if me in self._wards and self._buffers[side]:
            said = self._record.get(f"{key}/{version}/{self._wards[me]}")
            held = {
                stage: Held(binding=binding, job_state=said[stage]) for stage, binding in self._buffers[side].items()
            }
            self.mirror = Mirror(self._wards[me], version, held)

    def _lay_out(self, plan: Plan, members: Sequence[Member], adapters: Mapping[str, Adapter], key: str) -> None:
        """Once an epoch: who holds what, and room for what is held once."""
        me, numbers = self._record.me, [m.number for m in members]
        self._wards = wards(members)
        bound = {name: adapter.bind().state for name, adapter in adapters.items()}
        said = self._record.gather(f"{key}/held", bound, numbers, self._deadline_s, stop=self._stop)
        self._stages = []
        self._buffers = [{}, {}]
        for stage in plan.owners():
            states = {number: held.get(stage.name) for number, held in said.items()}
            alone = sole(states)
            if any(alone.values()):
                self._stages.append(stage.name)
            ward = self._wards.get(me)
            state = states[ward] if ward is not None else None
            if ward is not None and state is not None and alone[ward]:
                for side in self._buffers:
                    side[stage.name] = _room(state, alone[ward])


def _room(state: RankState, fragments: Sequence[Fragment]) -> Binding:
    """Host memory for those fragments, each where it is in its process's storages."""
    used = list(dict.fromkeys(f.storage for f in fragments))
    number = {storage: at for at, storage in enumerate(used)}
    storages = tuple(replace(state.storages[storage], host=True) for storage in used)
    mirrored = RankState(
        rank=state.rank,
        storages=storages,
        fragments=tuple(replace(f, storage=number[f.storage]) for f in fragments),
    )
    return Binding(mirrored, tuple(torch.zeros(s.numel, dtype=TORCH_DTYPES[s.dtype]) for s in storages))
