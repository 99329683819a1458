"""A compiled transition as a job of the simulator: what its participants do, in the only order that the schedule fixes.

Time 0 is when preparation beside training starts; the stop begins with the first ``quiesce``. Operations:

- per device, engine starts and processes that run beside training, one after the other;
- ``quiesce`` of every device of the old plan, which gives it up; all of them follow the preparation;
- set-up that had to wait for that, one after the other on a device; a stage's groups follow its processes, and in
  reversible mode are built beside the transfer;
- ``ready``: all agree on the digest. Then every device acquires its staging;
- per device and wave a ``post`` that acquires the wave's storages. It follows the device's post of the wave before and
  every message of that wave which the device sends or receives: a rank posts wave k + 1 when its part of wave k is
  complete. Nothing else orders messages;
- per wave and pair of places a ``message``: all slices that travel there then. It is over when it is verified;
- tight mode: after a wave that releases, all agree that it was verified; then the releases; then the next posts. What
  leaves a node's host memory is the node's after the next agreement;
- ``commit``, the release of old storages (reversible mode) and staging, ``retire`` of processes that are gone;
- ``resume`` of every device of the new plan, which takes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.columns import runs
from nereus.ir.schedule import StorageKey
from nereus.models.priors import MESSAGE_S, commit_s
from nereus.passes.compiled import Transition
from nereus.passes.lifecycle import LifecycleOp
from nereus.sim.job import PORTS_PER_OP, FloatArray, IntArray, Job
from nereus.sim.network import Network
from nereus.sim.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds before byte one of a message, of an agreement of all, and of a post."""

    message_s: float = MESSAGE_S
    agree_s: float = MESSAGE_S
    post_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TransitionJob:
    """``rows``: every slice of every move as (move, slice, operation). ``quiesce`` and ``resume``: operations of
    devices. ``acquires`` and ``releases``: operation of every storage, tight mode only."""

    job: Job
    rows: IntArray
    first_quiesce: int
    ready: int
    commit: int
    resume: tuple[int, ...]
    acquires: dict[StorageKey, int] = field(repr=False)
    releases: dict[StorageKey, int] = field(repr=False)

    def stopped_s(self, outcome: Outcome) -> float:
        """Seconds from the stop of training to its resumption; NaN where it never resumes."""
        return float(outcome.finish_s[list(self.resume)].max() - outcome.ready_s[self.first_quiesce])

    def transfer_s(self, outcome: Outcome) -> float:
        """Seconds from the agreement on the digest to the end of the last message; 0 where nothing moves."""
        if not len(self.rows):
            return 0.0
        return float(outcome.finish_s[self.rows[:, 2]].max() - outcome.finish_s[self.ready])


def job_of(transition: Transition, costs: Costs | None = None) -> TransitionJob:
    """About as many operations as the programs have messages and (device, wave) pairs."""
    return _Builder(transition, costs or Costs()).build()


def expand(transition: Transition) -> tuple[IntArray, IntArray]:
    """(rows ``[n, 3]`` of move, slice, wave; bytes of each)."""
    schedule = transition.schedule
    moves, slices = schedule.moves, schedule.slices
    move, part = runs(slices)
    wave = schedule.wave[move] + part
    numel, count = moves.numel[move], slices[move]
    size = (numel * (part + 1) // count - numel * part // count) * moves.width[move]
    return np.stack((move, part, wave), axis=1).reshape(-1, 3).astype(np.int64), size.astype(np.int64)


class _Builder:
    def __init__(self, transition: Transition, costs: Costs) -> None:
        self.transition, self.costs = transition, costs
        self.topology = transition.topology
        self.num_devices = transition.topology.num_devices
        self.names: list[str] = []
        self.fixed: list[float] = []
        self.columns: list[tuple[int, int, int, int, int]] = []  # space, acquired, released, takes, gives
        self.edges: list[tuple[int, int]] = []
        self.where = [str(device) for device in transition.topology.devices]

    def op(
        self,
        name: str,
        *,
        fixed_s: float = 0.0,
        space: int = -1,
        acquired: int = 0,
        released: int = 0,
        takes: int = -1,
        gives: int = -1,
        after: Iterable[int] = (),
    ) -> int:
        number = len(self.names)
        self.names.append(name)
        self.fixed.append(fixed_s)
        self.columns.append((space if acquired or released else -1, acquired, released, takes, gives))
        self.edges += [(before, number) for before in after]
        return number

    def build(self) -> TransitionJob:
        transition, costs = self.transition, self.costs
        old_devices, new_devices = self._owned()
        setup_ends, first_quiesce, groups = self._set_up(old_devices)
        ready = self.op("ready", fixed_s=costs.agree_s, after=setup_ends)
        memory = transition.memory
        staged = [
            self.op(f"stage {self.where[d]}", space=d, acquired=int(memory.staging[d]), after=(ready,))
            for d in np.flatnonzero(memory.staging).tolist()
        ]
        started = self.op("start", after=(ready, *staged))
        transfer = _Transfer(self, started)
        ends = transfer.build()
        commit = self.op("commit", fixed_s=commit_s(len(new_devices)), after=(*ends, *groups))
        resume = self._after_commit(commit, new_devices)
        return TransitionJob(
            job=self._job(transfer, old_devices),
            rows=transfer.rows,
            first_quiesce=first_quiesce,
            ready=ready,
            commit=commit,
            resume=resume,
            acquires=transfer.acquires,
            releases=transfer.releases,
        )

    def _owned(self) -> tuple[list[int], list[int]]:
        """Living devices on which the old plan runs, and those of the new one."""
        index, topology = self.topology.index(), self.topology
        found = []
        for plan in (self.transition.old, self.transition.new):
            devices = {index[d] for stage in plan.owners() for d in stage.ranks}
            found.append(sorted(d for d in devices if topology.alive[int(topology.node_of[d])]))
        return found[0], found[1]

    def _set_up(self, old_devices: list[int]) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """(operations that must be over before all are ready, the first quiesce, communicators that are set up beside
        the transfer: in reversible mode, where the old plan is still whole should they fail)."""
        ops = [op for op in self.transition.life.ops if op.kind != "retire"]
        last: dict[int, int] = {}
        for life in ops:
            if life.background:
                self._run(life, last, ())
        boundary = self.op("boundary", after=tuple(last.values()))
        drain_s = self.transition.certificate.drain_s
        quiesce = [
            self.op(f"quiesce {self.where[d]}", fixed_s=drain_s, gives=d, after=(boundary,)) for d in old_devices
        ]
        quiesced = self.op("quiesced", after=quiesce or (boundary,))
        last = dict.fromkeys(last, quiesced)
        processes: dict[str, list[int]] = {}
        for life in ops:
            if not life.background and life.kind != "build-groups":
                processes.setdefault(life.stage, []).extend(self._run(life, last, (quiesced,)))
        started = tuple(dict.fromkeys(last.values()))
        groups: list[int] = []
        for life in ops:
            if life.kind == "build-groups":
                there = self.op(f"processes of {life.stage}", after=(quiesced, *processes.get(life.stage, ())))
                groups += self._run(life, last, (there,))
        first = quiesce[0] if quiesce else quiesced
        if self.transition.schedule.mode == "tight":
            return (quiesced, *started, *groups), first, ()
        return (quiesced, *started), first, tuple(groups)

    def _run(self, life: LifecycleOp, last: dict[int, int], after: tuple[int, ...]) -> list[int]:
        """One operation a device; those of a device follow each other."""
        found = []
        for device, running, stays in zip(life.devices, life.running_bytes, life.after_bytes, strict=True):
            before = {*after, last[device]} if device in last else set(after)
            last[device] = self.op(
                f"{life.kind} {life.stage} {self.where[device]}",
                fixed_s=life.seconds,
                space=device,
                acquired=running,
                released=running - stays,
                after=sorted(before),
            )
            found.append(last[device])
        return found

    def _after_commit(self, commit: int, new_devices: list[int]) -> tuple[int, ...]:
        transition = self.transition
        memory, life = transition.memory, transition.life
        lasting = np.zeros(self.num_devices, dtype=np.int64)
        for op in life.ops:
            for device, stays in zip(op.devices, op.after_bytes, strict=True):
                lasting[device] += stays
        surplus = np.array(life.before_bytes, dtype=np.int64) + lasting - np.array(life.after_bytes, dtype=np.int64)
        old = memory.state.old if transition.schedule.mode == "reversible" else np.zeros_like(memory.state.old)
        released = old.copy()
        released[: self.num_devices] += memory.staging
        before: dict[int, int] = {}
        for space in np.flatnonzero(released).tolist():
            name = f"release {self.space_name(space)}"
            before[space] = self.op(name, space=space, released=int(released[space]), after=(commit,))
        for device in np.flatnonzero(surplus).tolist():
            change = int(surplus[device])
            before[device] = self.op(
                f"{'retire' if change > 0 else 'wake'} {self.where[device]}",
                space=device,
                acquired=max(-change, 0),
                released=max(change, 0),
                after=(before.get(device, commit),),
            )
        done = self.op("released", after=(commit, *before.values()))
        return tuple(self.op(f"resume {self.where[d]}", takes=d, after=(done,)) for d in new_devices) or (done,)

    def space_name(self, space: int) -> str:
        if space < self.num_devices:
            return self.where[space]
        return f"{self.topology.nodes[space - self.num_devices].name}.host"

    def _job(self, transfer: _Transfer, old_devices: list[int]) -> Job:
        memory = self.transition.memory
        network = Network(self.topology)
        base = memory.state.kept + memory.state.old
        base[: self.num_devices] += np.array(self.transition.life.before_bytes, dtype=np.int64)
        table = np.array(self.columns, dtype=np.int64).reshape(-1, 5)
        num_ops = len(table)
        num_bytes = np.zeros(num_ops, dtype=np.int64)
        ports = np.full((num_ops, PORTS_PER_OP), -1, dtype=np.int64)
        weights: FloatArray = np.ones((num_ops, PORTS_PER_OP))
        if len(transfer.messages):
            num_bytes[transfer.messages] = transfer.sizes
            ports[transfer.messages], weights[transfer.messages] = network.ports(transfer.src, transfer.dst)
        edges = np.array(self.edges, dtype=np.int64).reshape(-1, 2)
        return Job(
            resources=network.resources(base, memory.capacity, tuple(old_devices)),
            name=tuple(self.names),
            fixed_s=np.array(self.fixed, dtype=np.float64),
            num_bytes=num_bytes,
            ports=ports,
            weights=weights,
            space=table[:, 0],
            acquired=table[:, 1],
            released=table[:, 2],
            takes=table[:, 3],
            gives=table[:, 4],
            edges=np.concatenate((edges, *transfer.message_edges)),
        )


class _Transfer:
    """Posts, messages, agreements and releases, wave by wave."""

    def __init__(self, build: _Builder, started: int) -> None:
        self.builder, self.started = build, started
        transition = build.transition
        self.schedule, self.num_devices = transition.schedule, build.num_devices
        self.node_of = np.asarray(transition.topology.node_of, dtype=np.int64)
        parts, sizes = expand(transition)
        places = np.stack((self.schedule.moves.src, self.schedule.moves.dst), axis=1)
        keys = np.column_stack((parts[:, 2], places[parts[:, 0]]))  # (wave, src, dst)
        pairs, group = np.unique(keys, axis=0, return_inverse=True) if len(keys) else (keys, keys[:, 0])
        self.wave, self.src, self.dst = pairs[:, 0], pairs[:, 1], pairs[:, 2]
        self.sizes = np.bincount(group.reshape(-1), weights=sizes, minlength=len(pairs)).astype(np.int64)
        self.group = group.reshape(-1)
        self.parts = parts
        self.messages = np.zeros(len(pairs), dtype=np.int64)
        self.message_edges: list[IntArray] = []
        self.acquires: dict[StorageKey, int] = {}
        self.releases: dict[StorageKey, int] = {}
        self.last: dict[int, list[int]] = {}  # device, or space of host memory -> what its next post follows

    @property
    def rows(self) -> IntArray:
        return np.column_stack((self.parts[:, :2], self.messages[self.group]))

    def build(self) -> list[int]:
        """Returns what the commit follows."""
        acquires, releases = self._storages()
        waves = sorted({*self.wave.tolist(), *acquires, *releases})
        bounds = np.searchsorted(self.wave, [*waves, waves[-1] + 1 if waves else 0])
        everything = [self.started]
        host_post: dict[int, int] = {}
        for at, wave in enumerate(waves):
            posted = self._post(wave, range(int(bounds[at]), int(bounds[at + 1])), acquires.get(wave, {}), host_post)
            everything += posted
            if wave in releases:
                everything = self._release(wave, everything, releases[wave])
        return everything

    def _post(
        self, wave: int, messages: range, acquired: dict[int, list[StorageKey] | int], host_post: dict[int, int]
    ) -> list[int]:
        build, devices = self.builder, self.num_devices
        chosen = slice(messages.start, messages.stop)
        src, dst = self.src[chosen], self.dst[chosen]
        ranks = np.union1d(src % devices, dst % devices).tolist()
        spaces = sorted({*ranks, *acquired})
        posts = {}
        for space in spaces:
            what = acquired.get(space, 0)
            size = what if isinstance(what, int) else sum(self._bytes(key, new=True) for key in what)
            posts[space] = build.op(
                f"post {build.space_name(space)} wave {wave}",
                fixed_s=build.costs.post_s,
                space=space,
                acquired=size,
                after=self.last.get(space, [self.started]),
            )
            if not isinstance(what, int):
                self.acquires.update(dict.fromkeys(what, posts[space]))
            if space >= devices:
                host_post[space] = posts[space]
            self.last[space] = [posts[space]]
        found = list(posts.values())
        for number, a, b in zip(messages, src.tolist(), dst.tolist(), strict=True):
            before = {posts[a % devices], posts[b % devices]}
            host = devices + int(self.node_of[b % devices])
            if b >= devices and host in host_post:
                before.add(host_post[host])
            message = build.op(
                f"message {self._place(a)} -> {self._place(b)} wave {wave}",
                fixed_s=build.costs.message_s,
                after=sorted(before),
            )
            self.messages[number] = message
            for rank in {a % devices, b % devices}:
                self.last[rank].append(message)
            found.append(message)
        return found

    def _release(self, wave: int, everything: list[int], keys: dict[int, list[StorageKey]]) -> list[int]:
        """All agree that everything so far was verified, then release. Returns what the commit follows from here."""
        build = self.builder
        agreed = build.op(f"agree on wave {wave}", fixed_s=build.costs.agree_s, after=everything)
        done = []
        waiting = {space: [agreed] for space in self.last}
        for space in sorted(keys):
            size = sum(self._bytes(key, new=False) for key in keys[space])
            op = build.op(f"release {build.space_name(space)} wave {wave}", space=space, released=size, after=(agreed,))
            self.releases.update(dict.fromkeys(keys[space], op))
            waiting[space] = [op]
            done.append(op)
        self.last = {**{device: [agreed] for device in range(self.num_devices)}, **waiting}
        for space in range(self.num_devices, self.num_devices + len(self.builder.topology.nodes)):
            self.last.setdefault(space, [agreed])
        return [agreed, *done]

    def _storages(self) -> tuple[dict[int, dict[int, list[StorageKey] | int]], dict[int, dict[int, list[StorageKey]]]]:
        """wave -> space -> storages (tight mode) or bytes."""
        acquires: dict[int, dict[int, list[StorageKey] | int]] = {}
        releases: dict[int, dict[int, list[StorageKey]]] = {}
        if self.schedule.mode != "tight":
            new = self.builder.transition.memory.state.new
            spaces = np.flatnonzero(new).tolist()
            if spaces:
                acquires[0] = {space: int(new[space]) for space in spaces}
            return acquires, releases
        for waves, new_side in ((self.schedule.acquire, True), (self.schedule.release, False)):
            for key, wave in waves.items():
                space = self._space_of(key, new=new_side)
                if new_side:
                    entry = acquires.setdefault(wave, {}).setdefault(space, [])
                    assert isinstance(entry, list)
                else:
                    entry = releases.setdefault(wave, {}).setdefault(space, [])
                entry.append(key)
        return acquires, releases

    def _slot(self, key: StorageKey, new: bool) -> tuple[bool, int]:
        """(in host memory, bytes per element)."""
        device, stage, name, tensor = key
        storages = self.builder.transition.storages
        shares = (storages.new if new else storages.old)[stage]
        slot = shares.state_set.slot(name)
        assert slot is not None
        return shares.in_host(device, name, tensor), slot.element_bytes

    def _space_of(self, key: StorageKey, new: bool) -> int:
        return self.num_devices + int(self.node_of[key[0]]) if self._slot(key, new)[0] else key[0]

    def _bytes(self, key: StorageKey, new: bool) -> int:
        fit = self.builder.transition.storages.fit(key[1], key[2], key[0])
        return int((fit.new if new else fit.old)[key[3]]) * self._slot(key, new)[1]

    def _place(self, place: int) -> str:
        return self.builder.where[place % self.num_devices] + (".host" if place >= self.num_devices else "")
