"""NVIDIA GPUs from NVML, by NVIDIA's own bindings (nvidia-ml-py). What a GPU does not support (ECC on a consumer part,
clocks in a virtual machine) is None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nereus.runtime.inventory.gpus import Gpu, NotThere

#: Reasons for a lower clock that hint at a fault, by their names in pynvml.
_SLOWED = {
    "nvmlClocksThrottleReasonHwSlowdown": "slowed by hardware",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "slowed by software: too hot",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "slowed by hardware: too hot",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "slowed by hardware: power brake",
}


def nvidia_gpus() -> tuple[Gpu, ...]:
    """All that the driver shows to this process. Raises NotThere."""
    try:
        import pynvml
    except ImportError:
        raise NotThere("nvidia-ml-py is not installed", extra="gpu") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        raise NotThere("no NVIDIA driver") from None
    except pynvml.NVMLError as error:
        raise NotThere(f"NVML does not start: {error}") from None
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise NotThere(f"NVML does not tell of all GPUs: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)

    def told(function: Callable[..., int], *of: int) -> int | None:
        try:
            return int(function(handle, *of))
        except nvml.NVMLError:
            return None

    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError:
        pending = failed = 0
    reasons = told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    return Gpu(
        index=index,
        name=name.decode("ascii", "replace") if isinstance(name, bytes) else name,
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        clock_mhz=told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        max_clock_mhz=told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        celsius=told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowed=tuple(text for reason, text in _SLOWED.items() if reasons & getattr(nvml, reason)),
        uncorrected=told(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap="row remapping failed" if failed else "bad memory rows wait for a reset" if pending else None,
    )
