"""Reading an input file, whatever it is: a pipe too, as long as somebody writes to it."""

from __future__ import annotations

import errno
import os
import select
import stat
import time

#: A pipe that nobody has written to for this long, and that nobody has open for writing, has no text.
WRITER_WAIT_S = 3.0
_CHUNK = 1 << 16


def read_file(path: str, limit: int = -1) -> bytes:
    """Content of ``path``, at most ``limit`` bytes where that is not negative. OSError, ValueError as from ``open``;
    OSError too for a pipe without a writer, which ``open`` would wait for without end."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        return _read_pipe(path, limit)
    with open(path, "rb") as file:
        return file.read(limit)


def _read_pipe(path: str, limit: int) -> bytes:
    """A pipe from `<(...)`, /dev/stdin or mkfifo. A writer that is slow is waited for, one that never comes is not."""
    data = bytearray()
    met = False
    deadline = time.monotonic() + WRITER_WAIT_S
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        while limit < 0 or len(data) < limit:
            try:
                chunk = os.read(descriptor, _CHUNK)
            except BlockingIOError:  # there is a writer
                met = True
                select.select([descriptor], [], [])
                continue
            data += chunk
            if chunk:
                continue
            if met or data:
                break
            if time.monotonic() > deadline:
                raise OSError(errno.EAGAIN, "it is a pipe that nobody writes to", path)
            time.sleep(0.02)
    finally:
        os.close(descriptor)
    return bytes(data if limit < 0 else data[:limit])
