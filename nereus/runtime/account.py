"""What a transition cost on this process's devices: exact bytes, not samples."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.program import NUM_COLS, NUM_ROWS, STORAGE, Program
from nereus.ir.units import DTYPE_BYTES


@dataclass(slots=True)
class Account:
    """Bytes of one device now and at most. Storages in host memory are counted apart; staging lies on the device.

    Staging is payload: the 8 bytes of checksum per message are not in it, nor a message that needs no staging because
    it is one run of a storage.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    staging_bytes: int = 0
    peak_bytes: int = 0
    peak_host_bytes: int = 0
    peak_staging_bytes: int = 0

    def add(self, num_bytes: int, *, host: bool) -> None:
        if host:
            self.host_bytes += num_bytes
        else:
            self.device_bytes += num_bytes
        self._note()

    def stage(self, num_bytes: int) -> None:
        """``num_bytes`` of staging come, or go where negative."""
        self.staging_bytes += num_bytes
        self._note()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.device_bytes + self.staging_bytes)
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)


def promised_peak(program: Program) -> int:
    """Most bytes of storages and staging on the device at any time of a program, from the program alone: every message
    of a wave staged whole on both sides."""
    size = [0 if spec.host else spec.numel * DTYPE_BYTES[spec.dtype] for spec in program.storages]
    widths = np.array([DTYPE_BYTES[spec.dtype] for spec in program.storages], dtype=np.int64)
    now = sum(size[spec.id] for spec in program.storages if spec.role in ("old", "kept"))
    peak = now
    for wave in program.waves:
        now += sum(size[number] for number in wave.acquire)
        tables = [message.blocks.table for message in (*wave.sends, *wave.receives)]
        staged = sum(int((t[:, NUM_ROWS] * t[:, NUM_COLS] * widths[t[:, STORAGE]]).sum()) for t in tables)
        # A piece of staging begins on 8 bytes.
        peak = max(peak, now + staged + 8 * sum(map(len, tables)))
        if program.mode == "tight":
            now -= sum(size[number] for number in wave.release)
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """``accounted``: bytes let go at the commit; ``read``: how much less the process has resident since, as the system
    says, None where it does not. Memory that something else still holds, or that an allocator keeps, shows here."""

    accounted: int
    read: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """One process's part of a transition. ``received``: bytes by message tag, each verified."""

    seconds: float
    sent_bytes: int
    received: tuple[tuple[int, int], ...]
    copied_bytes: int
    #: (device, peak bytes of storages and staging on it, peak bytes in host memory, peak staging)
    peaks: tuple[tuple[Device, int, int, int], ...]
    num_messages: int
    #: (device, bytes that its program needs at most): no peak is above.
    promised: tuple[tuple[Device, int], ...]
    released: Released
    phases_s: tuple[tuple[str, float], ...]
    #: Received by reading the sender's memory, and why other processes of this host were reached over TCP.
    direct_bytes: int = 0
    notes: tuple[str, ...] = ()
    #: (slot, tensors) of live moves: held before, wanted by nobody, and said to be dropped.
    dropped: tuple[tuple[str, int], ...] = ()

    @property
    def within_promise(self) -> bool:
        """Whether no device held more than its program promises."""
        promised = dict(self.promised)
        return all(peak <= promised[device] for device, peak, _, _ in self.peaks)

    @property
    def received_bytes(self) -> int:
        return sum(size for _, size in self.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``wave`` of ``num_waves`` is done; bytes received by this process so far."""

    wave: int
    num_waves: int
    received_bytes: int


@dataclass(slots=True)
class Stopwatch:
    """Seconds by phase."""

    phases: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    def add(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


def resident_bytes() -> int | None:
    """Memory that this process has now; None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def peak_rss_bytes() -> int | None:
    """Most resident memory this process ever had, or since ``reset_peak_rss``; None where the system does not say."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def reset_peak_rss() -> None:
    """Forget earlier peaks (a forked process inherits its parent's). Does nothing where the system does not let us."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return
