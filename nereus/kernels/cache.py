"""Compiled kernels in the user's cache folder: built once, whole or not there, and by nobody else."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path


def source(name: str) -> bytes:
    """A source file of this package with its headers in place of their ``#include``, so that it is one file."""
    text = resources.files("nereus.kernels").joinpath(name).read_bytes()
    for header in ("sums.h", "cells.h"):
        line = f'#include "{header}"'.encode()
        if line in text:
            text = text.replace(line, source(header))
    return text


def cached(stem: str, suffix: str, material: bytes, make: Callable[[Path], Path]) -> Path | None:
    """``make(folder)`` writes a file into an empty folder and says which; it is kept for the same ``material`` on this
    kind of machine. None where others could have put code there. Raises what ``make`` raises, and OSError."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nereus"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(material + platform.machine().encode() + platform.platform().encode()).hexdigest()[:16]
    path = folder / f"{stem}-{name}{suffix}"
    if not _is_ours(folder):
        return None
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            os.replace(make(Path(work)), path)  # whole, or not there, also for other processes
    return path if _is_ours(path) else None


def _is_ours(path: Path) -> bool:
    """Nobody else can have put code there."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
