"""``lora { rank  alpha  targets }`` of a model block -> ``Lora``."""

from __future__ import annotations

from nereus.ir.arch import Arch, Lora
from nereus.ir.diagnostic import Fix
from nereus.lang import schema
from nereus.lang.merge import Entry, Section, entries_of
from nereus.lang.sink import Sink, listing, show, suggestion
from nereus.lang.syntax import Sequence as Bracketed
from nereus.lang.syntax import Word
from nereus.lang.values import Reader
from nereus.models.lora import linear_kinds
from nereus.models.tensors import logical_tensors


def read_lora(section: Section, arch: Arch | None, base: Lora | None, sink: Sink) -> Lora | None:
    """The adapter of a model: ``base`` (that of the model it is declared from) unless the block says otherwise."""
    if "lora" in section.entries:  # only ``lora = none`` gets this far
        return None
    block = section.blocks.get("lora")
    if block is None or block.body is None:
        return base
    reader = Reader(sink)
    where = f"lora of {show(section.name)}"
    entries = entries_of(block.body, schema.LORA_KEYS, where, section.level, sink)
    if "rank" not in entries:
        if not section.broken:
            headline = f"{where} says no rank"
            sink.error("NRS2019", headline, block.keyword.span, "incomplete", help="write lora { rank = 16 }")
        return None
    rank = reader.integer(entries["rank"])
    if rank is None:
        return None
    alpha: float | None = float(rank)
    if "alpha" in entries:
        alpha = reader.positive(entries["alpha"])
    targets: tuple[str, ...] | None = ()
    if "targets" in entries:
        targets = _targets(entries["targets"], arch, reader)
    if alpha is None or targets is None:
        return None
    return Lora(rank=rank, alpha=alpha, targets=targets)


def _targets(entry: Entry, arch: Arch | None, reader: Reader) -> tuple[str, ...] | None:
    """Empty for all; None after an error."""
    reader.no_body(entry)
    values = entry.value.items if isinstance(entry.value, Bracketed) else (entry.value,)
    if not values or not all(isinstance(value, Word) for value in values):
        reader.wrong_type(entry, "all, or modules such as (q_proj, v_proj)")
        return None
    words = [value for value in values if isinstance(value, Word)]
    if [word.text for word in words] == ["all"]:
        return ()
    if arch is None:
        return None
    known = linear_kinds(logical_tensors(arch))
    good = True
    for word in words:
        if word.text not in known:
            _unknown_target(word, known, alone=len(words) == 1, sink=reader.sink)
            good = False
    return tuple(dict.fromkeys(word.text for word in words)) if good else None


#: What other programs write for every linear: peft's word, and slips of it and of ours.
_EVERY_LINEAR = ("all", "all-linear", "all_linear", "linear", "default")


def _unknown_target(word: Word, known: tuple[str, ...], *, alone: bool, sink: Sink) -> None:
    headline = f"'{show(word.text)}' is no linear module of this model"
    if word.text.lower() in _EVERY_LINEAR:
        fix = Fix(span=word.span, text="all") if alone else None
        more: dict[str, object] = {"help": "every linear of every layer is targets = all, alone", "fix": fix}
    else:
        more = suggestion(word.text, (*known, "all"), word.span)
        if more.get("fix") is None:  # nothing is close, and the label lists them
            more = {}
    sink.error("NRS2007", headline, word.span, f"all, or some of {listing(known, 'and')}", **more)
