"""A folder appears whole or not at all: it is written under another name beside its target and renamed at the end.

An older folder under the target's name stays in place until then, and is exchanged in one step where the kernel and
the file system can (Linux; most local file systems). Elsewhere it is moved aside first, so a process that is killed
between two renames leaves it whole under the name that ``missing`` finds.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

_SAVING, _REPLACED = "saving", "replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def begin(target: Path) -> Path:
    """A new empty folder beside ``target`` to write into."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{_SAVING}-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    return folder


def publish(folder: Path, target: Path, *, carry: Callable[[str], bool] = lambda name: False) -> None:
    """``folder`` becomes ``target``. Files of the old target that ``carry`` accepts by name and the new folder lacks
    come along (tokenizer files, say); the rest of the old one is removed after the change."""
    if target.is_dir():
        for path in sorted(target.iterdir()):
            if path.is_file() and carry(path.name) and not (folder / path.name).exists():
                shutil.copy2(path, folder / path.name)
                _sync(folder / path.name)
    _sync(folder)
    old: Path | None = None
    if target.exists():
        if _exchange(folder, target):
            old = folder
        else:
            old = target.parent / f".{target.name}.{_REPLACED}-{uuid.uuid4().hex[:12]}"
            target.rename(old)
            folder.rename(target)
    else:
        folder.rename(target)
    _sync(target.parent)
    if old is not None:
        discard(old)


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def leftovers(target: Path) -> tuple[Path, ...]:
    """Folders that saves to ``target`` left when they were killed. None of them is in use unless a save runs now."""
    if not target.parent.is_dir():
        return ()
    return tuple(
        sorted(p for kind in (_SAVING, _REPLACED) for p in target.parent.glob(f".{target.name}.{kind}-*") if p.is_dir())
    )


def missing(target: Path) -> str:
    """What to say where ``target`` does not exist: an older one may lie beside it."""
    aside = [path for path in leftovers(target) if f".{_REPLACED}-" in path.name]
    if aside:
        return f"{target} does not exist; a save was killed at its end and the checkpoint before it is {aside[-1]}"
    return f"{target} does not exist"


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where that is not possible here."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _sync(path: Path) -> None:
    """A folder or a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems do not sync folders
        pass
    finally:
        os.close(descriptor)
