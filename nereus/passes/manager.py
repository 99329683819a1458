"""The pass manager: names, order, options as text, and hooks that print, verify or time; passes themselves do none of
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from nereus.passes.place import Place
from nereus.passes.route import Route
from nereus.passes.schedule import WaveSchedule

#: (pass name, what it produced): called after every pass.
Hook = Callable[[str, object], None]

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Options of every pass that has some. ``mode``: auto (reversible where it fits), reversible, tight."""

    place: Place = field(default_factory=Place)
    route: Route = field(default_factory=Route)
    schedule: WaveSchedule = field(default_factory=WaveSchedule)
    mode: str = "auto"

    def with_window(self, window_bytes: int) -> Pipeline:
        """The same with smaller windows."""
        schedule = replace(self.schedule, window_bytes=min(self.schedule.window_bytes, window_bytes))
        return replace(self, schedule=schedule)

    def __str__(self) -> str:
        """Text form: passes in order, options that differ from their defaults in braces; parses back."""
        parts = []
        for name, kind in PASSES.items():
            options = getattr(self, kind) if kind else None
            written = _written(options) if options is not None else {}
            if name == "schedule" and self.mode != "auto":
                written["mode"] = self.mode
            parts.append(name + ("{" + " ".join(f"{k}={v}" for k, v in written.items()) + "}" if written else ""))
        return ",".join(parts)


#: Pass name -> field of ``Pipeline`` with its options, in the order in which they run.
PASSES: Mapping[str, str | None] = {
    "hold": None,
    "place": "place",
    "lower": None,
    "diff": None,
    "lifecycle": None,
    "route": "route",
    "memory": None,
    "schedule": "schedule",
    "emit": None,
    "check": None,
}

ABOUT: Mapping[str, str] = {
    "hold": "plan -> holdings: which copies of a model's state exist at a safe boundary",
    "place": "device of every coordinate of the new layout (flow over nodes, assignment inside)",
    "lower": "the change as Split, Merge, Extend, Destroy, Reshape: the explanation, not the execution",
    "diff": "atoms: what each place keeps, derives and lacks; what no living place holds",
    "lifecycle": "engines to start, processes to spawn, communicators to build",
    "route": "who sends what to whom: node first, least loaded, relays",
    "memory": "bytes per memory space and phase; whether the old plan can stay whole until commit",
    "schedule": "slices and waves, storages, predicted time; tight mode releases as it goes",
    "emit": "the program of every participant",
    "check": "independent verifier: coverage, sources, order, windows, bytes, memory on any timing",
}


def _written(options: Any) -> dict[str, object]:
    default = type(options)()
    return {
        f.name: getattr(options, f.name)
        for f in fields(options)
        if getattr(options, f.name) != getattr(default, f.name)
    }


def parse_pipeline(text: str) -> Pipeline:
    """The inverse of ``str(pipeline)``. ValueError with the offending word."""
    pipeline = Pipeline()
    names = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = entry.partition("{")
        if name not in PASSES:
            raise ValueError(f"no pass {name!r}; there are {', '.join(PASSES)}")
        names.append(name)
        if not rest:
            continue
        if not rest.endswith("}"):
            raise ValueError(f"missing '}}' after {entry!r}")
        for word in rest[:-1].split():
            pipeline = _with_option(pipeline, name, word)
    if names != [n for n in PASSES if n in names] or (names and names != list(PASSES)):
        raise ValueError(f"the passes run in this order, all of them: {','.join(PASSES)}")
    return pipeline


def _with_option(pipeline: Pipeline, name: str, word: str) -> Pipeline:
    key, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{name}: write option=value, not {word!r}")
    if name == "schedule" and key == "mode":
        if value not in ("auto", "reversible", "tight"):
            raise ValueError(f"schedule: mode is auto, reversible or tight, not {value!r}")
        return replace(pipeline, mode=value)
    kind = PASSES[name]
    known = [f.name for f in fields(getattr(pipeline, kind))] if kind else []
    if kind is None or key not in known:
        raise ValueError(f"{name} has no option {key!r}; it has {', '.join(known) or 'none'}")
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name}: {key} is a whole number, not {value!r}") from None
    if number < 0 or (number == 0 and key != "flow_bound"):
        raise ValueError(f"{name}: {key} must be positive")
    options = replace(getattr(pipeline, kind), **{key: number})
    return replace(pipeline, **{kind: options})


@dataclass(slots=True)
class Instrument:
    """Times every pass and calls the hooks with its result."""

    hooks: tuple[Hook, ...] = ()
    timings: list[tuple[str, float]] = field(default_factory=list)

    def run(self, name: str, work: Callable[[], P]) -> P:
        assert name in PASSES, name
        with self.timed(name):
            result = work()
        self.show(name, result)
        return result

    def show(self, name: str, result: object) -> None:
        """``result`` of pass ``name`` to every hook."""
        for hook in self.hooks:
            hook(name, result)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings.append((name, time.perf_counter() - start))
