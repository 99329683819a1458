"""``python -m nereus.runtime.session.store [PORT]``: keeps a job's store, or one of several (``replicated.py``).

At that port of all addresses of this machine until it is ended; without one at any port, until stdin closes. Says its
port on stdout."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import Any

import torch.distributed

from nereus.runtime.faults import first_line

#: Untyped in part.
dist: Any = torch.distributed


def main() -> None:
    asked = sys.argv[1] if len(sys.argv) > 1 else "0"
    if len(sys.argv) > 2 or not asked.isdigit() or int(asked) >= 1 << 16:
        raise SystemExit(f"usage: python -m nereus.runtime.session.store [PORT], not {' '.join(sys.argv[1:])}")
    try:
        store = dist.TCPStore("127.0.0.1", int(asked), None, True, timedelta(days=1), wait_for_workers=False)
    except RuntimeError as error:
        raise SystemExit(f"no store at port {asked}: {first_line(error)}") from None
    print(store.port, flush=True)
    if asked == "0":
        sys.stdin.read()
    else:
        signal.pause()


if __name__ == "__main__":
    main()
