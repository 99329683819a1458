"""NVIDIA GPUs from NVML, the library that every driver brings (``libnvidia-ml.so.1``): its C interface, by ctypes.

What a GPU does not support (ECC on a consumer part, clocks in a virtual machine) is None. Numbers are those of
``nvml.h``, which NVIDIA keeps.
"""

from __future__ import annotations

import ctypes
from typing import Any

from nereus.runtime.inventory.gpus import Gpu, NotThere

LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK, _GPU_SENSOR, _UNCORRECTED, _SINCE_LOADED = 1, 0, 1, 0
#: Reasons for a lower clock that hint at a fault: of ``nvmlClocksEventReason*``.
_SLOWED = {
    0x08: "slowed by hardware",
    0x20: "slowed by software: too hot",
    0x40: "slowed by hardware: too hot",
    0x80: "slowed by hardware: power brake",
}
_NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvidia_gpus(library: str = LIBRARY) -> tuple[Gpu, ...]:
    """All that the driver shows to this process. Raises NotThere."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        raise NotThere("no NVIDIA driver") from None
    if code := nvml.nvmlInit_v2():
        raise NotThere(f"NVML does not start (error {code})")
    try:
        count = ctypes.c_uint()
        if code := nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            raise NotThere(f"NVML counts no devices (error {code})")
        return tuple(_gpu(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    for code in (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)),
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
    ):
        if code:
            raise NotThere(f"NVML does not tell of GPU {index} (error {code})")
    reasons = _number(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, into=ctypes.c_ulonglong()) or 0
    return Gpu(
        index=index,
        name=name.value.decode("ascii", "replace"),
        total_bytes=memory.total,
        used_bytes=memory.used,
        clock_mhz=_number(nvml, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
        max_clock_mhz=_number(nvml, "nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
        celsius=_number(nvml, "nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
        slowed=tuple(text for bit, text in _SLOWED.items() if reasons & bit),
        uncorrected=_number(
            nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOADED, into=ctypes.c_ulonglong()
        ),
    )


def _number(nvml: Any, function: str, handle: Any, *of: int, into: Any = None) -> int | None:
    """What a function writes behind its last argument; None where it does not answer."""
    into = ctypes.c_uint() if into is None else into
    if not hasattr(nvml, function):
        return None
    code = getattr(nvml, function)(handle, *(ctypes.c_uint(word) for word in of), ctypes.byref(into))
    return None if code else int(into.value)
