"""Staging that is used again: memory that is touched for the first time costs more than what is copied through it."""

from __future__ import annotations

import torch

from nereus.runtime.state import fresh_bytes


class Staging:
    """Never holds more than was in use at one time. Not for two threads."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._used_bytes = self._most_bytes = 0

    @property
    def free_bytes(self) -> int:
        return sum(map(len, self._free))

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8, ``num_bytes`` or more, with anything in it. RuntimeError or MemoryError where there is none."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        fits = [data for data in self._free if len(data) >= num_bytes]
        if fits:
            data = min(fits, key=len)
            self._free = [other for other in self._free if other is not data]
        else:
            self._shrink(num_bytes)
            data = fresh_bytes(num_bytes)
        self._used_bytes += len(data)
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        return data

    def give(self, data: torch.Tensor) -> None:
        """Back, from ``take``."""
        self._used_bytes -= len(data)
        if len(data):
            self._free.append(data)

    def clear(self) -> None:
        self._free.clear()

    def _shrink(self, num_bytes: int) -> None:
        """Room for what is about to come: the smallest go first, which fit the fewest."""
        self._free.sort(key=len)
        while self._free and self._used_bytes + num_bytes + self.free_bytes > max(
            self._most_bytes, self._used_bytes + num_bytes
        ):
            self._free.pop(0)
