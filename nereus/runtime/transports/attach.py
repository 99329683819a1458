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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Segments of one call on each side (the system's IOV_MAX).
_MOST = 1024
#: Rows shorter than this are packed by the sender: the system spends as much on each as on copying a kilobyte.
LEAST_ROW_BYTES = 1024
_NONCE_BYTES = 16
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, -1


@dataclass(frozen=True, slots=True)
class Rows:
    """``num`` rows of ``num_bytes`` bytes in some process's memory, ``stride`` bytes from one to the next."""

    address: int
    num: int
    num_bytes: int
    stride: int

    @classmethod
    def of(cls, data: torch.Tensor) -> Rows:
        """``data``: uint8 on a CPU, contiguous or [rows, bytes of a row]."""
        if data.dim() == 1:
            return cls(data.data_ptr(), 1, len(data), 0)
        return cls(data.data_ptr(), len(data), data.shape[1], data.stride(0))

    def segments(self, first: int, count: int, size: int) -> npt.NDArray[np.uint64]:
        """[segments, (address, bytes)] of rows ``first ..`` of ``size`` bytes each."""
        if self.num == 1:
            return np.array([[self.address + first * size, count * size]], dtype=np.uint64)
        out = np.empty((count, 2), dtype=np.uint64)
        out[:, 0] = self.address + np.arange(first, first + count) * self.stride
        out[:, 1] = size
        return out


def read(pid: int, remote: Rows, local: Rows) -> None:
    """Bytes of process ``pid`` into this one's memory; one of the two may be in one piece. Raises OSError: ESRCH where
    the process is gone, EFAULT where its memory is, EPERM."""
    num, num_bytes = max(remote.num, local.num), local.num * local.num_bytes
    if remote.num * remote.num_bytes != num_bytes or num_bytes % num or min(remote.num, local.num) not in (1, num):
        raise OSError(errno.EINVAL, f"{remote.num} x {remote.num_bytes} bytes are sent, not {num_bytes}")
    size = num_bytes // num
    for first in range(0, num, _MOST):
        count = min(_MOST, num - first)
        into, out_of = local.segments(first, count, size), remote.segments(first, count, size)
        got = _readv()(pid, into.ctypes.data, len(into), out_of.ctypes.data, len(out_of), 0)
        if got != count * size:
            number = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))


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
        read(int(number), Rows(int(address), 1, _NONCE_BYTES, 0), Rows.of(found))
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
