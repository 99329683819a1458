"""One-sided reads between processes of one host: a receiver copies out of its sender's memory (``process_vm_readv``).

What moves lies in memory that frameworks allocated. Segments of shared memory would take a copy into them and one out,
room for the staging (64 MB of /dev/shm in most containers, and a page more is a SIGBUS), and someone to remove them;
here there is one copy, from storage to storage, rows with strides included, and nothing to clean up. The price is
permission, so two processes try it before they rely on it: a reads 16 random bytes of b's at the address that b names,
which also proves that b's number means b here (containers have process numbers of their own).

Not permitted: other users' processes; where ``kernel.yama.ptrace_scope`` is 1 (Ubuntu's default) processes that did not
agree, so each agrees for as long as its transport is open (``PR_SET_PTRACER``); where it is 2 or 3, and where a
container's seccomp rules forbid the call, everybody. Then TCP carries the bytes, and the report says why.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nereus.kernels.flow import ADDRESS, ROW_BYTES, ROWS, STRIDE, Flow
from nereus.kernels.pack import IntArray

#: Segments of one call on each side (the system's IOV_MAX).
_MOST = 1024
#: Rows of another process shorter than this are packed by it: the system spends as much on each as on copying a
#: kilobyte.
LEAST_ROW_BYTES = 1024
_NONCE_BYTES = 16
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, -1


def read(pid: int, places: IntArray, into: torch.Tensor | Flow) -> None:
    """Bytes of process ``pid`` into this one's memory. ``places``: columns of ``flow.py``. ``into``: a tensor is uint8
    and in one piece. Raises OSError: ESRCH where the process is gone, EFAULT where its memory is, EPERM."""
    num_bytes = into.num_bytes if isinstance(into, Flow) else len(into)
    sent = int((places[:, ROWS] * places[:, ROW_BYTES]).sum())
    if sent != num_bytes:
        raise OSError(errno.EINVAL, f"{sent} bytes are sent, not {num_bytes}")
    if (places < 0).any() or (places[:, [ROWS, ROW_BYTES]] == 0).any():  # C divides by the bytes of a row
        raise OSError(errno.EINVAL, "rows that cannot be are sent")
    if isinstance(into, Flow):
        into.read(pid, places)
        return
    rows = places[:, ROWS]
    row_in_block = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    segments = np.empty((len(row_in_block), 2), dtype=np.uint64)
    segments[:, 0] = np.repeat(places[:, ADDRESS], rows) + row_in_block * np.repeat(places[:, STRIDE], rows)
    segments[:, 1] = np.repeat(places[:, ROW_BYTES], rows)
    address = into.data_ptr()
    for first in range(0, len(segments), _MOST):
        out_of = segments[first : first + _MOST]
        size = int(out_of[:, 1].sum())
        here = np.array([[address, size]], dtype=np.uint64)
        got = _readv()(pid, here.ctypes.data, 1, out_of.ctypes.data, len(out_of), 0)
        if got != size:
            number = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))
        address += size


def place_of(data: torch.Tensor) -> IntArray:
    """``places`` of a tensor in one piece."""
    return np.array([[data.data_ptr(), 1, len(data), len(data)]], dtype=np.int64)


class Card:
    """What a process says of itself while its transport is open, so that others may read its memory."""

    def __init__(self) -> None:
        self._nonce = torch.frombuffer(bytearray(os.urandom(_NONCE_BYTES)), dtype=torch.uint8)
        self._open = switched_on() and os.name == "posix"
        if self._open:
            _agree(1)

    def text(self) -> str:
        """Host, process, address and value of the nonce; empty where the path is switched off."""
        if not self._open:
            return ""
        return f"{_host()} {os.getpid()} {self._nonce.data_ptr()} {self._nonce.numpy().tobytes().hex()}"

    def close(self) -> None:
        if self._open:
            self._open = False
            _agree(-1)


def meet(mine: str, other: str) -> tuple[int, str]:
    """From two cards: the number of the other process if this one can read it, else 0 and why not. Another host's is
    no reason worth telling."""
    if not mine or not other:
        return 0, ""
    host, number, address, nonce = other.split()
    if not mine.startswith(f"{host} "):
        return 0, ""
    found = torch.zeros(_NONCE_BYTES, dtype=torch.uint8)
    try:
        read(int(number), np.array([[int(address), 1, _NONCE_BYTES, _NONCE_BYTES]], dtype=np.int64), found)
    except OSError as error:
        return 0, reason(error)
    if found.numpy().tobytes().hex() != nonce:
        return 0, "it has another process number here"
    return int(number), ""


def reason(error: OSError) -> str:
    """Why memory of a process of this host cannot be read, in words that say what to do."""
    if error.errno == errno.EPERM:
        scope = _yama()
        if scope >= 2:
            return f"kernel.yama.ptrace_scope is {scope}: no process may read another's memory"
        return "not permitted: another user's process, or a container without CAP_SYS_PTRACE"
    if error.errno == errno.ENOSYS:
        return "the system has no process_vm_readv, or forbids it"
    if error.errno in (errno.ESRCH, errno.EFAULT):
        return "its process number means another process here, or none"
    return str(error)


def switched_on() -> bool:
    """NEREUS_SAME_HOST=0: everything goes over TCP."""
    return os.environ.get("NEREUS_SAME_HOST") != "0"


@cache
def _host() -> str:
    """The same for all processes that one kernel runs, in whatever containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"?{os.getpid()}"  # like nobody else's


def _yama() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


@cache
def _readv() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return _no_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return function


def _no_readv(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


#: Open transports of this process, which has agreed to be read while there is one.
_open_cards = 0
_agreeing = threading.Lock()


def _agree(change: int) -> None:
    global _open_cards
    with _agreeing:
        before, _open_cards = _open_cards, _open_cards + change
        if _yama() != 1 or bool(before) == bool(_open_cards):
            return
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PTRACER, ctypes.c_long(_PR_SET_PTRACER_ANY if _open_cards else 0), 0, 0, 0)
