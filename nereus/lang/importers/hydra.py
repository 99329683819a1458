"""Hydra settings, flat: ``a.b.c -> value``, from command-line overrides or from a resolved YAML or JSON file.

Every setting keeps the place where it is written. ``${a.b}`` and ``${oc.select:a.b,default}`` are followed; values stay
text until a reader asks for a type, so that a mistake in a key that no plan needs is not ours to report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus.ir.diagnostic import Severity
from nereus.lang.importers.result import Reports
from nereus.lang.importers.shell import Field, Missing

_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)(?:=(.*))?\Z", re.DOTALL)
_MAX_SETTINGS = 20_000
_NULL = frozenset({"null", "none", "~", ""})
_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    key: str
    text: str  # as Hydra reads it, quotes removed
    start: int
    end: int
    missing: tuple[Missing, ...] = ()


@dataclass(slots=True)
class Config:
    """Settings by key, and the defaults of the framework for what is not written."""

    reports: Reports
    settings: dict[str, Setting] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    #: Keys whose written value could not be used: the default stands in, and comments say so.
    unresolved: dict[str, str] = field(default_factory=dict)

    def written(self, key: str) -> bool:
        return key in self.settings

    def find(self, key: str) -> Setting | None:
        """The setting behind ``key``: written, else the framework's default, references followed."""
        seen: set[str] = set()
        while key not in seen and len(seen) < 20:
            seen.add(key)
            setting = self.settings.get(key)
            if setting is None:
                if key not in self.defaults:
                    return None
                setting = Setting(key=key, text=self.defaults[key], start=0, end=0)
            reference = re.fullmatch(r"\$\{(?:oc\.select:)?([^{},:]+)(?:,(.*))?\}", setting.text, re.DOTALL)
            if not reference or setting.missing:
                return setting
            target = reference[1].strip()
            if target.startswith("."):
                target = key.rpartition(".")[0] + target
            if target not in self.settings and target not in self.defaults:
                text = (reference[2] or "null").strip().strip("'\"")
                return Setting(key=key, text=text, start=setting.start, end=setting.end)
            key = target
        return None

    def text(self, key: str) -> str | None:
        """Its text, ``None`` for null or unset. What only a run decides falls back on the default, with a warning."""
        setting = self.find(key)
        if setting is not None and setting.missing:
            self._undecided(key, setting)
            fallback = self.defaults.get(key)
            if fallback is not None and "${" in fallback:
                plain = Config(reports=self.reports, settings={}, defaults=self.defaults)
                fallback = plain.text(key)
            return None if fallback is None or fallback.lower() in _NULL else fallback
        return None if setting is None or setting.text.lower() in _NULL else setting.text

    def integer(self, key: str, *, least: int | None = None) -> int | None:
        text = self.text(key)
        if text is None:
            return None
        try:
            value = int(text) if "." not in text and "e" not in text.lower() else _whole(text)
        except (ValueError, OverflowError):
            self._wrong(key, "a whole number")
            return None
        if abs(value) > 2**53:
            self._wrong(key, "a number of sensible size")
            return None
        if least is not None and value < least:
            self._wrong(key, f"a whole number of at least {least}")
            return None
        return value

    def number(self, key: str) -> float | None:
        text = self.text(key)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not abs(value) < 2**53:
            self._wrong(key, "a number")
            return None
        return value

    def flag(self, key: str) -> bool:
        text = self.text(key)
        if text is None:
            return False
        if text.lower() in _TRUE | _FALSE or text in ("0", "1"):
            return text.lower() in _TRUE or text == "1"
        self._wrong(key, "True or False")
        return False

    def origin(self, key: str, otherwise: str) -> str:
        """Comment on where the value of ``key`` comes from; ``otherwise`` if it is simply written."""
        if key in self.unresolved:
            return f"{self.unresolved[key]}: verl's default"
        return otherwise if self.written(key) else f"{key} is not set: verl's default"

    def place(self, key: str) -> tuple[int, int] | None:
        setting = self.find(key)
        return None if setting is None or not (setting.start or setting.end) else (setting.start, setting.end)

    def _undecided(self, key: str, setting: Setting) -> None:
        if key in self.unresolved:
            return
        gap = setting.missing[0]
        name = f"`${gap.name}`"
        default = self.defaults.get(key)
        use = f"verl's default {default}" if default and "${" not in default else "no value"
        self.unresolved[key] = f"{name} is not known"
        self.reports.add(
            "NRS2504",
            Severity.WARNING,
            f"`{key}` cannot be read from the script: {name} {self._why(gap)}",
            (setting.start, setting.end),
            label=f"{use} is taken instead",
            secondary=[((gap.start, gap.end), "")] if (gap.start, gap.end) != (setting.start, setting.end) else (),
            help=f"write the value that the job runs with: `{key}=...`, or set the variable in the script"
            + (", or give --nodes N" if key == "trainer.nnodes" else ""),
        )

    def _why(self, gap: Missing) -> str:
        return re.sub(r"\{line:(\d+)\}", lambda m: str(self.reports.line(int(m[1]))), gap.why)

    def _wrong(self, key: str, wanted: str) -> None:
        setting = self.find(key)
        assert setting is not None
        self.unresolved[key] = "not usable"
        self.reports.add(
            "NRS2505",
            Severity.ERROR,
            f"`{key}` is `{_short(setting.text)}`, where verl wants {wanted}",
            (setting.start, setting.end),
            help=f"give `{key}` {wanted}",
        )


def read_overrides(fields: Sequence[Field], reports: Reports) -> dict[str, Setting]:
    """``a.b=c``, ``+a.b=c``, ``++a.b=c``, ``~a``: later ones win, deletions remove."""
    settings: dict[str, Setting] = {}
    for item in fields:
        found = _OVERRIDE.match(item.text)
        if not found:
            continue
        prefix, key, value = found[1], found[2], found[3]
        if prefix == "~":
            for name in [k for k in settings if k == key or k.startswith(f"{key}.")]:
                del settings[name]
            continue
        if value is None:
            continue
        start = _value_start(reports.source.text, item, key)
        if value.startswith("{") and value.endswith("}"):
            for name, inner in _flatten_inline(key, value):
                settings[name] = Setting(key=name, text=inner, start=start, end=item.end, missing=item.missing)
        settings[key] = Setting(key=key, text=_unquote(value), start=start, end=item.end, missing=item.missing)
        if len(settings) > _MAX_SETTINGS:
            break
    return settings


def _value_start(text: str, item: Field, key: str) -> int:
    """Where the value is written: behind `key=` if the argument stands literally in the source."""
    at = text.find(f"{key}=", item.start, item.end)
    return item.start if at < 0 else at + len(key) + 1


def _unquote(value: str) -> str:
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def _flatten_inline(key: str, value: str) -> Iterator[tuple[str, str]]:
    """One level of ``{a:1,b:2}``."""
    for pair in value[1:-1].split(","):
        name, separator, inner = pair.partition(":")
        if separator and re.fullmatch(r"\s*[A-Za-z_]\w*\s*", name):
            yield f"{key}.{name.strip()}", _unquote(inner)


def read_yaml(text: str, reports: Reports) -> dict[str, Setting] | None:
    """Settings of a resolved config file, or None with a diagnostic. JSON is read without pyyaml."""
    if text.lstrip().startswith("{"):
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            tree = None
        if isinstance(tree, dict):
            settings: dict[str, Setting] = {}
            for key, value in _flatten_json(tree, "", 0):
                if len(settings) >= _MAX_SETTINGS:
                    break
                at = _json_place(text, key)
                settings[key] = Setting(key=key, text=value, start=at[0], end=at[1])
            return settings
    try:
        import yaml
    except ImportError:
        reports.add(
            "NRS2512",
            Severity.ERROR,
            "reading YAML needs the package pyyaml, which is not installed",
            help="`pip install pyyaml`, or give the configuration as JSON, or the launch script itself",
        )
        return None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as fault:
        mark = getattr(fault, "problem_mark", None)
        at_offset = mark.index if mark is not None else 0
        problem = getattr(fault, "problem", None) or str(fault).partition("\n")[0] or "it is nested too deeply"
        reports.add(
            "NRS2511",
            Severity.ERROR,
            f"this is no YAML: {problem}",
            (at_offset, at_offset + 1),
            help="`python3 -m verl.trainer.main_ppo ... --cfg job --resolve` prints the resolved configuration",
        )
        return None
    return _flatten_yaml(yaml, root) if isinstance(root, yaml.MappingNode) else {}


def _flatten_yaml(yaml: Any, root: Any) -> dict[str, Setting]:
    """Aliases may share nodes without bound, so depth and number of nodes visited are bounded."""
    found: dict[str, Setting] = {}
    visited = 0

    def visit(node: Any, prefix: str, depth: int) -> None:
        nonlocal visited
        for key_node, value_node in node.value:
            visited += 1
            if visited > _MAX_SETTINGS or depth > 20:
                return
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = f"{prefix}{key_node.value}"
            if isinstance(value_node, yaml.MappingNode):
                visit(value_node, f"{key}.", depth + 1)
            elif isinstance(value_node, yaml.ScalarNode):
                place = (value_node.start_mark.index, value_node.end_mark.index)
                found[key] = Setting(key=key, text=value_node.value, start=place[0], end=place[1])

    visit(root, "", 0)
    return found


def _flatten_json(tree: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > 20:
        return
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten_json(value, f"{prefix}{name}.", depth + 1)
        elif not isinstance(value, list):
            yield f"{prefix}{name}", "null" if value is None else str(value)


def _json_place(text: str, key: str) -> tuple[int, int]:
    """The last name of ``key``, searched for along its path: good enough to point at."""
    at = 0
    end = 0
    for name in key.split("."):
        found = text.find(f'"{name}"', at)
        if found < 0:
            break
        at, end = found, found + len(name) + 2
    return at, end


def _whole(text: str) -> int:
    value = float(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."
