"""Model blocks -> ``Model``: presets, ``hf("config.json")``, models declared from other models, written-out shapes."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from types import UnionType
from typing import Any

from nereus.ir.arch import Arch, Mla, Moe
from nereus.ir.diagnostic import Span
from nereus.ir.plan import Model
from nereus.lang import schema
from nereus.lang.load import ReadError, read_source
from nereus.lang.merge import Entry, Merged, Section, entries_of
from nereus.lang.resolve_lora import read_lora
from nereus.lang.sink import Sink, show, suggestion
from nereus.lang.syntax import Block, Body, Call, Setting, Text, Value, Word
from nereus.lang.values import Reader, describe
from nereus.models.hf import arch_from_config
from nereus.models.presets import preset, preset_names

#: Above these a configuration is a mistake, and counting its tensors would take for ever.
MAX_LAYERS, MAX_EXPERTS, MAX_EXTENT = 2_000, 4_096, 2**26


class ModelResolver:
    """``models`` holds what could be resolved; ``known`` says which names were declared, resolved or not."""

    def __init__(self, merged: Merged, sink: Sink, folders: Mapping[str, str]) -> None:
        """``folders``: where relative paths start, for files (by path) whose own folder it is not."""
        self._folders = folders
        self._sections = merged.models
        self._sink = sink
        self._reader = Reader(sink)
        self._done: dict[str, Model | None] = {}
        self.broken = merged.broken
        for name in self._sections:
            self._resolve(name, ())
        order = [m for name in self._sections if (m := self._done[name]) is not None]
        self.models: tuple[Model, ...] = tuple(order)

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(self._sections)

    def find(self, name: str) -> Model | None:
        return self._done.get(name)

    def _resolve(self, name: str, users: tuple[str, ...]) -> Model | None:
        if name in self._done:
            return self._done[name]
        section = self._sections[name]
        if name in users:
            circle = " = ".join([*users[users.index(name) :], name])
            assert section.value is not None
            self._sink.error("NRS2024", f"model {name} is declared from itself", section.value.span, notes=(circle,))
            self._done[name] = None
            return None
        model = self._model(section, (*users, name))
        # A circle may have settled it meanwhile.
        self._done.setdefault(name, model)
        return self._done[name]

    def _model(self, section: Section, users: tuple[str, ...]) -> Model | None:
        shape = section.blocks.get("arch")
        base: Model | None = None
        arch: Arch | None = None
        source = ""
        match section.value:
            case None:
                if not section.broken:
                    help_text = f'write model {section.name} = "llama-3.1-8b"'
                    headline = f"model {section.name} says no architecture"
                    self._sink.error("NRS2019", headline, section.head, help=help_text)
            case Text(value=name):
                source = name
                arch = None if shape is not None else self._preset(name, section.value.span)
            case Word(text=name):
                base = self._base(name, section.value.span, users)
                if base is not None:
                    arch, source = base.arch, base.source
            case Call(name="hf", args=(Text(value=path),)):
                source = path
                arch = None if shape is not None else self._config(path, section.value)
            case other:
                self._wrong_value(section, other)
        if shape is not None and shape.body is not None:
            arch = self._shape(Arch, shape.body, f"arch of model {section.name}", shape.keyword.span, section)
        head = self._enum(section, "head", schema.HEADS, "lm" if base is None else base.head)
        precision = self._enum(section, "precision", schema.WEIGHT_DTYPES, "bf16" if base is None else base.precision)
        entry = section.entries.get("frozen")
        frozen = (base is not None and base.frozen) if entry is None else self._reader.boolean(entry)
        lora = read_lora(section, arch, None if base is None else base.lora, self._sink)
        if arch is None or head is None:
            return None
        return Model(
            name=section.name,
            arch=arch,
            source=source,
            head=head,
            frozen=bool(frozen),
            base=None if base is None else base.name,
            precision=precision or "bf16",
            lora=lora,
            span=section.head,
        )

    def _enum(self, section: Section, key: str, known: tuple[str, ...], default: str) -> str | None:
        entry = section.entries.get(key)
        return default if entry is None else self._reader.enum(entry, known)

    def _wrong_value(self, section: Section, value: Value) -> None:
        headline = f'model {section.name} wants a preset, hf("config.json") or another model, not {describe(value)}'
        self._sink.error("NRS2008", headline, value.span, "expected a model")

    def _preset(self, name: str, span: Span) -> Arch | None:
        if name in preset_names():
            return preset(name)
        more = suggestion(name, preset_names(), span, quote=True)
        if name.endswith(".json") or "/" in name:
            more = {"help": f'a configuration file is written hf("{show(name)}")'}
        self._sink.error("NRS2004", f'there is no preset "{show(name)}"', span, "unknown preset", **more)
        return None

    def _base(self, name: str, span: Span, users: tuple[str, ...]) -> Model | None:
        if name in self._sections:
            return self._resolve(name, users)
        if not self.broken:
            quoted = name in preset_names()
            more = suggestion(name, preset_names() if quoted else self.known, span, quote=quoted)
            self._sink.error("NRS2003", f"there is no model '{show(name)}'", span, "unknown model", **more)
        return None

    def _config(self, path: str, value: Value) -> Arch | None:
        span = value.span
        folder = self._folders.get(span.source.path, os.path.dirname(span.source.path))
        full = os.path.normpath(os.path.join(folder, path)) if path else ""
        if os.path.isdir(full):
            full = os.path.join(full, "config.json")
        try:
            text = read_source(full).text
        except ReadError as error:
            note = "the path is relative to the plan that names it"
            self._sink.error("NRS2018", str(error), span, "needed by this model", notes=(note,))
            return None
        try:
            config = json.loads(text)
            if not isinstance(config, dict):
                raise ValueError("it holds no JSON object")
            arch = arch_from_config(config)
            _check_sane(arch)
            return arch
        except (ValueError, RecursionError) as error:
            reason = "it nests too deep" if isinstance(error, RecursionError) else show(str(error), 300)
            headline = f"'{show(path)}' cannot be used: {reason}"
            self._sink.error("NRS2018", headline, span, "read from here")
            return None

    # -- written-out shapes (placed plans are self-contained)

    def _shape(self, cls: type[Any], body: Body, where: str, span: Span, section: Section) -> Any | None:
        fields = {f.name: f for f in dataclasses.fields(cls)}
        types = typing.get_type_hints(cls)
        plain = tuple(n for n in fields if not _is_nested(types[n]))
        settings = tuple(item for item in body.items if isinstance(item, Setting))
        small = Body(items=settings, span=body.span)
        entries = entries_of(small, plain, where, section.level, self._sink)
        values: dict[str, Any] = {}
        good = len(entries) == len(settings)
        for name, entry in entries.items():
            value = self._field(entry, types[name])
            good &= value is not None
            values[name] = None if value == "none" and types[name] is not str else value
        for item in body.items:
            if isinstance(item, Setting):
                continue
            nested = {"moe": Moe, "mla": Mla}.get(item.keyword.text) if isinstance(item, Block) else None
            if not isinstance(item, Block) or nested is None or cls is not Arch or item.body is None:
                self._sink.error("NRS2026", f"{where} has no such block", item.span, "not allowed here")
                good = False
                continue
            inner = self._shape(nested, item.body, f"{item.keyword.text} of {where}", item.keyword.span, section)
            values[item.keyword.text] = inner
            good &= inner is not None
        missing = [n for n in plain if n not in values and fields[n].default is dataclasses.MISSING]
        if missing and not section.broken:
            headline = f"{where} does not say {', '.join(missing)}"
            self._sink.error("NRS2019", headline, span, "incomplete")
        if missing or not good:
            return None
        try:
            shape = cls(**values)
            _check_sane(shape)
            return shape
        except ValueError as error:
            self._sink.error("NRS2018", f"{where} cannot be used: {error}", span)
            return None

    def _field(self, entry: Entry, kind: Any) -> Any | None:
        if kind is bool:
            return self._reader.boolean(entry)
        if kind is str:
            if isinstance(entry.value, Word):
                return entry.value.text
            self._reader.wrong_type(entry, "a word")
            return None
        optional = isinstance(kind, UnionType)
        if optional and isinstance(entry.value, Word) and entry.value.text == "none":
            return "none"
        return self._reader.integer(entry, least=0)


def _is_nested(kind: Any) -> bool:
    options = typing.get_args(kind) or (kind,)
    return any(dataclasses.is_dataclass(o) for o in options)


def _check_sane(arch: Any) -> None:
    """Raises ValueError for extents that no model has."""
    if isinstance(arch, Arch):
        for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(arch, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(arch, name)}")
        if arch.num_layers > MAX_LAYERS:
            raise ValueError(f"{arch.num_layers:,} layers are more than {MAX_LAYERS:,}")
        if arch.num_heads % arch.num_kv_heads:
            raise ValueError(f"{arch.num_kv_heads} kv heads do not divide {arch.num_heads} heads")
        if arch.moe is not None:
            _check_sane(arch.moe)
    if isinstance(arch, Moe):
        if not 1 <= arch.experts_per_token <= arch.num_experts <= MAX_EXPERTS:
            raise ValueError(f"{arch.experts_per_token} of {arch.num_experts} experts per token make no sense")
        if arch.expert_ffn < 1:
            raise ValueError(f"expert_ffn must be positive, not {arch.expert_ffn}")
    for field in dataclasses.fields(arch):
        value = getattr(arch, field.name)
        if isinstance(value, int) and value > MAX_EXTENT:
            raise ValueError(f"{field.name} = {value:,} is more than {MAX_EXTENT:,}")
