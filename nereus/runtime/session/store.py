"""``python -m nereus.runtime.session.store``: keeps a job's store until stdin closes; says its port on stdout."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed

#: Untyped in part.
dist: Any = torch.distributed


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(days=1), wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
