"""FP8 weights of a stage that does not train: its degrees may not cut the 128 x 128 blocks that share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nereus.ir.plan import Model, Slot
from nereus.lang.degrees import DegreeChecker
from nereus.models.fp8 import BLOCK, fp8_refusals, legal_fp8_etp, legal_fp8_tp


def check_fp8(checker: DegreeChecker, model: Model, kind: str, fields: Mapping[str, Any]) -> None:
    """``fields``: those of a stage whose degrees are known."""
    slots: tuple[Slot, ...] = fields.get("slots") or ()
    if kind == "train" or not any(slot.name == "weight" and slot.dtype == "fp8" for slot in slots):
        return
    arch, tp = model.arch, fields["tp"]
    # Without expert parallelism experts are cut like everything else, in an engine whatever the plan says.
    follows = fields["ep"] == 1 and (fields["etp"] == tp or (kind == "generate" and fields["etp"] == 1))
    etp = None if follows else fields["etp"]
    backend, engine = fields.get("backend"), fields.get("engine")
    form = "stripes" if backend == "megatron" else "segments"
    legal_tp = partial(legal_fp8_tp, arch, head=model.head, form=form, backend=backend if form == "stripes" else engine)
    reasons = fp8_refusals(arch, tp=tp, etp=etp, form=form)
    if not reasons:
        return
    by_tp = legal_tp(etp=etp)
    legal = ", ".join(map(str, by_tp)) or "none"
    notes = [*reasons, f"legal tp: {legal}"]
    degrees = f"tp = {tp}"
    if not follows and arch.moe is not None:
        degrees += f", etp = {etp}"
        notes.append(f"legal etp: {', '.join(map(str, legal_fp8_etp(arch, form=form))) or 'none'}")
    elif follows and arch.moe is not None:
        apart = legal_tp(etp=1)
        notes.append(f"with ep above 1, which leaves experts whole: {', '.join(map(str, apart)) or 'none'}")
    checker.error(
        "NRS3027",
        f"{degrees} cuts fp8 blocks of {model.source or model.name}",
        ("tp", "etp", "with", "state"),
        f"blocks of {BLOCK} x {BLOCK} share a scale",
        notes=tuple(notes),
        help="use one of the legal degrees, or bf16 weights",
    )
