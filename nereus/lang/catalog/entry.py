"""What ``nereusc explain`` knows about a code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeEntry:
    """``example``: file name -> text of a bad input. ``command`` is given its first file (``diff`` its first two).

    A test runs every ``check`` example and expects ``code``.
    """

    code: str
    title: str
    cause: str
    example: Mapping[str, str]
    command: str = "check"  # check | diff | show | import | run
    fix: str
    #: File that the command is given when it is not the first.
    compiles: str | None = None
    #: What the command needs beside its files.
    options: tuple[str, ...] = ()
    #: False: no input alone brings it about, and the example only shows where it may come up.
    shown: bool = True
    #: How the example is written to disk; only a code about encodings needs another.
    encoding: str = "utf-8"


def plan(
    *stages: str,
    cluster: str = 'node n[0-1] { gpus = 8 x "h100-sxm-80gb" }',
    models: str = 'model actor = "llama-3.1-8b"',
    workload: str = "algorithm = sft  prompts = 512  mini_batch = 128",
) -> str:
    """A small plan around the stages of an example."""
    return "\n".join([f"cluster {{ {cluster} }}", models, f"workload {{ {workload} }}", *stages]) + "\n"


def one(
    *stages: str, cluster: str | None = None, models: str | None = None, workload: str | None = None
) -> dict[str, str]:
    """``plan`` as the only file of an example."""
    given = {"cluster": cluster, "models": models, "workload": workload}
    return {"job.plan": plan(*stages, **{key: text for key, text in given.items() if text is not None})}
