"""Every diagnostic code with its cause, a bad example and the cure.

A module of this package lists entries as ``ENTRIES``; to add codes, add to the module of their hundred or write a new
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from nereus.lang.catalog.entry import CodeEntry

__all__ = ["CATALOG", "CodeEntry"]


def _collect() -> Mapping[str, CodeEntry]:
    found: dict[str, CodeEntry] = {}
    for module in sorted(iter_modules(__path__), key=lambda m: m.name):
        if module.name == "entry":
            continue
        for entry in import_module(f"{__name__}.{module.name}").ENTRIES:
            assert entry.code not in found, f"{entry.code} stands in the catalog twice"
            found[entry.code] = entry
    return MappingProxyType(dict(sorted(found.items())))


CATALOG: Mapping[str, CodeEntry] = _collect()
