"""What the processes of a job agree on: write-once entries in a store that outlives each of them.

Everything is decided by the first write of an entry; who comes later reads it. So any process may propose at its
deadline, two proposals cannot both stand, and one that was stopped and wakes finds what was decided without it. The
store is torch's (``TCPStore`` in a process of its own, a ``FileStore``, or what the framework brings); whoever keeps
it must not be one of the processes that may be lost.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed

from nereus.runtime.codec import CodecError, decode, encode
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, STORE_LOST, Fault, first_line
from nereus.runtime.session.pulse import Pulse
from nereus.runtime.session.replicated import ReplicatedStore
from nereus.runtime.transports import agreement

#: Untyped in part.
dist: Any = torch.distributed

_POLL_S, _LONGEST_POLL_S = 0.0005, 0.02


class Record:
    """Entries under ``name`` of ``store``, as process ``me`` sees them. Raises Fault where the store is gone."""

    def __init__(self, store: Any, name: str, me: int) -> None:
        self.me = me
        self.store = dist.PrefixStore(name, store)
        #: What this process does, for a fault; and who says that the store is silent.
        self.doing, self.pulse = "", Pulse((), 0.0)
        self._kept = store  # torch's wrapper does not, where it is none of torch's own

    def apart(self) -> Record:
        """The same entries over a connection of its own, for another thread."""
        found = Record.__new__(Record)
        found.me, found._kept, found.doing, found.pulse = self.me, self._kept, self.doing, self.pulse
        found.store = self.store.clone() if hasattr(self.store, "clone") else self.store
        return found

    @property
    def where(self) -> str:
        return f"process {self.me}"

    def put(self, key: str, value: object) -> None:
        self._ask(lambda: self.store.set(key, encode(value)))

    def has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.check([key])))

    def get(self, key: str) -> Any:
        """The value, or None where there is none yet."""
        if not self.has(key):
            return None
        return self._decoded(key, self._ask(lambda: self.store.get(key)))

    def first(self, key: str, value: object) -> Any:
        """What the first process to write ``key`` wrote: ``value`` if that is this one."""
        # The store compares and sets texts; latin-1 keeps every byte.
        found = self._ask(lambda: self.store.compare_set(key, "", encode(value).hex()))
        return self._decoded(key, bytes.fromhex(bytes(found).decode()))

    def decided(self, key: str) -> Any:
        """What ``first`` wrote, or None where nobody has yet."""
        if not self.has(key):
            return None
        found = bytes(self._ask(lambda: self.store.get(key))).decode()
        return self._decoded(key, bytes.fromhex(found)) if found else None

    def await_silently(self, key: str, closed: Callable[[], bool]) -> None:
        """Until ``key`` is there, in the store itself where it can: at once, and without a question meanwhile. Whoever
        shares this connection waits too."""
        if not isinstance(base_of(self.store), dist.TCPStore | ReplicatedStore):
            while not closed() and not self.has(key):
                time.sleep(_LONGEST_POLL_S)
            return
        while not closed():
            try:
                self.store.wait([key], timedelta(days=1))
                return
            except dist.DistStoreError:  # a day has passed
                continue
            except RuntimeError as error:
                fault = self._lost(error)
            raise fault

    def count(self, key: str) -> int:
        """1, 2, ... : a number that nobody else gets."""
        return int(self._ask(lambda: self.store.add(key, 1)))

    def counted(self, key: str) -> int:
        """The last number that ``count`` gave; 0: none."""
        return int(self._ask(lambda: self.store.add(key, 0)))

    def forget(self, *keys: str) -> None:
        """Entries that nobody reads or writes any more."""
        for key in keys:
            self._ask(partial(self.store.delete_key, key))

    def forget_moves(self, *names: str) -> None:
        """The same of moves that ran under these names."""
        for name in names:
            self._ask(partial(agreement.forget, dist.PrefixStore(name, self.store)))

    def wait(
        self, key: str, deadline_s: float, *, of: str, decided: bool = False, stop: Callable[[], Fault | None]
    ) -> Any:
        """The value of ``key`` once it is there. ``of``: whom to name at the deadline; ``stop``: asked on the way, a
        Fault that ends the wait."""
        end = time.monotonic() + deadline_s
        pause = _POLL_S
        while (value := (self.decided if decided else self.get)(key)) is None:
            if (fault := stop()) is not None:
                raise fault
            if time.monotonic() > end:
                raise Fault(DEADLINE, f"no word from {of} within {deadline_s:g} s", where=self.where)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
        return value

    def gather(
        self,
        key: str,
        value: object,
        members: Sequence[int],
        deadline_s: float,
        *,
        stop: Callable[[], Fault | None],
    ) -> dict[int, Any]:
        """Every member's value by its number; this process's is ``value``. Also a barrier."""
        self.put(f"{key}/{self.me}", value)
        end = time.monotonic() + deadline_s
        return {
            member: value
            if member == self.me
            else self.wait(
                f"{key}/{member}", max(0.0, end - time.monotonic()), of=f"process {member} ({key})", stop=stop
            )
            for member in members
        }

    def watched(self, limit_s: float) -> Pulse:
        """No wait on the store outlives its silence of ``limit_s``, until the pulse is closed."""
        self.pulse = Pulse(servers_of(self.store), limit_s)
        return self.pulse

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            fault = self._lost(error)
        raise fault

    def _lost(self, error: RuntimeError) -> Fault:
        at = ", ".join(f"{server.host}:{server.port}" for server in servers_of(self.store))
        during = f" ({self.doing})" if self.doing else ""
        text = f"the job's store{at and ' at '}{at} does not answer{during}: {self.pulse.said or first_line(error)}"
        return Fault(STORE_LOST, text, where=self.where)

    def _decoded(self, key: str, data: bytes) -> Any:
        try:
            return decode(bytes(data))
        except CodecError as error:
            raise Fault(PARTICIPANT_FAILED, f"entry {key} of the job's store: {error}", where=self.where) from None


def digest_of(values: Mapping[str, Any]) -> str:
    """The same for equal values, in whatever process and order."""
    return hashlib.blake2b(encode(tuple(sorted(values.items()))), digest_size=16).hexdigest()


def base_of(store: Any) -> Any:
    """The store under all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def servers_of(store: Any) -> tuple[Any, ...]:
    """Connections to the processes that keep it and are left; none for a store that has no process of its own."""
    store = base_of(store)
    if isinstance(store, ReplicatedStore):
        return tuple(each for each in store.stores if each is not None)
    return (store,) if isinstance(store, dist.TCPStore) else ()


def own_address(store: Any) -> str:
    """That of this machine from which it reaches the store; for a store that has no address, this machine only."""
    servers = servers_of(store)
    if not servers:
        return "127.0.0.1"
    store = servers[0]
    family, _, _, _, at = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(at)  # sends nothing
        return str(probe.getsockname()[0])


def never() -> None:
    """For ``stop``: nothing ends the wait but its deadline."""
    return None
