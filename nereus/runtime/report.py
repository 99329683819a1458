"""What a run has shown."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.diagnostic import Diagnostic


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One transition of a run. Bytes are exact; ``predicted_*`` are what was compiled for the plans that ran."""

    old: str
    new: str
    mode: str
    num_devices: int
    num_waves: int
    num_messages: int
    moved_bytes: int
    predicted_moved_bytes: int
    bytes_by_link: tuple[tuple[str, int], ...]
    copied_bytes: int  # inside devices: repacked or derived
    seconds: float  # slowest process, from the agreement on the digest to the commit
    phases_s: tuple[tuple[str, float], ...]  # slowest process each
    peak_bytes: int  # storages and staging of the fullest device
    predicted_peak_bytes: int  # of the same device
    peak_device: str
    num_shards: int
    num_elements: int
    num_bytes: int  # checked
    num_fresh: int  # (stage, slot) pairs that no transition could fill
    check_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """``old_whole``: after a failure, whether every old element was found untouched; None if all went well."""

    ok: bool
    transport: str
    num_processes: int
    scale: str
    models: tuple[str, ...]
    steps: tuple[StepReport, ...]
    diagnostics: tuple[Diagnostic, ...]
    compile_s: float
    fill_s: float
    total_s: float
    peak_rss_bytes: int | None  # of the fullest process
    old_whole: bool | None = None
