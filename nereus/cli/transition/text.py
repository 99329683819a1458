"""A transition for people: a block for each model-stage that changes, then what it costs and why it is safe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from nereus.cli.output import Output, table, wrap
from nereus.cli.transition import facts, words
from nereus.cli.transition.words import glue
from nereus.ir.cluster import Device
from nereus.ir.plan import Stage
from nereus.ir.transition import Certificate
from nereus.ir.units import format_bytes, format_gb, format_seconds
from nereus.lang.ranges import compress_devices, compress_names
from nereus.models.memory import MemoryRow
from nereus.passes.compiled import Transition
from nereus.passes.lower import MARKS, StageChange

_LABEL = 16
#: Classes of GPUs that are shown without ``--detail``.
_WORST = 3
#: What is hidden beside something else is named from here on, seconds; and how far from its bound a stop is said to be.
_BESIDE_S = 0.005
_MARK_STYLES = {
    "=": "dim",
    ">": "cyan",
    "/": "cyan",
    "&": "cyan",
    "+": "green",
    "-": "red",
    "#": "cyan",
    "~": "yellow",
}

#: Findings of the checker in words; others are named as they are.
_SAFE_WORDS = {
    "every element once": "every element once",
    "sources": "only held or verified bytes are read",
    "order": "acyclic",
    "windows": "windows hold",
    "bytes": "bytes add up",
    "memory": "memory holds in every order",
    "lifetimes": "nothing is released before its readers have verified",
    "edges": "every wait is an edge",
}


def transition_text(transition: Transition, out: Output, *, detail: bool) -> str:
    if not facts.differs(transition):
        return "no differences" + ("\n" + "\n".join(_certificate(transition.certificate, out)) if detail else "")
    return "\n".join(_Writer(transition, out, detail=detail).lines())


class _Writer:
    def __init__(self, transition: Transition, out: Output, *, detail: bool) -> None:
        self.transition, self.out, self.detail = transition, out, detail
        self.flows = facts.stage_flows(transition)
        self.choices = {choice.stage: choice for choice in transition.choices}
        self.num_gpus = {n.name: n.num_gpus for n in transition.topology.nodes}
        changed = [change for change in transition.changes if change.changed]
        self.name_width = max((len(change.stage) for change in changed), default=0)
        self.mark_width = max((len(change.marks) for change in changed), default=1) * 2 - 1

    def lines(self) -> Iterator[str]:
        yield f"{self.transition.old.path or 'old'} -> {self.transition.new.path or 'new'}"
        yield from self._plan_changes()
        for change in self.transition.changes:
            if change.changed:
                yield from self._change(change)
        same = [change.stage for change in self.transition.changes if not change.changed]
        if same:
            mark = self.out.style(MARKS["keep"], "dim")
            yield self._wrap(f"{', '.join(same)} unchanged", f"{mark} ", "  ", hidden=len(mark) - 1)
        yield ""
        yield from self._costs()
        if self.detail:
            yield from _certificate(self.transition.certificate, self.out)

    # -- what changes -------------------------------------------------------------------------------------------------

    def _plan_changes(self) -> Iterator[str]:
        parts: dict[str, list[str]] = {}
        for change in facts.plan_changes(self.transition.old, self.transition.new):
            parts.setdefault(change.part, []).append(words.plan_change(change))
        for part, texts in parts.items():
            yield self._entry(part, ", ".join(glue(text) for text in texts))
        for one, other in self.transition.same:
            yield self._entry("stated", f"{one} and {other} hold the same weights now")

    def _change(self, change: StageChange) -> Iterator[str]:
        marks = " ".join(self.out.style(mark, _MARK_STYLES[mark]) for mark in change.marks)
        plain = " ".join(change.marks)
        start = f"{marks}{' ' * (self.mark_width - len(plain))} {change.stage.ljust(self.name_width)}  "
        width = self.mark_width + self.name_width + 3
        hidden = len(start) - width
        follows = facts.follows(self.transition, change)
        if follows is not None:
            settings = words.settings(change)
            yield self._wrap(
                f"with {follows}" + (f"; {settings}" if settings else ""), start, " " * width, hidden=hidden
            )
            return
        yield self._wrap(self._headline(change), start, " " * width, hidden=hidden)
        indent = " " * (self.mark_width + 3)
        for line in self._body(change):
            yield wrap(line, width=self.out.width, indent=indent + "  ", first=indent)

    def _headline(self, change: StageChange) -> str:
        settings = words.settings(change)
        if change.marks == MARKS["retune"]:
            return settings or ", ".join(change.notes)
        text = words.degrees(change)
        place = words.where(change, self.num_gpus)
        if place:
            text += f"    {place}".replace("    ", "\u00a0" * 4, 1)
        if change.old is None:
            return f"new: {text}"
        if change.new is None:
            return f"removed: {text}"
        return text

    def _body(self, change: StageChange) -> Iterator[str]:
        transition = self.transition
        old, new = change.old, change.new
        if old is not None and new is not None and old.with_ != new.with_:
            yield f"processes: {_processes(old)} -> {_processes(new)}"
        words_of = words.primitive_words(change, transition.topology)
        if words_of:
            yield words_of
        settings = words.settings(change)
        if settings and change.marks != MARKS["retune"]:
            yield settings
        if new is not None:
            yield from self._state(change, new)
        for stage, slots in facts.destroyed(transition):
            if stage == change.stage:
                yield f"destroyed for good: {', '.join(slots)}"

    def _state(self, change: StageChange, new: Stage) -> Iterator[str]:
        engines = facts.engines_of(self.transition, new)
        if engines is not None and engines.started:
            text = f"{engines.started:,} of {engines.total:,} engines start anew"
            if engines.in_background:
                text += f", {engines.in_background:,} of them while training goes on"
            if engines.kept:
                text += f"; {engines.kept:,} run on"
            yield text
        elif engines is not None and change.marks != MARKS["retune"]:
            yield f"all {engines.total:,} engines run on"
        flow = self.flows.get(change.stage)
        moves = any(mark not in (MARKS["retune"], MARKS["keep"]) for mark in change.marks)
        if flow is not None and (moves or flow.moved_bytes):
            if flow.kept_bytes or flow.moved_bytes or flow.derived_bytes:
                yield words.flow_words(flow, self.transition.topology)
                stays = words.stays_words(flow)
                if stays:
                    yield stays
            choice = self.choices.get(change.stage)
            reason = words.placement_words(choice) if choice is not None else ""
            if reason:
                yield reason
        fresh = [slot for stage, slot in self.transition.diff.fresh if stage == change.stage]
        if fresh:
            yield f"initialised by the framework, since nothing holds it: {', '.join(fresh)}"
        if change.stage in self.transition.new_holdings.caches and moves:
            trainer = next(
                (s.name for s in self.transition.new.stages if s.model == new.model and s.is_train), "its trainer"
            )
            yield f"no state moves: weights come with the next sync from {trainer}"

    # -- what it costs ------------------------------------------------------------------------------------------------

    def _costs(self) -> Iterator[str]:
        certificate = self.transition.certificate
        if certificate.mode == "none":
            yield self._entry("training stops", "0 s: nothing moves, starts or ends")
        else:
            yield from self._stop(certificate)
            yield from self._memory(certificate)
        yield from _safe(self, certificate)
        yield from self._fits()

    def _stop(self, certificate: Certificate) -> Iterator[str]:
        life = self.transition.life
        engine, spawn = life.seconds("engine-start"), life.seconds("spawn")
        parts = [f"drain {format_seconds(certificate.drain_s)}"]
        if engine or spawn:
            parts.append(
                f"engine start {format_seconds(engine)}" if engine >= spawn else f"spawn {format_seconds(spawn)}"
            )
        parts.append(f"groups {format_seconds(life.seconds('build-groups'))}")
        parts.append(
            f"transfer {format_seconds(certificate.transfer_s)} (bound {format_seconds(certificate.bound_transfer_s)})"
        )
        parts.append(f"verify, commit {format_seconds(certificate.commit_s)}")
        total = format_seconds(certificate.downtime_s)
        alone = certificate.drain_s + certificate.setup_s + certificate.transfer_s + certificate.commit_s
        beside = alone - certificate.downtime_s
        if beside > _BESIDE_S:
            parts[-1] += f" - {format_seconds(beside)} beside each other"
        yield self._entry("training stops", f"{glue(total)} = {' + '.join(glue(part) for part in parts)}")
        if certificate.downtime_s > certificate.bound_downtime_s * (1 + _BESIDE_S):
            bound = format_seconds(certificate.bound_downtime_s)
            yield self._entry("", f"no order of these operations is shorter than {bound}")
        if certificate.drain_s:
            yield self._entry(
                "",
                "drain: responses in flight where engines change are finished first; with inflight = resume or drop, "
                "or with partial rollouts, nothing waits",
            )
        for kind, name in (("engine-start", "engines start"), ("spawn", "processes start")):
            if life.seconds(kind):
                why = facts.no_room(self.transition, kind)
                text = f"{name} inside the stop"
                if why is not None:
                    text += (
                        f": beside training they would need {format_gb(why.need_bytes)} of "
                        f"{format_gb(why.capacity_bytes)} GB on {why.device}"
                    )
                yield self._entry("", text)
        if engine and spawn:
            other = f"spawn {format_seconds(spawn)}" if engine >= spawn else f"engine start {format_seconds(engine)}"
            yield self._entry("", f"at the same time: {other}")
        background = [
            f"{name} {format_seconds(life.seconds(kind, background=True))}"
            for kind, name in (("engine-start", "engine start"), ("spawn", "spawn"))
            if life.seconds(kind, background=True)
        ]
        if background:
            yield self._entry("", f"before the stop, while training goes on: {', '.join(background)}")
        if certificate.moved_bytes:
            yield self._entry("", f"the transfer's bound is {self.transition.bound.limited_by}")

    def _memory(self, certificate: Certificate) -> Iterator[str]:
        peak = f"peak {format_gb(certificate.peak_bytes_max)} of {format_gb(certificate.capacity_bytes)} GB"
        bound = f"bound {format_gb(certificate.bound_peak_bytes_max)}"
        where = f"on {certificate.peak_device} ({certificate.peak_phase})"
        yield self._entry("memory", f"{certificate.mode}: {glue(peak)} {where}, {glue(bound)}")
        if certificate.mode == "tight":
            memory = self.transition.memory
            over = memory.reversible_peak - memory.capacity
            if bool((over > 0).any()):
                space = int(over.argmax())
                need, have = int(memory.reversible_peak[space]), int(memory.capacity[space])
                size = f"{format_gb(need)} of {format_gb(have)} GB"
                yield self._entry("", f"the old plan cannot stay whole: that needs {size} on {self._space(space)}")
            else:
                yield self._entry("", "the old plan could stay whole; tight mode was asked for")
            yield self._entry("", f"no way back after {certificate.point_of_no_return}")
            if certificate.staged_bytes:
                count = len(self.transition.schedule.staged)
                kinds = "1 storage waits" if count == 1 else f"{count:,} storages wait"
                size = format_gb(certificate.staged_bytes)
                yield self._entry("", f"GPUs are full on both sides: {kinds} in host memory on the way, {size} GB")
        classes = facts.peak_classes(self.transition)
        for entry in classes if self.detail else classes[:_WORST]:
            names = (
                _names(entry.devices, self.num_gpus)
                if entry.devices
                else "host memory of " + ", ".join(compress_names(entry.hosts))
            )
            size = f"{format_gb(entry.peak_bytes)} of {format_gb(entry.capacity_bytes)} GB"
            yield self._entry("", f"{glue(size)} {entry.phase}: {names}")
        if not self.detail and len(classes) > _WORST:
            rest = len(classes) - _WORST
            kinds = "1 more kind of memory has" if rest == 1 else f"{rest:,} more kinds of memory have"
            yield self._entry("", f"{kinds} more room (--detail)")

    def _space(self, space: int) -> str:
        topology = self.transition.topology
        if space < topology.num_devices:
            return str(topology.devices[space])
        return f"{topology.nodes[space - topology.num_devices].name}.host"

    def _fits(self) -> Iterator[str]:
        found = facts.fits(self.transition.old, self.transition.new)
        label = f"fits at {_length(found.seq_len)}"
        if found.training:
            yield self._entry(label, ", ".join(_row(row) for row in found.training) + " GB")
            label = ""
        if found.old_misfits is not None:
            name = self.transition.old.path or "the old plan"
            if found.old_misfits:
                rows = ", ".join(_row(row) for row in found.old_misfits)
                yield self._entry(label, f"{name} would not: {rows} GB")
            else:
                yield self._entry(label, f"{name} would fit too")

    def _entry(self, label: str, text: str) -> str:
        return wrap(text, width=self.out.width, indent=" " * (_LABEL + 1), first=label.ljust(_LABEL) + " ")

    def _wrap(self, text: str, start: str, indent: str, *, hidden: int) -> str:
        """``hidden``: characters of ``start`` that take no room (escape codes)."""
        plain = " " * (len(start) - hidden)
        wrapped = wrap(text, width=self.out.width, indent=indent, first=plain)
        return (start + wrapped[len(plain) :]).rstrip()


def _safe(writer: _Writer, certificate: Certificate) -> Iterator[str]:
    if certificate.safe:
        names = [_SAFE_WORDS.get(name, name) for name, _, _ in certificate.checks]
        yield writer._entry("safe", "; ".join(glue(name) for name in names))
    else:
        yield writer._entry(writer.out.style("NOT SAFE", "red"), "the independent check refuses this transition:")
    for name, holds, evidence in certificate.checks:
        if not holds:
            yield writer._entry("", f"fails: {name}: {evidence}")
        elif writer.detail:
            yield writer._entry("", f"{name}: {evidence}")


def _certificate(certificate: Certificate, out: Output) -> Iterator[str]:
    """Every field under its name in JSON. ``checks`` stand with their evidence in the line ``safe``."""
    rows = []
    for entry in fields(certificate):
        value = getattr(certificate, entry.name)
        if entry.name == "checks":
            continue
        if entry.name == "bytes_by_link":
            text = "; ".join(f"{link} {num_bytes:,}" for link, num_bytes in value)
        elif isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, int):
            text = f"{value:,}" + (f"  ({format_bytes(value)})" if "bytes" in entry.name and value >= 1000 else "")
        elif isinstance(value, float):
            text = format_seconds(value) if entry.name.endswith("_s") else f"{value:.6g}"
        else:
            text = "none" if value is None else str(value)
        rows.append((entry.name, text))
    yield ""
    yield from table(("certificate", ""), rows, indent=0)


def _processes(stage: Stage) -> str:
    if stage.service is not None:
        return f"service {stage.service}"
    return "its own" if stage.with_ is None else f"with {stage.with_}"


def _row(row: MemoryRow) -> str:
    return glue(f"{row.stage} {format_gb(row.need_bytes)} of {format_gb(row.capacity_bytes)}")


def _names(devices: tuple[Device, ...], num_gpus: dict[str, int]) -> str:
    return ", ".join(compress_devices(devices, num_gpus))


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
