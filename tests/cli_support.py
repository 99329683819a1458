"""What tests of ``nereusc`` share: a run and its result, JSON Schemas, a plan without a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

SCHEMAS = Path(__file__).resolve().parents[1] / "nereus" / "cli" / "schemas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        """The document on stdout, checked against its schema."""
        document = json.loads(self.stdout)
        check_schema(document, document["kind"])
        return document


def check_schema(document: Any, name: str) -> None:
    loaded = [json.loads(path.read_text()) for path in sorted(SCHEMAS.glob("*.json"))]
    registry: Registry = Registry().with_resources([(s["$id"], Resource.from_contents(s)) for s in loaded])
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema, registry=registry).validate(document)


def spawn(argv: Sequence[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, **options: Any) -> Ran:
    """``nereusc`` as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "nereus.cli.main", *argv],
        input=stdin,
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
        **options,
    )
    return Ran(code=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode())


#: Small, complete and without a fault.
GOOD_PLAN = """\
cluster {
  node n[0-1] { gpus = 8 x "h100-sxm-80gb" }
}
model actor = "qwen2.5-7b"
workload {
  algorithm = grpo
  prompts = 64  samples = 8  mini_batch = 256
  prompt_len = 1024  response_len = 2048
}
stage actor.generate { on = n[0-1].gpu[0-7]  tp = 2  engine = vllm  kv_cache = 20 GiB  idle = offload }
stage actor.train { on = n[0-1].gpu[0-7]  tp = 2  pp = 2  backend = megatron  optimizer = adam  recompute = full }
"""


#: A pair of plans in tests/plans whose transition is small and has relays.
SAVED_PAIR = ("overlap-before.plan", "overlap-after.plan")


def change_document(path: Path, edit: Callable[[dict[str, Any]], None]) -> str:
    """``path``, whose document ``edit`` has changed."""
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return str(path)
