"""Ends what waits for a store that is stopped: it neither answers nor closes, and torch's calls have no deadline.

A thread asks the store, over a connection of its own, whether it is there. Where no answer comes within the limit, all
connections of this process to it are shut, so that whoever waits on one, be it inside torch's own groups, fails at once
as if the store had ended.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from nereus.runtime.communicator import shut_connections_to

#: Parts of the limit. A process that was itself stopped, or got no time, loses one or two of them, and not the store.
_PARTS = 20
_LONGEST_INTERVAL_S = 1.0
_KEY = "nereus/pulse"


class Pulse:
    """``servers``: connections to the processes that keep the store; ``limit_s``: longest silence of one. Of several,
    those that can be done without are given up after half of that, before a wait for them is anyone's deadline; no
    more, since where most are silent they are slow, or it is this process."""

    def __init__(self, servers: tuple[Any, ...], limit_s: float) -> None:
        self.limit_s = limit_s
        self._spare, self._lock = (len(servers) - 1) // 2, threading.Lock()
        #: Of the servers that were given up, in words.
        self.said = ""
        self._closed = threading.Event()
        for server in servers:
            threading.Thread(target=self._run, args=(server,), name="nereus-pulse", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self, server: Any) -> None:
        lines: list[Any] = []
        broken = threading.Event()

        def ask() -> None:
            try:
                if not lines:
                    lines.append(server.clone())
                lines[0].check([_KEY])
            except RuntimeError:
                broken.set()

        interval_s = min(_LONGEST_INTERVAL_S, self.limit_s / 4)
        while (silent_s := self._silence(ask)) is None:
            if broken.is_set():  # where it has ended nobody waits for it
                self._spared()
                return
            if self._closed.wait(interval_s):
                return
        found = f"{server.host}:{server.port} has been silent for {silent_s:g} s"
        self.said = f"{self.said}; {found}" if self.said else found
        addresses = {(str(info[4][0]), server.port) for info in socket.getaddrinfo(server.host, server.port)}
        while True:  # a call may connect anew
            shut_connections_to(addresses)
            if self._closed.wait(interval_s):
                return

    def _silence(self, ask: Callable[[], None]) -> float | None:
        """Seconds without an answer, after which the server is given up. None: it answered."""
        asking = threading.Thread(target=ask, name="nereus-pulse", daemon=True)
        asking.start()
        for part in range(1, _PARTS + 1):
            asking.join(self.limit_s / _PARTS)
            if not asking.is_alive() or self._closed.is_set():
                return None
            if 2 * part == _PARTS and self._spared():
                return self.limit_s / 2
        return self.limit_s

    def _spared(self) -> bool:
        """Whether the others are enough."""
        with self._lock:
            self._spare -= 1
            return self._spare >= 0
