"""Workload and checkpoint blocks -> ``Workload``, ``Checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.plan import Checkpoint, Workload
from nereus.lang import schema
from nereus.lang.merge import Entry, Merged, Section, entries_of
from nereus.lang.sink import Sink, listing
from nereus.lang.syntax import Word
from nereus.lang.values import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWorkload:
    """``workload`` has defaults in place of what could not be read; ``unread`` names those keys."""

    workload: Workload
    unread: frozenset[str]

    @property
    def with_batch(self) -> Workload | None:
        """The workload if its mini_batch is known."""
        return None if "mini_batch" in self.unread else self.workload

    @property
    def is_async(self) -> bool:
        """False also where the mode is not known."""
        return self.workload.mode == "async" and "mode" not in self.unread


def resolve_workload(merged: Merged, sink: Sink) -> ReadWorkload | None:
    """None where there is none; a mistake in one key leaves the others known."""
    section = merged.workload
    if section is None:
        if not merged.broken:
            help_text = "write workload { algorithm = ppo  prompts = 512  prompt_len = 1024  response_len = 1024 }"
            sink.error("NRS2019", "the plan has no workload block", None, help=help_text)
        return None
    return _Workload(section, sink).resolve()


def resolve_checkpoint(merged: Merged, sink: Sink) -> Checkpoint | None:
    section = merged.checkpoint
    if section is None:
        return None
    reader = Reader(sink)
    path = section.entries.get("path")
    if path is None and not section.broken:
        help_text = 'write path = "ckpt/run"'
        sink.error("NRS2019", "checkpoint says no path", section.head, help=help_text)
    text = None if path is None else reader.text(path)
    format_, every = section.entries.get("format"), section.entries.get("every")
    name = "dcp" if format_ is None else reader.enum(format_, schema.CHECKPOINT_FORMATS)
    steps = 1 if every is None else reader.integer(every, units=schema.STEP_UNITS)
    if text is None or name is None or steps is None:
        return None
    return Checkpoint(path=text, format=name, every=steps)


class _Workload:
    def __init__(self, section: Section, sink: Sink) -> None:
        self._section = section
        self._sink = sink
        self._reader = Reader(sink)
        self._unread: set[str] = set()

    def resolve(self) -> ReadWorkload:
        defaults = Workload()
        entries = self._section.entries
        algorithm = entries.get("algorithm")
        name = None if algorithm is None else self._reader.enum(algorithm, schema.ALGORITHMS)
        mode, staleness, sync_every, partial = self._mode(entries.get("mode"))
        prompts, samples = self._count("prompts", 1), self._count("samples", 1)
        total_known = not self._unread & {"prompts", "samples"}
        mini_batch = self._count("mini_batch", prompts * samples)
        if "mini_batch" not in entries and not total_known:
            self._unread.add("mini_batch")
        prompt_len = self._count("prompt_len", defaults.prompt_len, schema.TOKEN_UNITS)
        response_len = self._count("response_len", defaults.response_len, schema.TOKEN_UNITS)
        max_response = self._count("max_response", 0, schema.TOKEN_UNITS)
        max_tokens = self._count("max_tokens", 0, schema.TOKEN_UNITS)
        lengths_known = not self._unread & {"response_len", "max_response"}
        if lengths_known and max_response and response_len > max_response:
            entry = entries.get("response_len", entries["max_response"])
            headline = f"response_len {response_len} is above max_response {max_response}"
            note = "response_len is the length observed now, max_response the longest that the job promises"
            self._sink.error("NRS3025", headline, entry.span, "observed above promised", notes=(note,))
        if total_known and "mini_batch" not in self._unread:
            self._check_mini_batch(prompts, samples, mini_batch)
        workload = Workload(
            algorithm=name or defaults.algorithm,
            mode=mode,
            staleness=staleness,
            sync_every=sync_every,
            partial=partial,
            prompts=prompts,
            samples=samples,
            mini_batch=mini_batch,
            epochs=self._count("epochs", 1),
            prompt_len=prompt_len,
            response_len=response_len,
            max_response=max_response or None,
            max_tokens=max_tokens or None,
            span=self._section.head,
        )
        return ReadWorkload(workload=workload, unread=frozenset(self._unread))

    def _count(self, key: str, default: int, units: dict[str, int] | None = None) -> int:
        entry = self._section.entries.get(key)
        value = None if entry is None else self._reader.integer(entry, units=units)
        # What could not be parsed may have been this key.
        if value is None and (entry is not None or self._section.broken):
            self._unread.add(key)
        return default if value is None else value

    def _mode(self, entry: Entry | None) -> tuple[str, int, int, bool]:
        if entry is None:
            if self._section.broken:
                self._unread.add("mode")
            return "sync", 0, 1, False
        known = self._reader.enum(entry, schema.MODES, allow_body=True)
        if known is None:
            self._unread.add("mode")
        mode = known or "sync"
        staleness, sync_every, partial = (1 if mode == "async" else 0), 1, False
        if entry.body is None:
            return mode, staleness, sync_every, partial
        if mode == "sync" and isinstance(entry.value, Word) and entry.value.text == "sync":
            headline = "mode = sync takes no block: staleness and the like belong to async"
            self._sink.error("NRS2026", headline, entry.body.span, "remove this block, or write async")
            return mode, staleness, sync_every, partial
        small = entries_of(entry.body, schema.MODE_KEYS, "mode", entry.level, self._sink)
        if "staleness" in small:
            staleness = self._reader.integer(small["staleness"], least=0, units=schema.STEP_UNITS) or 0
        if "sync_every" in small:
            sync_every = self._reader.integer(small["sync_every"], units=schema.UPDATE_UNITS) or 1
        if "partial" in small:
            partial = self._reader.boolean(small["partial"]) or False
        return mode, staleness, sync_every, partial

    def _check_mini_batch(self, prompts: int, samples: int, mini_batch: int) -> None:
        total = prompts * samples
        entry = self._section.entries.get("mini_batch")
        if entry is None or total % mini_batch == 0:
            return
        near = range(max(1, mini_batch // 4), min(total, 4 * mini_batch, mini_batch + 100_000) + 1)
        legal = sorted((d for d in near if total % d == 0), key=lambda d: abs(d - mini_batch))[:6]
        headline = f"mini_batch {mini_batch} does not divide the {total} samples of an RL step"
        notes = (f"{prompts} prompts x {samples} samples = {total}",)
        help_text = f"legal nearby: {listing(sorted(legal), 'or')}" if legal else None
        self._sink.error("NRS3020", headline, entry.span, "does not come out", notes=notes, help=help_text)
        self._unread.add("mini_batch")  # it will change, so it proves nothing about the stages
