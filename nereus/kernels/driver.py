"""Loads what ``source.py`` compiled and launches it through the driver's own interface, CUDA's or HIP's.

Both take the same arguments under other names. torch made the context and owns the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch

from nereus.kernels.regions import Plan, addresses, place
from nereus.kernels.source import image

#: Threads of a block; of those, how many share a tile is the architecture's affair.
_THREADS = 256
_CUDA = ("libcuda.so.1", "libcuda.so")
_HIP = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")


class DriverError(RuntimeError):
    """The driver is not there or refused a call; the text says which and with which code."""


class Source:
    """``regions.cu`` on one device. ``launch`` adds the checksums to ``sums``; arguments were checked."""

    name = "source"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.hip = torch.version.hip is not None
        if self.hip:
            self.arch = properties.gcnArchName.split(":")[0]
        else:
            self.arch = f"sm_{properties.major}{properties.minor}"
        # CDNA and GCN run 64 threads in step, RDNA and NVIDIA's 32: as LANES in regions.cu.
        self.lanes = 64 if self.arch.startswith("gfx9") else 32
        self.library = _open(_HIP if self.hip else _CUDA)

    def launch(self, what: Plan, bases: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> None:
        at = place(what, self.device)
        num_tiles = len(at.region_of)
        if not num_tiles:
            return
        pointers = torch.from_numpy(addresses(bases)).to(self.device)
        arguments = [
            ctypes.c_void_p(at.table.data_ptr()),
            ctypes.c_void_p(at.region_of.data_ptr()),
            ctypes.c_void_p(at.number_of.data_ptr()),
            ctypes.c_int64(num_tiles),
            ctypes.c_void_p(pointers.data_ptr()),
            ctypes.c_void_p(0 if sums is None else sums.data_ptr()),
        ]
        given = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        per_block = _THREADS // self.lanes
        blocks = (num_tiles - 1) // per_block + 1
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
            self._call("LaunchKernel", self._function, *grid, *block, 0, stream, given, None)

    @cached_property
    def _function(self) -> ctypes.c_void_p:
        """In the context that torch uses on the device."""
        code = image(self.arch)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # torch makes its context at first use
            self._call("ModuleLoadData", ctypes.byref(module), code)
            self._call("ModuleGetFunction", ctypes.byref(function), module, b"nereus_regions")
        return function

    def _call(self, name: str, *arguments: object) -> None:
        if self.hip:
            name = {"LaunchKernel": "ModuleLaunchKernel"}.get(name, name)
        symbol = ("hip" if self.hip else "cu") + name
        code = getattr(self.library, symbol)(*arguments)
        if code:
            raise DriverError(f"{symbol} returned {code}")


def _open(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError(f"no driver: none of {', '.join(names)} can be loaded")
