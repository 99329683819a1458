"""A connection between every two of some processes, which find each other through their store.

Each listens, and says in the store where, with a word that only who reads the store can know; whoever has the larger
number connects, and says the word and its number. A port that something else finds gives it nothing.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

from nereus.runtime.faults import DEADLINE, Fault

_HELLO = struct.Struct("<16sI")
#: Longest wait before ``stop`` is asked again.
_SLICE_S = 0.05


def connected(
    store: Any, process: int, num_processes: int, *, address: str, deadline_s: float, stop: Callable[[], Fault | None]
) -> dict[int, socket.socket]:
    """The connections, by process. ``stop``: asked meanwhile; what it returns is raised. Raises Fault at the deadline,
    OSError where the address is none of this machine's."""
    wait = Wait(process, deadline_s, stop)
    with ExitStack() as undo:
        listener = socket.create_server((address, 0), backlog=num_processes)
        word = secrets.token_bytes(16)
        with closing(listener):
            store.set(f"mesh/{process}", f"{address} {listener.getsockname()[1]} {word.hex()}")
            found = {}
            for other in range(process):
                host, port, theirs = wait.told(store, f"mesh/{other}", other).split()
                found[other] = undo.enter_context(socket.create_connection((host, int(port)), wait.left_s(other)))
                found[other].sendall(_HELLO.pack(bytes.fromhex(theirs), process))
            while len(found) < num_processes - 1:
                missing = next(n for n in range(process + 1, num_processes) if n not in found)
                connection = undo.enter_context(wait.accepted(listener, missing))
                said = wait.greeting(connection, missing)
                if said is not None and said[0] == word and process < said[1] < num_processes:
                    found[said[1]] = connection
        for connection in found.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return found


class Wait:
    """Until a deadline, in slices."""

    def __init__(self, process: int, deadline_s: float, stop: Callable[[], Fault | None]) -> None:
        self._end, self._deadline_s, self._stop = time.monotonic() + deadline_s, deadline_s, stop
        self._where = f"process {process}"

    def left_s(self, other: int) -> float:
        """Of the next slice, at most."""
        if (fault := self._stop()) is not None:
            raise fault
        left = self._end - time.monotonic()
        if left <= 0:
            text = f"process {other} was not found within {self._deadline_s:g} s"
            raise Fault(DEADLINE, text, where=self._where)
        return left

    def told(self, store: Any, key: str, other: int) -> str:
        while not store.check([key]):
            slice_s = min(_SLICE_S, self.left_s(other))
            try:
                store.wait([key], timedelta(seconds=slice_s))
            except RuntimeError:  # not in this slice
                continue
        return bytes(store.get(key)).decode()

    def accepted(self, listener: socket.socket, other: int) -> socket.socket:
        ready = select.poll()  # select() ends at descriptor 1,023, and jobs have more
        ready.register(listener, select.POLLIN)
        while not ready.poll(1e3 * min(_SLICE_S, self.left_s(other))):
            pass
        return listener.accept()[0]

    def greeting(self, connection: socket.socket, other: int) -> tuple[bytes, int] | None:
        """None from something that is not one of us."""
        connection.settimeout(min(1.0, self.left_s(other)))
        raw = b""
        try:
            while len(raw) < _HELLO.size:
                more = connection.recv(_HELLO.size - len(raw))
                if not more:
                    return None
                raw += more
        except OSError:
            return None
        word, number = _HELLO.unpack(raw)
        return word, number
