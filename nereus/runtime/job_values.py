"""Plain values of job state: what JSON can carry exactly, and what must not be in there.

Job state is the same on every rank. Facts of one rank (its number, device, shard, generator state) and facts of one
layout (degrees, number of micro-batches) do not survive a change of layout: they are refused by name, never stored.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping


class JobStateError(ValueError):
    """Job state that cannot be stored, read or agreed on. The text names the field."""


_RANK_WORDS = frozenset(
    ("rank", "ranks", "local", "device", "devices", "hostname", "pid", "world", "shard", "shards", "rng", "generator")
)
#: The other meaning of the word: lora_rank.
_LOW_RANK = frozenset(("lora", "galore", "low"))
#: Whole words: the ``step_size`` of a schedule is none of them.
_LAYOUT_NAMES = re.compile(r"(?:^|_)(?:dp|tp|pp|cp|ep|parallel)_size|num_micro_?batches")
_NUMBERED_DEVICE = re.compile(r"(?:cuda|hip|xpu|npu):[0-9]+")
#: Marks of values that JSON has no notation for.
_FLOAT, _TUPLE, _MAP, _COUNTER = "$float", "$tuple", "$map", "$counter"


def encode(value: object, path: str) -> object:
    """``value`` as JSON data from which ``decode`` gives it back exactly. Raises JobStateError at ``path``."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, str):
        if _NUMBERED_DEVICE.fullmatch(value):
            raise JobStateError(f"{path}: {value!r} is the device of one rank; it cannot be in the state of the job")
        return value
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        _check_names(value, path)
        if isinstance(value, Counter):
            return {_COUNTER: [[encode(k, path), encode(v, f"{path}.{k}")] for k, v in value.items()]}
        if all(isinstance(key, str) for key in value):
            return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
        return {_MAP: [[encode(k, path), encode(v, f"{path}.{k}")] for k, v in value.items()]}
    raise JobStateError(
        f"{path}: a {type(value).__name__} is not plain data; tensors and generators of a rank are not state of the job"
    )


def decode(value: object, path: str) -> object:
    """The inverse of ``encode``. Raises JobStateError at ``path``."""
    if isinstance(value, list):
        return [decode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    mark = next((key for key in value if key.startswith("$")), None)
    if mark is None:
        return {key: decode(item, f"{path}.{key}") for key, item in value.items()}
    inner = value[mark]
    if len(value) == 1 and mark == _FLOAT and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if len(value) == 1 and isinstance(inner, list):
        if mark == _TUPLE:
            return tuple(decode(item, f"{path}[{i}]") for i, item in enumerate(inner))
        if mark in (_MAP, _COUNTER) and all(isinstance(pair, list) and len(pair) == 2 for pair in inner):
            pairs = {_hashable(decode(k, path), path): decode(v, f"{path}.{k}") for k, v in inner}
            return Counter(pairs) if mark == _COUNTER else pairs
    raise JobStateError(f"{path}: {mark} is no mark of a value")


def _hashable(key: object, path: str) -> object:
    try:
        hash(key)
    except TypeError:
        raise JobStateError(f"{path}: {key!r} cannot be a key") from None
    return key


def _check_names(value: Mapping[object, object], path: str) -> None:
    for key in value:
        if not isinstance(key, str):
            continue
        if key.startswith("$"):
            raise JobStateError(f"{path}.{key}: names that start with $ are marks of values")
        if "." in key:
            continue  # a tensor's name, which may contain any word
        words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
        if (found := _RANK_WORDS.intersection(words)) and not _LOW_RANK.intersection(words):
            raise JobStateError(
                f"{path}.{key}: `{min(found)}` names a fact of one rank; it cannot be in the state of the job"
            )
        if _LAYOUT_NAMES.search("_".join(words)):
            raise JobStateError(f"{path}.{key}: a fact of one layout; the next layout computes its own")


def flatten(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of every leaf of JSON data; an empty list or object is a leaf. For comparing two states."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from flatten(value[key], f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            # A model is known by its name, not by its place.
            name = item.get("model", i) if isinstance(item, dict) else i
            yield from flatten(item, f"{path}[{name}]")
    else:
        yield path, value
