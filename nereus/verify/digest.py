"""Fingerprints of the plans in the document, and the digest of what participants would execute."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from nereus.ir.plan import Plan
from nereus.verify.document import Document
from nereus.verify.finding import Violation


def check_texts(document: Document) -> str:
    """Each plan's text is the one that was saved."""
    for side, text in document.texts.items():
        found = hashlib.sha256(text.encode()).hexdigest()
        if found != document.fingerprints[f"{side}_plan"]:
            raise Violation(f"the {side} plan's text is not the one that was saved: its SHA-256 is {found[:16]}...")
    return f"both texts as saved: {document.fingerprints['old_plan'][:8]}, {document.fingerprints['new_plan'][:8]}"


def check_names(document: Document, old: Plan, new: Plan) -> str:
    """What the plans only name, machines by data sheet and models by preset, is what it was."""
    models = [(m.name, m.arch, m.head, m.precision) for plan in (old, new) for m in plan.models]
    for name, value in (("cluster", repr((old.cluster, new.cluster))), ("models", repr(models))):
        if hashlib.sha256(value.encode()).hexdigest() != document.fingerprints[name]:
            raise Violation(f"what the plans name as {name} is not what it was when the document was written")
    return f"{len(models)} models and {len(new.cluster.nodes)} nodes as they were"


def document_digest(document: Document, old: Plan, new: Plan) -> str:
    """SHA-256 over both plans, every move with its waves, its region's SHA-256, and storages' waves."""
    moves, regions = document.moves, document.regions
    digest = hashlib.sha256()
    for plan in (old, new):
        digest.update(repr(replace(plan, path="")).encode())
    if document.same:
        digest.update(repr(document.same).encode())
    digest.update(document.mode.encode())
    lengths = (regions.first[1:] - regions.first[:-1])[moves.region]
    columns = [moves.wave, moves.src, moves.dst, moves.table, moves.num_bytes, moves.slots, lengths]
    if moves.sliced:
        columns.insert(1, moves.slices)
    digest.update(np.stack(columns, axis=1).tobytes() if len(moves) else b"")
    parts: dict[int, bytes] = {}
    for region in np.unique(moves.region).tolist():
        rows = slice(int(regions.first[region]), int(regions.first[region + 1]))
        content = b"".join(column[rows].tobytes() for column in (regions.cell, regions.start, regions.stop))
        parts[region] = hashlib.sha256(content).digest()
    digest.update(b"".join(parts[region] for region in moves.region.tolist()))
    for entry in sorted((*document.acquire.items(), *document.release.items())):
        digest.update(repr(entry).encode())
    for passing in sorted(document.staged.items()):
        digest.update(repr(passing).encode())
    return digest.hexdigest()


def check_digest(document: Document, old: Plan, new: Plan) -> str:
    found = document_digest(document, old, new)
    if found != document.digest:
        raise Violation(
            f"plans and schedule have the digest {found[:16]}..., the document says {document.digest[:16]}..."
        )
    if document.certificate.get("digest") != found:
        raise Violation("the certificate is about another digest than the document's")
    return found
