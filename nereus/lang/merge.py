"""From a chain of files to one set of sections: a later file's keys replace a base's, whole values at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nereus.ir.diagnostic import Label, Span
from nereus.lang import schema
from nereus.lang.ranges import MAX_NAMES, RangeError, expand
from nereus.lang.sink import Sink, show, suggestion
from nereus.lang.syntax import Block, Body, Extends, File, Item, Removal, Setting, Value, Word

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key as it stands after the merge; ``level`` numbers the files, base first."""

    name: str
    key: Word
    value: Value
    body: Body | None
    level: int

    @property
    def span(self) -> Span:
        return Span(source=self.key.span.source, start=self.key.span.start, end=self.value.span.end)


@dataclass(slots=True, kw_only=True)
class Section:
    """A block after the merge. ``broken``: part of it could not be parsed, so nothing in it counts as missing."""

    keyword: str
    name: str
    head: Span
    level: int
    value: Value | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)
    broken: bool = False


@dataclass(slots=True, kw_only=True)
class Merged:
    cluster: Section | None = None
    pool: Section | None = None
    workload: Section | None = None
    checkpoint: Section | None = None
    nodes: dict[str, Section] = field(default_factory=dict)
    models: dict[str, Section] = field(default_factory=dict)
    stages: dict[str, Section] = field(default_factory=dict)
    #: Number of each file by its path, base first: what is written later is what the user has edited.
    levels: dict[str, int] = field(default_factory=dict)
    #: Some text of some file was not read.
    broken: bool = False
    #: Some node blocks could not be understood, so nobody knows which nodes there are.
    nodes_broken: bool = False


def merge(files: Sequence[File], sink: Sink, *, complete: bool = True) -> Merged:
    """``files`` base first; ``complete`` is False where a base of them is unknown."""
    merged = Merged(broken=not complete or any(f.skipped for f in files))
    for level, file in enumerate(files):
        merged.levels[file.source.path] = level
        _Merger(merged, file, level, sink, complete=complete).run()
    return merged


def entries_of(body: Body, known: Sequence[str] | None, where: str, level: int, sink: Sink) -> dict[str, Entry]:
    """The settings of a small block such as ``async { ... }``; None ``known`` leaves the keys open."""
    found: dict[str, Entry] = {}
    for item in body.items:
        if not isinstance(item, Setting):
            span = item.keyword.span if isinstance(item, Block) else item.span
            sink.error("NRS2026", f"{where} holds only 'key = value'", span, "not allowed here")
            continue
        name = item.key.text
        if known is not None and name not in known:
            more = suggestion(name, known, item.key.span)
            sink.error("NRS2002", f"{where} has no key '{show(name)}'", item.key.span, "unknown key", **more)
            continue
        if name in found:
            _duplicate_key(name, item.key.span, found[name].key.span, where, sink)
            continue
        found[name] = Entry(name=name, key=item.key, value=item.value, body=item.body, level=level)
    return found


def _duplicate_key(name: str, span: Span, first: Span, where: str, sink: Sink) -> None:
    label = Label(span=first, message="first written here")
    sink.error("NRS2012", f"'{show(name)}' is written twice in {where}", span, "again here", secondary=(label,))


class _Merger:
    """Adds one file. Names that this file has defined so far tell a duplicate from an override."""

    def __init__(self, merged: Merged, file: File, level: int, sink: Sink, *, complete: bool) -> None:
        self._complete = complete
        self._merged = merged
        self._file = file
        self._level = level
        self._sink = sink
        self._defined: dict[tuple[str, str], Span] = {}

    def run(self) -> None:
        for item in self._file.items:
            match item:
                case Setting():
                    self._stray_setting(item)
                case Removal():
                    self._remove(item)
                case Block():
                    self._block(item)
                case Extends():
                    pass  # followed by the loader

    def _stray_setting(self, item: Setting) -> None:
        name = item.key.text
        homes = [
            block
            for block, keys in (
                ("workload", schema.WORKLOAD_KEYS),
                ("stage", schema.ALL_STAGE_KEYS),
                ("cluster", schema.CLUSTER_KEYS),
                ("checkpoint", schema.CHECKPOINT_KEYS),
            )
            if name in keys
        ]
        if name in schema.BLOCKS:
            help_text = f"write {name} {{ ... }}" if name not in ("model", "stage") else f"write {name} NAME ..."
        else:
            help_text = f"'{name}' belongs in a {homes[0]} block" if homes else "put it into a block"
        headline = f"'{show(name)}' stands outside of any block"
        self._sink.error("NRS2026", headline, item.key.span, "no key can stand here", help=help_text)

    def _remove(self, item: Removal) -> None:
        if item.kind.text != "stage":
            headline = f"remove names a stage, not a '{show(item.kind.text)}'"
            help_text = "write remove stage NAME; a lost node is written cluster { remove = NODE }"
            self._sink.error("NRS2025", headline, item.kind.span, "expected 'stage'", help=help_text)
            return
        name = item.name.text
        if name in self._merged.stages:
            del self._merged.stages[name]
            return
        if self._merged.broken:
            return
        more = suggestion(name, tuple(self._merged.stages), item.name.span)
        self._sink.error(
            "NRS2025", f"there is no stage '{show(name)}' to remove", item.name.span, "not defined", **more
        )

    def _block(self, block: Block) -> None:
        keyword = block.keyword.text
        if keyword not in schema.BLOCKS:
            self._unknown_block(block)
            return
        if keyword in ("model", "stage"):
            if block.label is None:
                headline = f"this {keyword} has no name"
                example = "model actor" if keyword == "model" else "stage actor.train"
                self._sink.error("NRS2026", headline, block.keyword.span, "name expected", help=f"write {example} ...")
                return
        elif block.label is not None:
            headline = f"{keyword} takes no name"
            self._sink.error("NRS2026", headline, block.label.span, "remove this name")
        if block.value is not None and keyword != "model":
            self._sink.error("NRS2026", f"{keyword} takes no value", block.value.span, "remove '=' and this value")
        if keyword == "cluster":
            self._cluster(block)
        elif keyword == "model":
            assert block.label is not None
            self._model(block, block.label)
        elif keyword == "stage":
            assert block.label is not None
            section = self._section(self._merged.stages, block, block.label.text)
            self._fill(section, block, schema.ALL_STAGE_KEYS, f"stage {show(section.name)}", ("state", "replicas"))
            self._drop_dp(section)
        elif keyword == "workload":
            self._merged.workload = self._single(self._merged.workload, block)
            self._fill(self._merged.workload, block, schema.WORKLOAD_KEYS, "workload")
        else:
            self._merged.checkpoint = self._single(self._merged.checkpoint, block)
            self._fill(self._merged.checkpoint, block, schema.CHECKPOINT_KEYS, "checkpoint")

    def _unknown_block(self, block: Block) -> None:
        name = block.keyword.text
        if name in ("node", "pool"):
            more: dict[str, object] = {"help": f"{name} belongs in the cluster block"}
        else:
            more = suggestion(name, schema.BLOCKS, block.keyword.span)
        self._sink.error("NRS2001", f"there is no block '{show(name)}'", block.keyword.span, "unknown block", **more)

    def _cluster(self, block: Block) -> None:
        section = self._merged.cluster = self._single(self._merged.cluster, block)
        body = block.body
        if body is None:
            return
        rest: list[Item] = []
        for item in body.items:
            if isinstance(item, Block) and item.keyword.text == "node":
                self._node(item)
            elif isinstance(item, Block) and item.keyword.text == "pool":
                if item.label is not None:
                    self._sink.error("NRS2026", "pool takes no name", item.label.span, "remove this name")
                self._merged.pool = self._single(self._merged.pool, item)
                self._fill(self._merged.pool, item, schema.POOL_KEYS, "pool")
            else:
                rest.append(item)
        self._fill_items(section, rest, schema.CLUSTER_KEYS, "cluster", ())

    def _node(self, block: Block) -> None:
        if block.label is None:
            example = 'node n[0-1] { gpus = 8 x "h100-sxm-80gb" }'
            self._sink.error("NRS2026", "this node has no name", block.keyword.span, help=f"write {example}")
            return
        if block.value is not None:
            self._sink.error("NRS2026", "node takes no value", block.value.span, "remove '=' and this value")
        try:
            names = expand(block.label.text)
        except RangeError as error:
            self._sink.error("NRS2028", str(error), block.label.span, "this range")
            self._merged.nodes_broken = True
            return
        if any(not _NAME.fullmatch(name) for name in names):
            headline = f"'{show(block.label.text)}' cannot name a node"
            label = "letters, digits, '_' and '-' only, a letter first"
            self._sink.error("NRS2026", headline, block.label.span, label)
            self._merged.nodes_broken = True
            return
        doubles = len(names) - len(set(names))
        if doubles:
            headline = f"'{show(block.label.text)}' names {doubles} node(s) twice"
            self._sink.error("NRS2011", headline, block.label.span, "a name stands here more than once")
            return
        if len(self._merged.nodes) + len(names) > MAX_NAMES:
            self._sink.error("NRS2028", f"a cluster has at most {MAX_NAMES:,} nodes", block.label.span)
            return
        taken = next((name for name in names if ("node", name) in self._defined), None)
        if taken is not None:
            label_first = Label(span=self._defined["node", taken], message="first defined here")
            headline = f"node '{taken}' is defined twice"
            self._sink.error("NRS2011", headline, block.label.span, "again here", secondary=(label_first,))
            return
        # All nodes of one block share the settings read once; a later file may override some of the nodes.
        fresh = Section(keyword="node", name=block.label.text, head=self._head(block), level=self._level)
        fresh.broken = self._is_broken(block)
        self._fill(fresh, block, schema.NODE_KEYS, f"node {show(block.label.text)}", unset=True)
        overlays: dict[int, Section] = {}
        for name in names:
            self._defined["node", name] = block.label.span
            old = self._merged.nodes.get(name)
            if id(old) not in overlays:
                overlays[id(old)] = _overlay(old, fresh)
            self._merged.nodes[name] = overlays[id(old)]

    def _model(self, block: Block, label: Word) -> None:
        if not _NAME.fullmatch(label.text):
            headline = f"'{show(label.text)}' cannot name a model"
            label_text = "letters, digits, '_' and '-' only, a letter first"
            self._sink.error("NRS2026", headline, label.span, label_text)
            return
        section = self._section(self._merged.models, block, label.text)
        if block.value is not None:
            section.value = block.value
        self._fill(section, block, schema.MODEL_KEYS, f"model {label.text}", ("lora", "arch"))

    # -- sections

    def _section(self, into: dict[str, Section], block: Block, name: str) -> Section:
        assert block.label is not None
        keyword = block.keyword.text
        first = self._defined.get((keyword, name))
        if first is not None:
            label = Label(span=first, message="first defined here")
            headline = f"{keyword} '{show(name)}' is defined twice"
            self._sink.error("NRS2011", headline, block.label.span, "again here", secondary=(label,))
        self._defined[keyword, name] = block.label.span
        section = into.get(name)
        if section is None:
            section = into[name] = Section(keyword=keyword, name=name, head=self._head(block), level=self._level)
        section.head = self._head(block)
        section.broken |= self._is_broken(block)
        return section

    def _single(self, section: Section | None, block: Block) -> Section:
        keyword = block.keyword.text
        first = self._defined.get((keyword, ""))
        if first is not None:
            label = Label(span=first, message="the first one")
            self._sink.error(
                "NRS2011", f"{keyword} is written twice", block.keyword.span, "again here", secondary=(label,)
            )
        self._defined[keyword, ""] = block.keyword.span
        if section is None:
            section = Section(keyword=keyword, name=keyword, head=self._head(block), level=self._level)
        section.head = self._head(block)
        section.broken |= self._is_broken(block)
        return section

    def _head(self, block: Block) -> Span:
        end = block.label.span.end if block.label is not None else block.keyword.span.end
        return Span(source=block.span.source, start=block.keyword.span.start, end=end)

    def _is_broken(self, block: Block) -> bool:
        if not self._complete:
            return True
        return any(s.start <= block.span.end and block.span.start <= s.end for s in self._file.skipped)

    def _fill(
        self,
        section: Section,
        block: Block,
        known: Sequence[str],
        where: str,
        blocks: Sequence[str] = (),
        *,
        unset: bool = False,
    ) -> None:
        if block.body is not None:
            self._fill_items(section, block.body.items, known, where, blocks, keep_unset=unset)

    def _fill_items(
        self,
        section: Section,
        items: Sequence[Item],
        known: Sequence[str],
        where: str,
        blocks: Sequence[str],
        *,
        keep_unset: bool = False,
    ) -> None:
        here: dict[str, Span] = {}
        for item in items:
            if isinstance(item, Setting):
                word = item.key
            elif isinstance(item, Block):
                word = item.keyword
            else:
                headline = f"{'extends' if isinstance(item, Extends) else 'remove'} cannot stand in a block"
                self._sink.error("NRS2026", headline, item.span, "move this out of the block")
                continue
            name = word.text
            is_unset = isinstance(item, Setting) and isinstance(item.value, Word) and item.value.text == schema.UNSET
            if name not in known:
                more = suggestion(name, known, word.span)
                what = "key" if isinstance(item, Setting) else "block"
                self._sink.error(
                    "NRS2002", f"{where} has no {what} '{show(name)}'", word.span, f"unknown {what}", **more
                )
                continue
            if name in here:
                _duplicate_key(name, word.span, here[name], where, self._sink)
                continue
            here[name] = word.span
            if isinstance(item, Block):
                if name not in blocks:
                    self._sink.error("NRS2026", f"'{name}' is a key, not a block", word.span, f"write {name} = VALUE")
                elif item.label is not None or item.value is not None:
                    self._sink.error("NRS2026", f"{name} takes no name and no value", item.span)
                else:
                    section.blocks[name] = item
                    section.entries.pop(name, None)
                continue
            if name in schema.DROPPABLE_BLOCKS and isinstance(item.value, Word) and item.value.text == "none":
                section.blocks.pop(name, None)
            elif name in blocks and not is_unset:
                label = f"write {name} {{ ... }}" + (f" or {name} = none" if name in schema.DROPPABLE_BLOCKS else "")
                self._sink.error("NRS2026", f"'{name}' is a block", word.span, label)
                continue
            if is_unset and not keep_unset:
                section.entries.pop(name, None)
                section.blocks.pop(name, None)
            else:
                section.entries[name] = Entry(name=name, key=word, value=item.value, body=item.body, level=self._level)
        if section.keyword == "stage" and any(key in here for key in schema.DP_DEPENDS_ON):
            section.level = self._level

    def _drop_dp(self, section: Section) -> None:
        """A dp from an earlier file spoke of the devices and degrees of that file."""
        dp = section.entries.get("dp")
        if dp is not None and dp.level < section.level:
            del section.entries["dp"]


def _overlay(old: Section | None, fresh: Section) -> Section:
    entries = {**({} if old is None else old.entries), **fresh.entries}
    entries = {k: e for k, e in entries.items() if not (isinstance(e.value, Word) and e.value.text == schema.UNSET)}
    return Section(
        keyword="node",
        name=fresh.name,
        head=fresh.head,
        level=fresh.level,
        entries=entries,
        broken=fresh.broken or (old is not None and old.broken),
    )
