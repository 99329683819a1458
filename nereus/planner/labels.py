"""What runs have in common, as labels ``kind:value``; what is learned of one helps the others with the same label.

``cluster`` is where a row comes from (the repository that published it, or whatever the user writes into ``source``)
together with the GPU; ``set`` is finer: one document, GPU and number format.
"""

from __future__ import annotations

from collections.abc import Mapping

from nereus.ir.cluster import GpuType


def number_format(precision: str) -> str:
    """``16``, ``fp8`` or ``fp4``: what matrices are multiplied in."""
    word = precision.lower()
    if "fp4" in word:
        return "fp4"
    return "fp8" if "fp8" in word or word.startswith("mx") else "16"


def step_labels(source: str, gpu: GpuType, format: str, *, sharded: bool) -> tuple[str, ...]:
    """``sharded``: weights are gathered layer by layer."""
    publisher = _publisher(source)
    return (
        f"gpu:{gpu.id}",
        f"format:{format}",
        f"gpu-format:{gpu.id} {format}",
        f"publisher:{publisher}",
        f"cluster:{publisher} {gpu.id}",
        f"set:{_document(source)} {gpu.id} {format}",
        f"sharding:{publisher} {'full' if sharded else 'part'}",
    )


def engine_labels(engine: str, model: str, gpu: GpuType, format: str) -> tuple[str, ...]:
    return (
        f"gpu:{gpu.id}",
        f"engine:{engine}",
        f"cluster:{engine} {gpu.id} {format}",
        f"set:{engine} {gpu.id} {model}",
    )


def memory_labels(cells: Mapping[str, str], gpu: GpuType, format: str) -> tuple[str, ...]:
    source, reading = cells.get("source", ""), memory_reading(cells.get("mem_basis", ""))
    publisher = _publisher(source)
    return (
        f"reading:{reading}",
        f"publisher:{publisher}",
        f"cluster:{publisher} {gpu.id}",
        f"set:{publisher} {reading} {cells['precision']} {cells.get('zero_dist_opt', '')}",
    )


def _publisher(source: str) -> str:
    return source.partition(" ")[0].partition(",")[0]


def _document(source: str) -> str:
    """The publisher and the document's name, without version, section or line."""
    name = source.partition(",")[0].partition("@")[0].strip()
    return f"{_publisher(source)} {name.rsplit('/', 1)[-1].partition(' ')[0]}"


def memory_reading(basis: str) -> str:
    """How memory was read: by the framework's allocator, as it reserved it, or of the whole device."""
    word = basis.lower()
    if "allocated" in word or "sum of" in word:
        return "allocated"
    if "reserved" in word:
        return "reserved"
    if "device" in word or "percent" in word:
        return "device"
    return "unstated"
