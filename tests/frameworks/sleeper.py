"""A process that never ends, and a child of its own. Imports nothing slow, so that its start takes no time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def sleep(rank: int, world_size: int, folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"pid-{rank}").write_text(str(child.pid))
    print("asleep", rank)
    time.sleep(600)
