"""A thread that hears at once of every process that is lost, whatever the others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from nereus.runtime.faults import Fault
from nereus.runtime.session.members import Losses
from nereus.runtime.session.record import Record


class Watch:
    """``told``: called in the thread with all losses after each new one, until ``close``."""

    def __init__(self, record: Record, told: Callable[[Losses], None]) -> None:
        # A connection of its own: a store answers one question after the other.
        self._record, self._told = record.apart(), told
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="nereus-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        losses = Losses(self._record)
        with suppress(Fault):  # the store is gone: whoever needs it says so
            while not self._closed.is_set():
                self._record.await_silently(f"lost/{losses.seen + 1}", self._closed.is_set)
                losses.look()
                if not self._closed.is_set():
                    self._told(losses)
