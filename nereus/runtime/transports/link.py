"""One connection to another process: frames out, frames in, neither waiting.

A frame is 64 bytes, eight unsigned numbers, and for some kinds as many bytes as it says. Bytes of a piece go from the
memory that a sender names to the memory that a receiver names, with no buffer between but the system's.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

#: A piece's bytes; where it can be read, in a storage (a ticket) or in staging (lent); lent staging was read; a text.
BYTES, TICKET, LENT, DONE, TEXT = range(5)


#: So much is waited for before it is read, where as much is to come: to be woken costs more than to copy a little.
_LEAST_BYTES = 512 << 10

_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Frame:
    """``size``: bytes that follow, of a ticket bytes of a row. ``address``, ``rows``, ``stride``: of a ticket."""

    kind: int
    tag: int = 0
    part: int = 0
    size: int = 0
    checksum: int = 0
    address: int = 0
    rows: int = 0
    stride: int = 0

    _FORM: ClassVar = struct.Struct("<8Q")

    def bytes(self) -> bytes:
        return self._FORM.pack(
            self.kind, self.tag, self.part, self.size, self.checksum, self.address, self.rows, self.stride
        )

    @classmethod
    def of(cls, raw: bytearray) -> Frame:
        return cls(*cls._FORM.unpack(raw))

    @classmethod
    def num_bytes(cls) -> int:
        return cls._FORM.size


class Link:
    """``place``: memory for what follows a frame, empty where nothing does; None while the frame has to wait: then all
    that comes after it stays where it is. ``came``: a frame with all that follows it is there."""

    def __init__(
        self,
        connection: socket.socket,
        place: Callable[[Frame], memoryview | None],
        came: Callable[[Frame, memoryview], None],
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._place, self._came = place, came
        self._out: deque[memoryview] = deque()
        self._head = bytearray(Frame.num_bytes())
        self._frame: Frame | None = None
        self._body: memoryview | None = None
        self._into = memoryview(self._head)  # what is left to fill
        self._least_bytes = 1
        self.ended = False  # the other side has closed, or is gone
        self.halted = False  # the frame at hand has no place yet

    @property
    def writing(self) -> bool:
        return bool(self._out)

    def put(self, frame: Frame, body: memoryview = _NOTHING) -> None:
        """To be sent. ``body`` is read until ``writing`` is over."""
        self._out.append(memoryview(frame.bytes()))
        if len(body):
            self._out.append(body)

    def write(self) -> None:
        """As much as the connection takes now. OSError where it is broken."""
        while self._out:
            batch = [self._out[number] for number in range(min(len(self._out), 32))]
            try:
                sent = self.socket.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                return
            while sent:
                first = self._out[0]
                if sent < len(first):
                    self._out[0] = first[sent:]
                    break
                sent -= len(self._out.popleft())

    def read(self) -> None:
        """What has come, until no more is there. OSError where it is broken; ``ended`` at its end."""
        while not self.halted and not self.ended:
            try:
                count = self.socket.recv_into(self._into)
            except (BlockingIOError, InterruptedError):
                self._ask_for(min(len(self._into), _LEAST_BYTES))
                return
            if not count:
                self.ended = True
                return
            self._into = self._into[count:]
            if not self._into:
                self._next()

    def _ask_for(self, num_bytes: int) -> None:
        """Before so many are there, or the other side ends, nothing is."""
        if num_bytes != self._least_bytes:
            self._least_bytes = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def shut(self) -> None:
        """End what either side waits for. Any thread may call it."""
        with suppress(OSError):  # closed meanwhile
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
        self._out.clear()

    def resume(self) -> None:
        """Ask again for a place."""
        if self.halted:
            self.halted = False
            self._next()

    def _next(self) -> None:
        """A frame's 64 bytes, or what follows one, are complete."""
        if self._body is None:
            self._frame = self._frame or Frame.of(self._head)
            self._body = self._place(self._frame)
            if self._body is None:
                self.halted = True
                return
            if len(self._body):
                self._into = self._body
                return
        frame, body = self._frame, self._body
        assert frame is not None and body is not None
        self._frame, self._body = None, None
        self._into = memoryview(self._head)
        self._came(frame, body)
