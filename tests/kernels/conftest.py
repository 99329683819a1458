"""Triton's own library is made to be interpreted or compiled when it is imported, so this comes before that."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
