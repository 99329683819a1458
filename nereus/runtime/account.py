"""What a transition cost on this process's devices: exact bytes, not samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.ir.cluster import Device


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
    phases_s: tuple[tuple[str, float], ...]
    #: Received by reading the sender's memory, and why other processes of this host were reached over gloo.
    direct_bytes: int = 0
    notes: tuple[str, ...] = ()
    #: (slot, tensors) of live moves: held before, wanted by nobody, and said to be dropped.
    dropped: tuple[tuple[str, int], ...] = ()

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

    def add(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


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
