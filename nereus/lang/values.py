"""Typed reading of values: each reader returns the value, or None after saying what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from nereus.ir.diagnostic import Fix
from nereus.lang.merge import Entry
from nereus.lang.schema import SIZE_UNITS
from nereus.lang.sink import Sink, did_you_mean, listing, show, suggestion
from nereus.lang.syntax import At, Call, Number, Repeat, Text, Value, Word
from nereus.lang.syntax import Sequence as Bracketed

T = TypeVar("T")

#: Counts beyond this are typing errors; the bound keeps arithmetic on them small.
MAX_COUNT = 10**12


class Reader:
    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def wrong_type(self, entry: Entry, wanted: str, value: Value | None = None, **more: object) -> None:
        value = entry.value if value is None else value
        headline = f"{entry.name} wants {wanted}, not {describe(value)}"
        self.sink.error("NRS2008", headline, value.span, f"expected {wanted}", **more)

    def no_body(self, entry: Entry) -> None:
        if entry.body is not None:
            headline = f"'{entry.name}' takes no block behind its value"
            self.sink.error("NRS2026", headline, entry.body.span, "remove this block")

    def integer(self, entry: Entry, *, least: int = 1, units: Mapping[str, int] | None = None) -> int | None:
        self.no_body(entry)
        return self.integer_value(entry, entry.value, least=least, units=units)

    def integer_value(
        self, entry: Entry, value: Value, *, least: int = 1, units: Mapping[str, int] | None = None
    ) -> int | None:
        if not isinstance(value, Number):
            self.wrong_type(entry, "a whole number", value)
            return None
        number = self._number(entry, value)
        if number is None or not self._unit(entry, value, units or {}, required=False):
            return None
        if isinstance(number, float):
            self.wrong_type(entry, "a whole number", value)
            return None
        if number < least:
            bound = "positive" if least == 1 else f"at least {least}"
            self.sink.error("NRS2010", f"{entry.name} must be {bound}, not {number}", value.span, f"must be {bound}")
            return None
        if number > MAX_COUNT:
            self._too_large(entry, value)
            return None
        return number

    def fraction(self, entry: Entry) -> float | None:
        """A number in (0, 1]."""
        self.no_body(entry)
        value = entry.value
        if not isinstance(value, Number):
            self.wrong_type(entry, "a share between 0 and 1")
            return None
        number = self._number(entry, value)
        if number is None or not self._unit(entry, value, {}, required=False):
            return None
        if not 0 < number <= 1:
            headline = f"{entry.name} must be above 0 and at most 1, not {value.text}"
            self.sink.error("NRS2010", headline, value.span, "a share of the GPU's memory")
            return None
        return float(number)

    def positive(self, entry: Entry) -> float | None:
        """A number above 0."""
        self.no_body(entry)
        value = entry.value
        if not isinstance(value, Number):
            self.wrong_type(entry, "a number")
            return None
        number = self._number(entry, value)
        if number is None or not self._unit(entry, value, {}, required=False):
            return None
        if number <= 0:
            self.sink.error("NRS2010", f"{entry.name} must be positive, not {value.text}", value.span, "above 0")
            return None
        return float(number)

    def size(self, entry: Entry) -> int | None:
        """Bytes."""
        found = self._quantity(entry, {k: float(v) for k, v in SIZE_UNITS.items()}, "a size such as 40 GiB")
        return None if found is None else round(found)

    def rate(self, entry: Entry, units: Mapping[str, float]) -> float | None:
        return self._quantity(entry, units, "a rate such as 25 GB/s or 400 Gbit/s")

    def duration(self, entry: Entry, units: Mapping[str, float]) -> float | None:
        return self._quantity(entry, units, "a time such as 30 s")

    def _quantity(self, entry: Entry, units: Mapping[str, float], wanted: str) -> float | None:
        self.no_body(entry)
        value = entry.value
        if not isinstance(value, Number):
            self.wrong_type(entry, wanted)
            return None
        number = self._number(entry, value)
        if number is None or not self._unit(entry, value, units, required=True, wanted=wanted):
            return None
        assert value.unit is not None
        if number <= 0:
            headline = f"{entry.name} must be positive, not {value.text}"
            self.sink.error("NRS2010", headline, value.span, "must be positive")
            return None
        amount = number * units[value.unit.text]
        if amount > 10**18:
            self._too_large(entry, value)
            return None
        return amount

    def boolean(self, entry: Entry) -> bool | None:
        self.no_body(entry)
        value = entry.value
        if isinstance(value, Word) and value.text in ("true", "false"):
            return value.text == "true"
        if isinstance(value, Word):
            helps = {"yes": "true", "on": "true", "no": "false", "off": "false"}
            close = helps.get(value.text.lower()) or did_you_mean(value.text, ("true", "false"))
            fix = None if close is None else Fix(span=value.span, text=close)
            self.wrong_type(entry, "true or false", help=close and f"did you mean {close}?", fix=fix)
        else:
            self.wrong_type(entry, "true or false")
        return None

    def enum(self, entry: Entry, known: Sequence[str], *, allow_body: bool = False) -> str | None:
        if not allow_body:
            self.no_body(entry)
        value = entry.value
        if isinstance(value, Text):
            fix = Fix(span=value.span, text=value.value) if value.value in known else None
            self.wrong_type(entry, f"one of {listing(known, 'or')}", help="without quotes", fix=fix)
            return None
        if not isinstance(value, Word):
            self.wrong_type(entry, f"one of {listing(known, 'or')}")
            return None
        if value.text in known:
            return value.text
        headline = f"'{show(value.text)}' is no value of {entry.name}"
        close = suggestion(value.text, known, value.span)
        more = close if close.get("fix") is not None else {}  # the label lists what is known
        self.sink.error("NRS2007", headline, value.span, f"one of {listing(known, 'or')}", **more)
        return None

    def text(self, entry: Entry) -> str | None:
        self.no_body(entry)
        if isinstance(entry.value, Text):
            if entry.value.value and "\0" not in entry.value.value:
                return entry.value.value
            self.wrong_type(entry, "a string that is not empty")
            return None
        fix = None
        if isinstance(entry.value, Word):
            fix = Fix(span=entry.value.span, text=f'"{entry.value.text}"')
        self.wrong_type(entry, "a string in double quotes", fix=fix)
        return None

    def _number(self, entry: Entry, value: Number) -> int | float | None:
        if value.value is None:
            self._too_large(entry, value)
        return value.value

    def _too_large(self, entry: Entry, value: Number) -> None:
        self.sink.error("NRS1011", f"{entry.name} = {show(value.text, 24)} is too large", value.span, "no such amount")

    def _unit(
        self, entry: Entry, value: Number, units: Mapping[str, float], *, required: bool, wanted: str = ""
    ) -> bool:
        unit = value.unit
        if unit is None:
            if required:
                headline = f"{entry.name} = {value.text} has no unit"
                example = next(u for u in ("GiB", "GB/s", "s") if u in units)
                label = f"expected {wanted}"
                self.sink.error("NRS2009", headline, value.span, label, help=f"write {value.text} {example}")
            return not required
        if unit.text in units:
            return True
        if not units:
            headline = f"{entry.name} is a plain number; '{show(unit.text)}' is no unit of it"
            self.sink.error("NRS2009", headline, unit.span, "remove this unit")
            return False
        headline = f"'{show(unit.text)}' is no unit of {entry.name}"
        more = suggestion(unit.text, tuple(units), unit.span)
        meant = _OTHER_SPELLINGS.get(unit.text)
        if meant is not None and meant in units:
            more = {"help": f"did you mean {meant}?", "fix": Fix(span=unit.span, text=meant)}
        self.sink.error("NRS2009", headline, unit.span, wanted and f"expected {wanted}", **more)
        return False


#: Bits and bytes differ by a letter's case: what people write for either, so that the nearest spelling does not decide.
_OTHER_SPELLINGS = {
    "Gbps": "Gbit/s",
    "gbps": "Gbit/s",
    "Gb/s": "Gbit/s",
    "gbit/s": "Gbit/s",
    "GBps": "GB/s",
    "gb/s": "Gbit/s",
}


def describe(value: Value) -> str:
    """A value as a sentence names it."""
    match value:
        case Word():
            return f"'{show(value.text)}'"
        case Text():
            return f'the string "{show(value.value)}"'
        case Number():
            return show(value.text, 24) + (f" {show(value.unit.text, 16)}" if value.unit else "")
        case Repeat():
            return "a count of things"
        case At():
            return f"'{show(value.word.text)} @{show(value.place.text)}'"
        case Call():
            return f"{show(value.name)}(...)"
        case Bracketed():
            return "a list"
