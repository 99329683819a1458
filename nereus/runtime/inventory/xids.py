"""XIDs: errors that NVIDIA's driver reports as they happen, by NVML's events.

    with Xids() as xids:
        ...
        problems_of(nvidia_gpus(), xids.seen())

Some of them an application brings about by itself (a bad pointer, a context that is torn down). Kubernetes' device
plugin leaves those out when it judges a GPU, and so does this.
"""

from __future__ import annotations

from types import TracebackType

from nereus.runtime.inventory.gpus import NotThere

#: Graphics engine, page fault, stopped processing, cleanup, video processor, context switch.
APPLICATION = frozenset({13, 31, 43, 45, 68, 109})


class Xids:
    """Listens from now on. Raises NotThere."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise NotThere("nvidia-ml-py is not installed", extra="gpu") from None
        self._nvml, self._seen = pynvml, dict[int, tuple[int, ...]]()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NotThere(f"NVML does not start: {error}") from None
        try:
            self._events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                if pynvml.nvmlDeviceGetSupportedEventTypes(device) & pynvml.nvmlEventTypeXidCriticalError:
                    pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise NotThere(f"NVML has no events: {error}") from None

    def seen(self) -> dict[int, tuple[int, ...]]:
        """Those of each GPU so far, without the applications' own. Does not wait."""
        nvml = self._nvml
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout: there are no more
                return dict(self._seen)
            if event.eventType == nvml.nvmlEventTypeXidCriticalError and event.eventData not in APPLICATION:
                index = nvml.nvmlDeviceGetIndex(event.device)
                self._seen[index] = tuple(dict.fromkeys((*self._seen.get(index, ()), int(event.eventData))))

    def close(self) -> None:
        self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()

    def __enter__(self) -> Xids:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
