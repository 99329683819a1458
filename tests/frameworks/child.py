"""One process of ``harness.run``: joins the others, calls the function, leaves its result in a file."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

#: No collective of a test takes this long; a rank whose peer is gone gives up after it.
GROUP_TIMEOUT = datetime.timedelta(seconds=60)
#: Nor does any import, even on a busy machine.
START_S = 300.0


def main(folder: Path, rank: int, environ: dict[str, str]) -> None:
    os.setsid()  # it is killed with all that it started
    # A file, not a pipe: a pipe that nobody empties would stop a talkative framework.
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environ)
    # The machine must be clean even after pytest itself was killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    faulthandler.enable()
    (name, path, qualname), world_size, init = pickle.loads((folder / "job").read_bytes())
    function: Any = _module(name, path)
    for part in qualname.split("."):
        function = getattr(function, part)
    args = pickle.loads((folder / "args").read_bytes())
    store = _join(folder, rank, world_size) if init else None
    _leave(folder, rank, function(rank, world_size, *args))
    if store is not None:
        # Rank 0 serves the store: it stays until the others need it no more.
        store.set(f"done/{rank}", "1")
        if rank == 0:
            store.wait([f"done/{r}" for r in range(world_size)])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the frameworks' exit hooks: some wait for peers that are gone already.
    os._exit(0)


def _module(name: str, path: str) -> ModuleType:
    """The module of ``path`` under the name that it has in the parent, so that its classes unpickle."""
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is not None and found.origin is not None and Path(found.origin).resolve() == Path(path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _join(folder: Path, rank: int, world_size: int) -> Any:
    import torch.distributed as dist

    address = folder / "port"
    if rank == 0:
        # The system picks the port, so that no other process can take it between the choice and its use.
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, GROUP_TIMEOUT, wait_for_workers=False)
        _write(address, str(store.port).encode())
    else:
        _until(address.exists)
        store = dist.TCPStore(
            "127.0.0.1", int(address.read_text()), world_size, False, GROUP_TIMEOUT, wait_for_workers=False
        )
    os.environ["MASTER_PORT"] = address.read_text()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    return store


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 did not open its store")
        time.sleep(0.01)


def _leave(folder: Path, rank: int, result: Any) -> None:
    _write(folder / f"result-{rank}", pickle.dumps(result))


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)
