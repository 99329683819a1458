"""A job's checkpoint, written and read by compiled moves: files are one side of a move, the live objects the other.

    NAME/actor.train-00000-of-00004.safetensors ...   each process's share (``adapters/safetensors_state``)
    NAME/job                                          job states, the loop's state, and what the files are
    NAME/actor.train/.metadata, __0_0.distcp ...      the same as a folder of torch.distributed.checkpoint

Any number of processes may read what any other number wrote, in any layout. The folder appears whole or not at all; an
older one stays until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nereus.ir.fragment import RankState
from nereus.ir.plan import Plan, Stage
from nereus.models.naming.hf import HfNaming
from nereus.runtime.adapters import dcp, dcp_job, dcp_state, safetensors_state
from nereus.runtime.adapters.base import Adapter, Binding
from nereus.runtime.adapters.publish import begin, discard, missing, publish
from nereus.runtime.codec import CodecError, decode, encode
from nereus.runtime.executor import ExecutionFailed
from nereus.runtime.faults import WRONG_AFTER, WRONG_STATE, Fault
from nereus.runtime.live import ALL, Connections, Holding, MoveError, prepare_among
from nereus.runtime.session.change import source_of, tensors_of, united, weights_alone
from nereus.runtime.session.record import Record

_JOB = "job"
_FORMAT = 1

_NOTHING = RankState(rank=0, storages=(), fragments=())

SAFETENSORS, DCP = FORMS = ("safetensors", "dcp")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One checkpoint, as all processes of a plan write or read it together. ``key``: of its entries in the record,
    unique. ``numbers``: the processes; ``stages``: whose state is the job's; ``stop``: why not to wait for them any
    longer. Every method raises the same Fault in all of them."""

    record: Record
    key: str
    numbers: tuple[int, ...]
    plan: Plan
    stages: tuple[Stage, ...]
    adapters: Mapping[str, Adapter]
    deadline_s: float
    stop: Callable[[], Fault | None]
    transport: str

    def save(self, target: Path, loop: Mapping[str, Any], form: str) -> int:
        """Bytes that this process brought to the disk. ``form``: one of ``FORMS``."""
        folder = Path(self._first("folder", lambda: str(begin(target))))
        try:
            saved = {}
            written = 0
            connections = Connections(stop=self.stop, kind=self.transport)
            for stage in self._saved():
                saved[stage], num_bytes = self._save_stage(folder, stage, connections, form)
                written += num_bytes
            connections.close()
            words = encode({"format": _FORMAT, "stages": saved, "loop": dict(loop)})
            self._first("job", lambda: _write(folder / _JOB, words))
            self._first("published", lambda: publish(folder, target))
        except BaseException:
            if self._leads:
                discard(folder)
            raise
        return written

    def load(self, target: Path) -> dict[str, Any] | None:
        """Into the live objects, which are not to be used where this fails; the loop's state, None where torch's own
        ``dcp.save`` wrote the folder."""
        foreign = self._all("form", lambda: dcp_state.is_folder(target) and not (target / _JOB).exists())
        words = self._foreign(target) if foreign else self._all("read", lambda: _read(target))
        connections = Connections(stop=self.stop, kind=self.transport)
        for stage in self.stages:
            source = source_of(stage.name, words["stages"])
            if source is None:
                raise Fault(WRONG_STATE, f"{target} has nothing of {stage.model}", where="job")
            said = words["stages"][source]
            state = dict(said["state"] if source == stage.name else weights_alone(said["state"]))
            adapter = self.adapters.get(stage.name)
            old = self._all(f"{stage.name}/opened", lambda s=source, w=said: self._open(target, s, w))  # type: ignore[misc]

            def prepared(adapter: Adapter | None = adapter, state: dict[str, Any] = state) -> Binding | None:
                if adapter is None:
                    return None
                prepare = getattr(adapter, "prepare", None)
                if prepare is not None and state.get("optimizer"):
                    prepare(state)
                return adapter.bind()

            drop = () if source == stage.name else (ALL,)
            self._move(stage.name, stage.model, old, prepared, connections, drop=drop)
            if adapter is not None:
                self._finish(stage.name, adapter, state)
        connections.close()
        self._all("loaded", lambda: None)
        return dict(words["loop"]) if words["loop"] is not None else None

    def _open(self, target: Path, stage: str, said: Mapping[str, Any]) -> Holding:
        """This process's side of the files of a saved stage. All of safetensors, which have each tensor in one place:
        what moves is read here. A share of torch's chunks."""
        rank, size = self.numbers.index(self.record.me), len(self.numbers)
        if "files" in said:
            paths = [target / name for name in said["files"]]
            safetensors_state.verify(paths, rank, size)
            return safetensors_state.sources(paths)
        folder = target / said["folder"]
        naming = self._naming(stage)
        return dcp_state.sources(folder, naming, rank, size, verify=said["verified"])[1]

    def _foreign(self, target: Path) -> dict[str, Any]:
        """Words like those of a job's own checkpoint for a folder that torch wrote of the one model that is trained."""

        def read() -> dict[str, Any]:
            stages = self._saved()
            if len(stages) > 1:
                raise Fault(WRONG_STATE, f"{target} is a folder of one model; the plan has {', '.join(stages)}")
            holding = dcp.bind(target, self._naming(stages[0]), wanted=_NOTHING)
            state = dcp_job.job_state_of(holding)
            return {"stages": {stages[0]: {"state": state, "folder": ".", "verified": False}}, "loop": None}

        return self._all("read", read)

    def _naming(self, stage: str) -> HfNaming:
        model = self.plan.model(stage.partition(".")[0])
        return HfNaming(arch=model.arch, head=model.head)

    def _saved(self) -> tuple[str, ...]:
        """Of each model the stage that trains it, else its first: the others have its weights from there."""
        found: dict[str, str] = {}
        for stage in self.stages:
            if stage.model not in found or stage.is_train:
                found[stage.model] = stage.name
        return tuple(found.values())

    def _save_stage(self, folder: Path, stage: str, connections: Connections, form: str) -> tuple[dict[str, Any], int]:
        adapter = self.adapters.get(stage)
        model = stage.partition(".")[0]
        rank, size = self.numbers.index(self.record.me), len(self.numbers)
        mine = self._all(
            f"{stage}/bound",
            lambda: (adapter.job_state(), safetensors_state.kinds_of(adapter.bind())) if adapter is not None else None,
        )
        said = self._gather(f"{stage}/kinds", mine)
        held = {number: answer for number, answer in said.items() if answer is not None}
        state = united(f"the job state of {stage}", {number: answer[0] for number, answer in held.items()})
        kinds: dict[tuple[str, str], str] = {}
        for _, found in held.values():
            kinds |= found
        old = adapter.bind() if adapter is not None else None
        if form == DCP:
            return self._save_dcp(folder / stage, stage, old, state, kinds, connections)
        tensors = tensors_of(self.plan.model(model))
        names = [f"{stage}-{number:05d}-of-{size:05d}.safetensors" for number in range(size)]

        def lay_out() -> safetensors_state.Sink:
            own = safetensors_state.shares(kinds, tensors, size)[rank]
            return safetensors_state.Sink.lay_out(folder / names[rank], own, kinds, tensors)

        sink = self._all(f"{stage}/laid out", lay_out)
        self._move(stage, model, old, lambda: sink.binding, connections)
        self._all(f"{stage}/finished", sink.finish)
        return {"state": dict(state), "files": tuple(names)}, sum(entry.num_bytes for entry in sink.entries)

    def _save_dcp(
        self,
        folder: Path,
        stage: str,
        old: Binding | None,
        state: Mapping[str, Any],
        kinds: Mapping[tuple[str, str], str],
        connections: Connections,
    ) -> tuple[dict[str, Any], int]:
        rank, size = self.numbers.index(self.record.me), len(self.numbers)
        naming = self._naming(stage)
        self._first(f"{stage}/folder", folder.mkdir)

        def lay_out() -> dcp_state.Sink:
            own = dcp_state.shares(dcp_state.parameters(naming, kinds), size)[rank]
            return dcp_state.Sink.lay_out(folder, rank, own)

        sink = self._all(f"{stage}/laid out", lay_out)
        self._move(stage, stage.partition(".")[0], old, lambda: sink.binding, connections)
        said = self._gather(f"{stage}/stored", self._all(f"{stage}/finished", sink.finish))
        stored = [one for number in self.numbers for one in said[number]]
        entries = dcp_job.entries_of(state, naming) if dcp_job.has_entries(state) else {}
        self._first(f"{stage}/metadata", lambda: dcp_state.write_metadata(folder, stored, entries))
        num_bytes = sum(data.numel() * data.element_size() for data in sink.binding.memory)
        return {"state": dict(state), "folder": folder.name, "verified": True}, num_bytes

    def _move(
        self,
        stage: str,
        model: str,
        old: Holding,
        new: Callable[[], Binding | None],
        connections: Connections,
        *,
        drop: tuple[str, ...] = (),
    ) -> None:
        name = f"{self.key}/{stage}"
        try:
            move = prepare_among(
                old,
                new,
                tensors_of(self.plan.model(model)),
                store=self.record.store,
                name=name,
                rank=self.numbers.index(self.record.me),
                size=len(self.numbers),
                drop=drop,
                check_replicas=drop == () and not _is_file(old),
                model=model,
                deadline_s=self.deadline_s,
                stop=self.stop,
            )
            move.run(self.record.store, name, self.deadline_s, connections)
        except MoveError as error:
            raise Fault(WRONG_STATE, f"{stage}: {error}", where="job") from None
        except ExecutionFailed as error:
            raise error.fault from None

    def _finish(self, stage: str, adapter: Adapter, state: dict[str, Any]) -> None:
        adapter.finish(state)
        for condition in adapter.checklist():
            if (wrong := condition.check()) is not None:
                raise Fault(WRONG_AFTER, f"{stage}: {condition.name}: {wrong}", where=self.record.where)

    # -- together ------------------------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self.record.me == self.numbers[0]

    def _gather(self, phase: str, value: object) -> dict[int, Any]:
        said = self.record.gather(f"{self.key}/{phase}", (value,), self.numbers, self.deadline_s, stop=self.stop)
        return {number: answer for number, (answer,) in said.items()}

    def _all(self, phase: str, work: Callable[[], T]) -> T:
        """``work`` in all processes; where it fails in one, its fault in all."""
        value: T | None = None
        problem = ""
        try:
            value = work()
        except Exception as error:
            problem = Fault.of(error, self.record.where).encode()
        for answer in self._gather(phase, problem).values():
            if answer:
                raise Fault.decode(answer)
        return value  # type: ignore[return-value]

    def _first(self, phase: str, work: Callable[[], object]) -> Any:
        """``work`` in the leading process; what it gave, in all."""
        value = self._all(phase, lambda: work() if self._leads else None)
        return self._gather(f"{phase}/value", value)[self.numbers[0]]


def _is_file(old: Holding) -> bool:
    if isinstance(old, Sequence):
        return True
    return not isinstance(old, Binding) or all(storage.host for storage in old.state.storages)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(target: Path) -> dict[str, Any]:
    try:
        words: dict[str, Any] = decode((target / _JOB).read_bytes())
    except FileNotFoundError:
        text = f"{target}: no file {_JOB}: not a job's checkpoint" if target.is_dir() else missing(target)
        raise Fault(WRONG_STATE, text) from None
    except CodecError as error:
        raise Fault(WRONG_STATE, f"{target / _JOB}: {error}") from None
    if not isinstance(words, dict) or words.get("format") != _FORMAT:
        raise Fault(WRONG_STATE, f"{target} was written in another format")
    return words
