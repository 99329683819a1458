"""One connection to another process: frames out, frames in, neither waiting.

A frame is 40 bytes, five unsigned numbers, and as many bytes as it says. Bytes of a piece go from the memory that a
sender names to the memory that a receiver names, with no buffer between but the system's; their checksum comes after
them, since it is made while they go.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from nereus.kernels.flow import Flow

#: A piece's bytes; where they can be read, in a storage (a ticket) or in staging (lent); lent staging was read; a text.
BYTES, TICKET, LENT, DONE, TEXT = range(5)


#: So much is waited for before it is read, where as much is to come: to be woken costs more than to copy a little.
_LEAST_BYTES = 512 << 10

_NOTHING = memoryview(b"")
_CHECKSUM_BYTES = 8
#: More is about to follow, so a packet is not sent for this alone.
_MORE = getattr(socket, "MSG_MORE", 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """``size``: bytes that follow. ``checksum``: of a piece; on the wire that of ``BYTES`` follows them."""

    kind: int
    tag: int = 0
    part: int = 0
    size: int = 0
    checksum: int = 0

    _FORM: ClassVar = struct.Struct("<5Q")

    def bytes(self) -> bytes:
        return self._FORM.pack(self.kind, self.tag, self.part, self.size, self.checksum)

    @classmethod
    def of(cls, raw: bytearray) -> Frame:
        return cls(*cls._FORM.unpack(raw))

    @classmethod
    def num_bytes(cls) -> int:
        return cls._FORM.size


class Link:
    """``place``: memory for what follows a frame, or a flow into it, empty where nothing does; None while the frame has
    to wait: then all that comes after it stays where it is. ``came``: a frame with all that follows it is there."""

    def __init__(
        self,
        connection: socket.socket,
        place: Callable[[Frame], memoryview | Flow | None],
        came: Callable[[Frame, memoryview | Flow], None],
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._number = connection.fileno()
        self._place, self._came = place, came
        self._out: deque[memoryview | Flow] = deque()
        self._head = bytearray(Frame.num_bytes())
        self._tail = bytearray(_CHECKSUM_BYTES)
        self._frame: Frame | None = None
        self._body: memoryview | Flow | None = None
        self._into: memoryview | Flow = memoryview(self._head)  # what is left to fill
        self._least_bytes = 1
        self._summed = False  # all of a piece is there, and its checksum is to come
        self.ended = False  # the other side has closed, or is gone
        self.halted = False  # the frame at hand has no place yet

    @property
    def writing(self) -> bool:
        return bool(self._out)

    def put(self, frame: Frame, body: memoryview | Flow = _NOTHING) -> None:
        """To be sent. ``body`` is read until ``writing`` is over."""
        self._out.append(memoryview(frame.bytes()))
        if isinstance(body, Flow):
            self._out.append(body)
            return
        if len(body):
            self._out.append(body)
        if frame.kind == BYTES:
            self._out.append(_tail(frame.checksum))

    def write(self) -> None:
        """As much as the connection takes now. OSError where it is broken."""
        while self._out:
            first = self._out[0]
            if isinstance(first, Flow):
                if not first.send(self._number):
                    return
                self._out[0] = _tail(first.total())
                continue
            batch: list[memoryview] = []
            for each in islice(self._out, 32):
                if isinstance(each, Flow):
                    break
                batch.append(each)
            try:
                sent = self.socket.sendmsg(batch, (), _MORE if len(batch) < len(self._out) else 0)
            except (BlockingIOError, InterruptedError):
                return
            for part in batch:
                if sent < len(part):
                    self._out[0] = part[sent:]
                    break
                sent -= len(part)
                self._out.popleft()

    def read(self) -> None:
        """What has come, until no more is there. OSError where it is broken; ``ended`` at its end."""
        while not self.halted and not self.ended:
            into = self._into
            if isinstance(into, Flow):
                if not into.receive(self._number):
                    self._ask()
                    return
                self._next()
                continue
            try:
                count = self.socket.recv_into(into)
            except (BlockingIOError, InterruptedError):
                self._ask()
                return
            if not count:
                self.ended = True
                return
            self._into = into[count:]
            if not self._into:
                self._next()

    def _ask(self) -> None:
        """Until so many bytes are there as are wanted next, or the other side ends, nothing is."""
        left = self._into.left_bytes if isinstance(self._into, Flow) else len(self._into)
        num_bytes = min(left, _LEAST_BYTES)
        if num_bytes != self._least_bytes:
            self._least_bytes = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def shut(self) -> None:
        """End what either side waits for. Any thread may call it."""
        with suppress(OSError):  # closed meanwhile
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
        self._number = -1  # perhaps another's soon
        self._out.clear()

    def resume(self) -> None:
        """Ask again for a place."""
        if self.halted:
            self.halted = False
            self._next()
            if not self.halted:
                self._ask()  # what is there may be less than was waited for before

    def _next(self) -> None:
        """A frame, what follows one, or its checksum is complete."""
        if self._body is None:
            self._frame = self._frame or Frame.of(self._head)
            self._body = self._place(self._frame)
            if self._body is None:
                self.halted = True
                return
            if isinstance(self._body, Flow) or len(self._body):
                self._into = self._body
                return
        frame, body = self._frame, self._body
        assert frame is not None
        if frame.kind == BYTES and not self._summed:
            self._summed, self._into = True, memoryview(self._tail)
            return
        if frame.kind == BYTES:
            frame = replace(frame, checksum=int.from_bytes(self._tail, "little"))
        self._frame, self._body, self._summed = None, None, False
        self._into = memoryview(self._head)
        self._came(frame, body)


def _tail(checksum: int) -> memoryview:
    return memoryview(checksum.to_bytes(_CHECKSUM_BYTES, "little"))
