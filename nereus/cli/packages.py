"""Versions of installed packages, read from their metadata: nothing is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version(*names: str) -> str | None:
    """Version of the first of ``names`` that is installed (a project may be published under several)."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
