"""Values come back as they were, of the same types; whatever else the bytes say builds nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.tiny import cluster, ppo, trainer

from nereus.ir.fragment import FrameworkStorage
from nereus.passes.emit import emit_program
from nereus.passes.pipeline import compile_transition
from nereus.runtime.codec import CodecError, decode, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@given(plain)
def test_plain_values_come_back(value: object) -> None:
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float32", "bool", "int8", ">i4"])
def test_arrays_come_back(dtype: str) -> None:
    for shape in [(0,), (5,), (2, 3), ()]:
        value = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        back = decode(encode({"x": value, "y": value[..., ::-1] if shape else value}))
        assert back["x"].dtype == value.dtype and np.array_equal(back["x"], value) and back["x"].flags.writeable
        assert np.array_equal(back["y"], value[..., ::-1] if shape else value)


def test_plans_and_programs_come_back() -> None:
    old = ppo(cluster(4), actor={"tp": 2}, critic={"tp": 2, "pp": 2, "zero": 1}, ref={"tp": 4})
    assert decode(encode(old)) == old
    found = compile_transition(trainer(cluster(4), tp=2, zero=1), trainer(cluster(4), tp=4))
    for device in range(4):
        program = emit_program(found, device)
        back = decode(encode(program))
        assert (back.device, back.storages, back.digest) == (program.device, program.storages, program.digest)
        for wave, other in zip(program.waves, back.waves, strict=True):
            assert [m.tag for m in wave.sends] == [m.tag for m in other.sends]
            for message, again in zip((*wave.sends, *wave.receives), (*other.sends, *other.receives), strict=True):
                assert np.array_equal(message.blocks.table, again.blocks.table)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_is_found(at: int, change: int) -> None:
    data = bytearray(encode({"a": (1, 2.5, "x"), "b": np.arange(7)}))
    data[at % len(data)] ^= change
    with pytest.raises(CodecError):
        decode(bytes(data))


def test_what_is_no_data_is_not_sent() -> None:
    for value in (object(), print, pickle, {1, 2}, 1j, np.array(["a"])):
        with pytest.raises(TypeError, match="cannot be sent"):
            encode(value)


def _message(text: str) -> bytes:
    import hashlib

    body = len(text).to_bytes(8, "little") + text.encode()
    return b"nereus1\n" + hashlib.blake2b(body, digest_size=16).digest() + body


@pytest.mark.parametrize(
    "text",
    [
        '{"d":["os:system",{}]}',
        '{"d":["nereus.runtime.launch:run_here",{}]}',
        '{"d":["nereus.runtime.launch:os",{}]}',
        '{"d":["nereus.runtime.codec:CodecError",{}]}',
        '{"d":["nereus.ir.fragment:FrameworkStorage",{"name":"a"}]}',
        '{"d":["nereus.ir.nowhere:Thing",{}]}',
        '{"a":["O",[1],0,8]}',
        '{"b":[0,8]}',
        '{"z":1}',
        "{",
        "",
    ],
)
def test_bytes_of_somebody_else_build_nothing(text: str) -> None:
    with pytest.raises(CodecError):
        decode(_message(text))


def test_neither_does_a_pickle() -> None:
    with pytest.raises(CodecError, match="not a message"):
        decode(pickle.dumps(FrameworkStorage(name="a", dtype="fp32", numel=1)))
