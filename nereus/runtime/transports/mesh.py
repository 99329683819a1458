"""A connection between every two of some processes, which find each other through their store.

Each listens, and says in the store where, with a word that only who reads the store can know; whoever has the larger
number connects, and says the word and its number. A port that something else finds gives it nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from datetime import timedelta
from typing import Any

from nereus.runtime.faults import DEADLINE, Fault

_HELLO = struct.Struct("<16sI")
#: Longest wait before ``stop`` is asked again.
_SLICE_S = 0.05
#: Who has not said its word: so long it is listened to, and so many at one time.
_UNKNOWN_S, _MOST_UNKNOWN = 1.0, 64
_PAUSE_S = 0.01


def connected(
    store: Any, process: int, num_processes: int, *, address: str, deadline_s: float, stop: Callable[[], Fault | None]
) -> dict[int, socket.socket]:
    """The connections, by process. ``stop``: asked meanwhile; what it returns is raised. Raises Fault at the deadline,
    OSError where the address is none of this machine's."""
    wait = Wait(process, deadline_s, stop)
    with ExitStack() as undo:
        listener = socket.create_server((address, 0), backlog=num_processes + _MOST_UNKNOWN)
        word = secrets.token_bytes(16)
        with closing(listener):
            store.set(f"mesh/{process}", f"{address} {listener.getsockname()[1]} {word.hex()}")
            found = {}
            for other in range(process):
                host, port, theirs = wait.told(store, f"mesh/{other}", other).split()
                found[other] = undo.enter_context(wait.connection(host, int(port), other))
                found[other].sendall(_HELLO.pack(bytes.fromhex(theirs), process))  # fits what a new connection takes
            with _Callers(listener) as callers:
                while len(found) < num_processes - 1:
                    missing = next(n for n in range(process + 1, num_processes) if n not in found)
                    for connection, said, number in callers.heard(min(_SLICE_S, wait.left_s(missing))):
                        undo.enter_context(connection)
                        if said == word and process < number < num_processes:
                            found[number] = connection
                        else:
                            connection.close()
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

    def connection(self, host: str, port: int, other: int) -> socket.socket:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with ExitStack() as undo, selectors.DefaultSelector() as selector:
            connection = undo.enter_context(socket.socket(family, kind))
            connection.setblocking(False)
            if (number := connection.connect_ex(address)) not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
            selector.register(connection, selectors.EVENT_WRITE)
            while not selector.select(min(_SLICE_S, self.left_s(other))):
                pass
            if number := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
            undo.pop_all()
        return connection


class _Callers(AbstractContextManager["_Callers"]):
    """All who connect are listened to at once: one that says nothing, or a byte now and then, holds up nobody."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._said: dict[socket.socket, tuple[float, bytes]] = {}  # since when, and what
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def heard(self, wait_s: float) -> list[tuple[socket.socket, bytes, int]]:
        """Who has said a word and a number within ``wait_s``; it is the caller's from here on."""
        found = []
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            connection: Any = key.fileobj
            since, said = self._said[connection]
            try:
                more = connection.recv(_HELLO.size - len(said))
            except BlockingIOError:
                continue
            except OSError:
                more = b""
            said += more
            self._said[connection] = since, said
            if len(said) == _HELLO.size:
                self._forget(connection)
                found.append((connection, *_HELLO.unpack(said)))
            elif not more:
                self._forget(connection).close()
        for connection, (since, _) in list(self._said.items()):
            if time.monotonic() > since + _UNKNOWN_S:
                self._forget(connection).close()
        return found

    def _accept(self) -> None:
        if len(self._said) >= _MOST_UNKNOWN:
            time.sleep(_PAUSE_S)  # the listener stays ready
            return
        with suppress(OSError):  # gone meanwhile
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._said[connection] = time.monotonic(), b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._said[connection]
        return connection

    def __exit__(self, *_: object) -> None:
        for connection in list(self._said):
            self._forget(connection).close()
        self._selector.close()
