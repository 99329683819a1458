"""A job's store on 2f+1 stores, of which f may be lost: with their processes, their machines, or by silence.

    store = connected(["node0:29600", "node1:29600", "node2:29600"])      # python -m nereus.runtime.session.store
    job = nereus.attach(plan, store=store, device=...)

It is a store of torch's like any other, for records, transports and torch's own groups alike. Every key is a register
(``register.py``), so whatever was written stands, and two who compare and set the same key see one order. Which stores
are left each process finds for itself: one whose connection broke it never asks again. What is deleted is deleted for
good: by its last user, as nobody may write it again.

The other design was etcd: a service to install beside the job, a client for it, and still an adapter to torch's stores,
since gloo and NCCL find each other only through those. Its log would be on disk; nothing here outlives the job.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

from nereus.runtime.faults import CANNOT_START, Fault
from nereus.runtime.session import register
from nereus.runtime.session.register import PAUSE, Ask, Steps

#: Untyped in part.
dist: Any = torch.distributed

_PAUSE_S, _LONGEST_PAUSE_S, _POLL_S = 0.002, 0.1, 0.005
#: Longest wait in one store: the key may be in the others only.
_SLICE_S = 1.0
#: A store that does not answer while the others do is left out after so long.
_GRACE_S = 2.0
#: What begins a value, and a counter: its additions, a line each, so that none is counted twice.
_VALUE, _COUNTER = b"=", b"+"


class ReplicatedStore(dist.Store):
    """On connections to an odd number of stores, which belong to it. Any thread may ask. Raises NoMajority, a
    RuntimeError as torch's own are, where too few are left.

    Whoever wraps it in torch's PrefixStore keeps it alive: that does not."""

    def __init__(self, stores: Sequence[Any], timeout_s: float = 300.0) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        if len(stores) % 2 == 0:
            raise ValueError(f"{len(stores)} stores outlive no more losses than one less: give an odd number")
        #: None: lost.
        self.stores: list[Any] = list(stores)
        self._name, self._numbers = secrets.token_hex(6), itertools.count()
        self._own = threading.local()  # a connection of each thread, to wait in

    def clone(self) -> ReplicatedStore:
        """Itself: no thread holds up another one."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        data = _VALUE + _bytes(value)
        self._changed(key, lambda _: data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _plain(self._read(key))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._read(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = _bytes(expected), _VALUE + _bytes(desired)

        def update(found: bytes | None) -> bytes | None:
            return new if _plain(found) == old else found

        found = self._read(key)
        if update(found) != found:
            found = self._changed(key, update)
        return old if found is None else _plain(found)

    def add(self, key: str, amount: int) -> int:
        if amount == 0:
            return _sum(self._read(key))
        name = self._new_name()
        line = b"\n%s %d" % (name.encode(), amount)

        def update(found: bytes | None) -> bytes:
            found = _COUNTER if found is None else found
            if found[:1] != _COUNTER:
                raise ValueError(f"{key} is no counter")
            return found if line in found else found + line  # another one may have ended this

        found = self._changed(key, update, name) or b""
        return _sum(found[: found.index(line) + len(line)])

    def delete_key(self, key: str) -> bool:
        had = self._read(key) is not None
        for number in range(len(self.stores)):
            self._of(number, lambda store: store.delete_key(key))
        return had

    deleteKey = delete_key  # as torch's PrefixStore calls it

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self.timeout if timeout is None else timeout
        end = time.monotonic() + limit.total_seconds()
        missing = list(keys)
        while missing := [key for key in missing if self._read(key) is None]:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise dist.DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(missing)}")
            self._wait_in_one(missing[0], min(left_s, _SLICE_S))

    def list_keys(self) -> list[str]:
        found: set[str] = set()
        for number in range(len(self.stores)):
            found.update(self._of(number, lambda store: store.list_keys()) or ())
        return sorted(found)

    # -- the stores ----------------------------------------------------------------------------------------------------

    def _read(self, key: str) -> bytes | None:
        return self._run(key, register.read(len(self.stores), self._new_name()))

    def _changed(self, key: str, update: Callable[[bytes | None], bytes | None], name: str = "") -> bytes | None:
        return self._run(key, register.change(len(self.stores), update, name or self._new_name()))

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    def _run(self, key: str, steps: Steps) -> bytes | None:
        answer: bytes | None = None
        pause_s = _PAUSE_S
        try:
            ask = next(steps)
            while True:
                if ask is PAUSE:
                    time.sleep(random.uniform(0, pause_s))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                else:
                    answer = self._asked(key, ask)
                ask = steps.send(answer)
        except StopIteration as end:
            found: bytes | None = end.value
            return found

    def _asked(self, key: str, ask: Ask) -> bytes | None:
        answer = self._of(ask.store, lambda store: store.compare_set(key, ask.expected, ask.desired))
        return None if answer is None else bytes(answer)

    def _of(self, number: int, question: Callable[[Any], Any]) -> Any:
        """The store's answer; None where it is lost, and from then on."""
        store = self.stores[number]
        try:
            return question(store) if store is not None else None
        except RuntimeError:
            self.stores[number] = None
            return None

    def _wait_in_one(self, key: str, longest_s: float) -> None:
        """Until the first store that is left has heard of the key; so whoever waits long asks once a second."""
        number = next((n for n, store in enumerate(self.stores) if store is not None), 0)
        begin = time.monotonic()
        if getattr(self._own, "number", None) != number:
            self._own.line, self._own.number = self._of(number, lambda store: store.clone()), number
        if (line := self._own.line) is None:
            return
        try:
            with suppress(dist.DistStoreError):
                line.wait([key], timedelta(seconds=longest_s))
        except RuntimeError:
            self.stores[number] = None
        if time.monotonic() - begin < _POLL_S:  # a promise, and no value yet
            time.sleep(_POLL_S)


def connected(addresses: Sequence[str], *, start_s: float = 60.0) -> ReplicatedStore:
    """``addresses``: host:port of each store, the same in every process. One that is lost already is left out. Raises
    Fault where most of them cannot be reached."""
    found: list[Any] = [None] * len(addresses)

    def connect(number: int, host: str, port: int) -> None:
        with suppress(RuntimeError):
            found[number] = dist.TCPStore(host, port, None, False, timedelta(seconds=start_s), wait_for_workers=False)

    threads = []
    for number, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise Fault(CANNOT_START, f"{address!r} is no address of a store: write HOST:PORT")
        threads.append(threading.Thread(target=connect, args=(number, host, int(port)), daemon=True))
        threads[-1].start()  # it may wait for long in a machine that is stopped
    end = time.monotonic() + start_s
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        if 2 * sum(store is not None for store in found) > len(found):
            end = min(end, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    stores = list(found)
    if 2 * sum(store is not None for store in stores) <= len(stores):
        missing = ", ".join(address for address, store in zip(addresses, stores, strict=True) if store is None)
        raise Fault(CANNOT_START, f"most of the job's stores cannot be reached: {missing}")
    return ReplicatedStore(stores)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _sum(value: bytes | None) -> int:
    return sum(int(line.rpartition(b" ")[2]) for line in (value or b"").split(b"\n")[1:])


def _plain(value: bytes | None) -> bytes:
    """As torch's stores give it."""
    if value is None:
        return b""
    return str(_sum(value)).encode() if value[:1] == _COUNTER else value[1:]
