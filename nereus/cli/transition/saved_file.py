"""The file of a saved transition: reading it, and saying what is wrong with it. Nothing here compiles."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

import nereus
from nereus.cli.errors import CommandError
from nereus.cli.output import FORMAT_VERSION
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity
from nereus.ir.plan import Plan
from nereus.lang.files import read_file

KIND = "transition"
_GZIP_MAGIC = b"\x1f\x8b"


def text_fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def model_fingerprints(old: Plan, new: Plan) -> dict[str, str]:
    """SHA-256 of what plan texts only name: data sheets behind the clusters, shapes behind the models."""
    return {
        "cluster": text_fingerprint(repr((old.cluster, new.cluster))),
        "models": text_fingerprint(repr([(m.name, m.arch, m.head, m.precision) for p in (old, new) for m in p.models])),
    }


def read_saved(path: str) -> dict[str, Any]:
    try:
        data = read_file(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot read {path}: {reason}") from None
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DiagnosticError([damaged(path, f"it cannot be unpacked: {error}")]) from None
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if data.lstrip().startswith(b"{") and b'"format_version"' in data[:200]:
            reason = str(error) or type(error).__name__
            raise DiagnosticError([damaged(path, f"it is not JSON: {reason}")]) from None
        raise DiagnosticError([foreign(path, "it is not JSON")]) from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        kind = document.get("kind") if isinstance(document, dict) else None
        what = f"it is a document of kind {kind!r}" if isinstance(kind, str) else "it is JSON of some other kind"
        raise DiagnosticError([foreign(path, what)])
    version = document.get("format_version")
    major = FORMAT_VERSION.split(".")[0]
    if not isinstance(version, str) or version.split(".")[0] != major:
        raise DiagnosticError(
            [
                file_error(
                    "NRS5503",
                    f"{path}: format version {version} is not one that this Nereus reads",
                    notes=(f"nereusc {nereus.__version__} reads versions {major}.x",),
                    help="Compile the transition again, or read it with the Nereus that wrote it.",
                )
            ]
        )
    return document


def entry_of(document: Mapping[str, Any], path: str, *keys: str, kind: type) -> Any:
    value: Any = document
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, kind):
        raise DiagnosticError([damaged(path, f"{'.'.join(keys)} is missing or of a wrong kind")])
    return value


def file_error(code: str, headline: str, *, notes: tuple[str, ...], help: str) -> Diagnostic:
    return Diagnostic(code=code, severity=Severity.ERROR, headline=headline, notes=notes, help=help)


def foreign(path: str, why: str) -> Diagnostic:
    return file_error(
        "NRS5501",
        f"{path} is not a saved transition",
        notes=(why,),
        help="Give it a file that `nereusc compile OLD NEW -o FILE` wrote.",
    )


def damaged(path: str, why: str) -> Diagnostic:
    return file_error(
        "NRS5502", f"{path} is damaged", notes=(why,), help="Compile the transition again from its two plans."
    )
