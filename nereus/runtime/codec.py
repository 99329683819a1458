"""Values as bytes between processes and on disk: plain values, numpy arrays and Nereus's own frozen dataclasses.

What is read here builds data and runs nothing: a class is named by its place in this package and must be a dataclass of
it, and only its fields are given. So a message that somebody else wrote can be wrong, but it cannot do anything; a
damaged one is found by its checksum. (Pickle, which torch's object collectives use, runs what it reads.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from functools import cache
from typing import Any

import numpy as np

_MAGIC = b"nereus1\n"
_DIGEST_BYTES = 16
#: Packages whose dataclasses may be sent.
_PACKAGES = ("nereus.ir.", "nereus.runtime.", "nereus.passes.")
#: Array elements: integers, floats and truth values of fixed width.
_KINDS = "iufb"


class CodecError(ValueError):
    """Bytes that are damaged, or say something that is not one of the values above."""


def encode(value: object) -> bytes:
    """Raises TypeError for a value of another kind."""
    writer = _Writer()
    text = json.dumps(writer.plain(value), separators=(",", ":")).encode()
    body = b"".join((len(text).to_bytes(8, "little"), text, *writer.blobs))
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def decode(data: bytes) -> Any:
    """The value. Raises CodecError."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = bytes(data[start:])
    if data[: len(_MAGIC)] != _MAGIC or len(body) < 8:
        raise CodecError("these bytes are not a message of Nereus")
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : start]:
        raise CodecError("the message is damaged: its checksum is another")
    length = int.from_bytes(body[:8], "little")
    try:
        return _value(json.loads(body[8 : 8 + length]), memoryview(body)[8 + length :])
    except CodecError:
        raise
    except Exception as error:
        raise CodecError(f"the message cannot be read: {type(error).__name__}: {error}") from None


class _Writer:
    """JSON of values: a list is a tuple, an object has one key that says what it is; bytes and arrays lie behind the
    text, in ``blobs``."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._end = 0

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is tuple:
            return [self.plain(item) for item in value]
        if kind is list:
            return {"l": [self.plain(item) for item in value]}
        if kind is dict:
            return {"m": [[self.plain(k), self.plain(v)] for k, v in value.items()]}
        if kind is frozenset:
            return {"s": [self.plain(item) for item in sorted(value)]}
        if kind is bytes:
            return {"b": self._append(value)}
        if isinstance(value, np.generic):
            return self.plain(value.item())
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return {"a": [value.dtype.str, list(value.shape), *self._append(np.ascontiguousarray(value).tobytes())]}
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith(_PACKAGES):
            fields = {name: self.plain(getattr(value, name)) for name in _fields(kind)}
            return {"d": [f"{kind.__module__}:{kind.__qualname__}", fields]}
        raise TypeError(f"a {kind.__name__} cannot be sent: {value!r:.100}")

    def _append(self, data: bytes) -> list[int]:
        begin = self._end
        self.blobs.append(data)
        self._end += len(data)
        return [begin, self._end]


def _value(item: Any, blobs: memoryview) -> Any:
    if isinstance(item, list):
        return tuple(_value(each, blobs) for each in item)
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "l":
        return [_value(each, blobs) for each in content]
    if kind == "m":
        return {_value(k, blobs): _value(v, blobs) for k, v in content}
    if kind == "s":
        return frozenset(_value(each, blobs) for each in content)
    if kind == "b":
        return bytes(_blob(blobs, *content))
    if kind == "a":
        dtype, shape, begin, end = content
        if np.dtype(dtype).kind not in _KINDS:
            raise CodecError(f"arrays of {dtype} are not sent")
        return np.frombuffer(_blob(blobs, begin, end), dtype=dtype).reshape(shape).copy()
    if kind == "d":
        name, fields = content
        return _class(name)(**{key: _value(each, blobs) for key, each in fields.items()})
    raise CodecError(f"there is no kind of value {kind!r}")


def _blob(blobs: memoryview, begin: int, end: int) -> memoryview:
    if not 0 <= begin <= end <= len(blobs):
        raise CodecError("the message is shorter than it says")
    return blobs[begin:end]


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if f.init)


@cache
def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    if not module.startswith(_PACKAGES) or not path.isidentifier():
        raise CodecError(f"{name} is no dataclass of Nereus")
    found = getattr(importlib.import_module(module), path, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or found.__module__ != module:
        raise CodecError(f"{name} is no dataclass of Nereus")
    return found
