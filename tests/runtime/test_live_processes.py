"""A failure in one process of a live move, at every place where there can be one: all processes raise the same error,
at once, and the old objects are whole."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from frameworks.harness import run

from nereus.ir.fragment import Fragment
from nereus.ir.tensor import LogicalTensor
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder
from nereus.runtime.executor import ExecutionFailed
from nereus.runtime.live import MoveError, move

WORLD = 3
TENSORS = (LogicalTensor(name="a", shape=(6, 5)),)
#: (who fails, what the error says)
FAULTS = {
    "bind": (2, "process 2: head.bias is not declared"),
    "a bug while binding": (1, "process 1: KeyError('qkv')"),
    "memory that is not what was said": (1, "process 1: rows is said to be 9 x fp32; it is 10 x fp32"),
    "descriptions": (2, "the model has no tensor b"),
    "compile": (0, "elements of a weight:fp32 are wanted and held by none"),
    "a bug while compiling": (0, "the exchange could not be compiled: ZeroDivisionError"),
    "a bug while reading": (2, "process 2: OSError('bad block')"),
    "copies that differ": (1, "a weight differs between its copies in processes 0 and 1"),
    "write": (1, "RuntimeError: no room"),
}


def rows(lo: int, hi: int, *, filled: bool) -> Binding:
    builder = BindingBuilder(rank=lo)
    data = torch.arange(30.0).reshape(6, 5)[lo:hi].clone() if filled else torch.full((hi - lo, 5), -7.0)
    number = builder.storage("rows", data)
    box: dict[str, Any] = {"row_lo": lo, "row_hi": hi, "col_lo": 0, "col_hi": 5, "start": 0, "stop": (hi - lo) * 5}
    builder.fragments.append(Fragment(tensor="a", slot="weight", storage=number, origin=0, stride=5, **box))
    return builder.finish()


def _raise(error: Exception) -> Any:
    raise error


def _break(fault: str, rank: int, old: Binding) -> Any:
    """What this process brings instead of ``old``; and the fault planted in it, if it is this one's."""
    import nereus.runtime.executor as executor
    import nereus.runtime.live as live
    import nereus.runtime.replicas as replicas

    if rank != FAULTS[fault][0]:
        return old
    if fault == "bind":
        return lambda: _raise(BindError("head.bias is not declared"))
    if fault == "a bug while binding":
        return lambda: {}["qkv"]
    if fault == "memory that is not what was said":
        (storage,) = old.state.storages
        wrong = {"name": storage.name, "dtype": storage.dtype, "numel": 9}
        return Binding(type(old.state)(rank=1, storages=(type(storage)(**wrong),), fragments=()), old.memory)
    if fault == "descriptions":
        (one,) = old.state.fragments
        names = ("row_lo", "row_hi", "col_lo", "col_hi", "start", "stop", "origin", "stride", "slot", "storage")
        other = Fragment(tensor="b", **{name: getattr(one, name) for name in names})
        return Binding(type(old.state)(rank=2, storages=old.state.storages, fragments=(other,)), old.memory)
    if fault == "compile":
        return None  # its rows are on no one
    if fault == "copies that differ":
        old.memory[0][7] = 0.25
    if fault == "a bug while compiling":
        live.answers = lambda *_: 1 // 0
    if fault == "a bug while reading":
        replicas.stored = lambda *_: _raise(OSError("bad block"))
    if fault == "write":
        executor.land = executor.stored = executor.copy = lambda *_, **__: _raise(RuntimeError("no room"))
    return old


def _attempts(rank: int, world: int) -> dict[str, tuple[str, str, float, bool]]:
    """Fault -> (kind and text of the error, seconds that it took, whether the old state is whole)."""
    import nereus.runtime.executor as executor
    import nereus.runtime.live as live
    import nereus.runtime.replicas as replicas

    torch.set_num_threads(1)
    found = {}
    genuine = [(m, n, getattr(m, n)) for m, n in ((live, "answers"), (replicas, "stored"))]
    genuine += [(executor, n, getattr(executor, n)) for n in ("land", "stored", "copy")]
    for fault in FAULTS:
        shared = fault in ("copies that differ", "a bug while reading")
        lo, hi = (0, 6) if shared else (2 * rank, 2 * rank + 2)
        new = rows(0, 6, filled=False) if rank != 2 else None
        old = rows(lo, hi, filled=True)
        offered = _break(fault, rank, old)
        before = old.memory[0].clone()
        begin = time.monotonic()
        try:
            move(offered, new, TENSORS, deadline_s=20)
        except (MoveError, ExecutionFailed) as error:
            seconds = time.monotonic() - begin
            written = fault != "write" and new is not None and not bool((new.memory[0] == -7).all())
            whole = torch.equal(before, old.memory[0]) and not written
            found[fault] = (type(error).__name__, str(error), seconds, whole)
        for module, name, value in genuine:
            setattr(module, name, value)
    # After all that the group still moves.
    new = rows(0, 6, filled=False)
    move(rows(2 * rank, 2 * rank + 2, filled=True), lambda: new, TENSORS, deadline_s=20)
    assert torch.equal(new.memory[0], torch.arange(30.0))
    return found


@pytest.fixture(scope="module")
def attempts() -> list[dict[str, tuple[str, str, float, bool]]]:
    return run(WORLD, _attempts, timeout=200)


@pytest.mark.parametrize("fault", FAULTS)
def test_all_processes_raise_the_same_at_once(
    fault: str, attempts: list[dict[str, tuple[str, str, float, bool]]]
) -> None:
    said = [found[fault] for found in attempts]
    kind = "ExecutionFailed" if fault == "write" else "MoveError"
    assert {entry[0] for entry in said} == {kind}
    assert FAULTS[fault][1] in said[0][1]
    assert len({entry[1] for entry in said}) == 1, [entry[1] for entry in said]
    assert all(seconds < 10 for _, _, seconds, _ in said)
    assert all(whole for _, _, _, whole in said)
