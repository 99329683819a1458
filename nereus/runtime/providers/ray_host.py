"""One process of a job, as a Ray actor: what runs on the other side of ``RayActors``."""

from __future__ import annotations

import importlib
import os
import socket
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from nereus.runtime.codec import decode

#: Words of a host about itself: (host, pid), and which of its machine's accelerators Ray gave it, if Ray counts them.
Identity = tuple[str, int, str]


class Host:
    """Runs ``target`` once, and then is of no more use: frameworks leave state behind."""

    def identity(self) -> Identity:
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids()
        return socket.gethostname(), os.getpid(), next((i[0] for i in ids.values() if i), "")

    def run(self, target: str, job: Mapping[str, Any], args: bytes) -> None:
        """``args``: encoded. An exception goes to the provider; so does the end of the process."""
        import torch
        import torch.distributed

        from nereus.runtime.session.local import asking
        from nereus.runtime.session.members import telling
        from nereus.runtime.session.record import Record

        dist: Any = torch.distributed
        torch.set_num_threads(1)
        module, _, function = target.partition(":")
        store = dist.TCPStore(
            job["address"], job["port"], None, False, timedelta(seconds=job["start_s"]), wait_for_workers=False
        )
        record = Record(store, job["name"], 0)
        try:
            with telling(record):
                work = getattr(importlib.import_module(module), function)
                more = {"part": job["part"]} if "part" in job else {}
                work(store=store, device=job["device"], spawn=asking(record), **more, **decode(args))
        except Exception:  # as text: the driver may not have the framework whose error it is
            raise RuntimeError(traceback.format_exc()) from None
