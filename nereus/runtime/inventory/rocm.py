"""AMD GPUs from ROCm SMI (``librocm_smi64.so``): its C interface, by ctypes. Numbers are those of ``rocm_smi.h``."""

from __future__ import annotations

import ctypes
from typing import Any

from nereus.runtime.inventory.gpus import Gpu, NotThere

LIBRARIES = ("librocm_smi64.so", "librocm_smi64.so.7", "librocm_smi64.so.6", "librocm_smi64.so.5")
_VRAM, _EDGE, _JUNCTION, _CURRENT = 0, 0, 1, 0
#: The block of the memory controllers, whose errors are the memory's.
_UMC = 1
_NAME_BYTES = 128


class _Errors(ctypes.Structure):
    # Newer versions append a count; there is room for it.
    _fields_ = (("correctable", ctypes.c_uint64), ("uncorrectable", ctypes.c_uint64), ("more", ctypes.c_uint64 * 2))


def amd_gpus(*libraries: str) -> tuple[Gpu, ...]:
    """All that the driver shows to this process. Raises NotThere."""
    smi = _load(libraries or LIBRARIES)
    if code := smi.rsmi_init(ctypes.c_uint64(0)):
        raise NotThere(f"ROCm SMI does not start (error {code})")
    try:
        count = ctypes.c_uint32()
        if code := smi.rsmi_num_monitor_devices(ctypes.byref(count)):
            raise NotThere(f"ROCm SMI counts no devices (error {code})")
        return tuple(_gpu(smi, index) for index in range(count.value))
    finally:
        smi.rsmi_shut_down()


def _load(libraries: tuple[str, ...]) -> Any:
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError:
            continue
    raise NotThere("no AMD driver")


def _gpu(smi: Any, index: int) -> Gpu:
    at, name = ctypes.c_uint32(index), ctypes.create_string_buffer(_NAME_BYTES)
    total, used = ctypes.c_uint64(), ctypes.c_uint64()
    for code in (
        smi.rsmi_dev_name_get(at, name, ctypes.c_size_t(_NAME_BYTES)),
        smi.rsmi_dev_memory_total_get(at, ctypes.c_int(_VRAM), ctypes.byref(total)),
        smi.rsmi_dev_memory_usage_get(at, ctypes.c_int(_VRAM), ctypes.byref(used)),
    ):
        if code:
            raise NotThere(f"ROCm SMI does not tell of GPU {index} (error {code})")
    return Gpu(
        index=index,
        name=name.value.decode("utf-8", "replace"),
        total_bytes=total.value,
        used_bytes=used.value,
        celsius=_celsius(smi, at),
        uncorrected=_uncorrected(smi, at),
    )


def _celsius(smi: Any, at: ctypes.c_uint32) -> int | None:
    """The edge's; parts without that sensor have the junction's."""
    for sensor in (_EDGE, _JUNCTION):
        found = ctypes.c_int64()
        if not smi.rsmi_dev_temp_metric_get(at, ctypes.c_uint32(sensor), ctypes.c_int(_CURRENT), ctypes.byref(found)):
            return found.value // 1000  # is in thousandths
    return None


def _uncorrected(smi: Any, at: ctypes.c_uint32) -> int | None:
    errors = _Errors()
    if smi.rsmi_dev_ecc_count_get(at, ctypes.c_uint64(_UMC), ctypes.byref(errors)):
        return None
    return int(errors.uncorrectable)
