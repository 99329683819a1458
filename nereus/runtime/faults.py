"""What can go wrong while a transition is executed, as diagnostics, and faults that a drill may inject."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.diagnostic import Diagnostic, Severity

DIFFERENT_DIGEST = "NRS6001"
ALLOCATION_FAILED = "NRS6002"
DAMAGED_MESSAGE = "NRS6003"
PARTICIPANT_FAILED = "NRS6004"
DEADLINE = "NRS6005"
PROCESS_ENDED = "NRS6006"
WRONG_ELEMENTS = "NRS6007"
TOO_LARGE = "NRS6008"
CANNOT_START = "NRS6009"
WRONG_STATE = "NRS6010"
STORE_LOST = "NRS6011"
VETOED = "NRS6012"
EXPELLED = "NRS6013"
WRONG_AFTER = "NRS6014"
PROGRAM_FAULT = "NRS9601"

_HELP = {
    DIFFERENT_DIGEST: "compile once and give every participant programs of that one transition",
    ALLOCATION_FAILED: "free memory on that machine, or run the change at a smaller --scale",
    DAMAGED_MESSAGE: "run it again; if it happens again, memory or network of one of the two machines is at fault",
    DEADLINE: "look at the process named above; a machine that swaps or a stopped process is the usual cause",
    PROCESS_ENDED: "if the kernel's out-of-memory killer ended it, use a smaller --scale or fewer --procs",
    TOO_LARGE: "use --scale auto, or a smaller width",
    STORE_LOST: "the job cannot agree on anything without it: start it again from the last checkpoint",
    VETOED: "try again at a later boundary",
    EXPELLED: "the job goes on without this process; end it, or let it join as a new one",
    WRONG_AFTER: "the old plan goes on; the new objects are not what the plan says, or compute something else",
    CANNOT_START: "nereusc doctor says what works on this machine",
}


class Fault(Exception):
    """A failure with its code; ``where`` names the device or process it happened on."""

    def __init__(self, code: str, text: str, *, where: str = "", notes: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.where = where
        self.notes = notes

    def diagnostic(self, *more_notes: str) -> Diagnostic:
        return Diagnostic(
            code=self.code,
            severity=Severity.ERROR,
            headline=f"{self.where}: {self.text}" if self.where else self.text,
            notes=(*self.notes, *more_notes),
            help=_HELP.get(self.code),
        )

    def encode(self) -> str:
        """One line for another process; ``decode`` reads it."""
        return "\t".join(part.replace("\t", " ").replace("\n", " ") for part in (self.code, self.where, self.text))

    @classmethod
    def decode(cls, line: str) -> Fault:
        code, where, text = line.split("\t", 2)
        return cls(code, text, where=where)

    @classmethod
    def of(cls, error: BaseException, where: str) -> Fault:
        """``error`` as a fault: the allocator's refusal keeps its own code."""
        if isinstance(error, Fault):
            return error
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return cls(ALLOCATION_FAILED, f"memory could not be allocated: {first_line(error)}", where=where)
        return cls(PARTICIPANT_FAILED, f"{type(error).__name__}: {first_line(error)}", where=where)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A fault made on purpose, to see that nothing is lost: ``kind`` happens on process ``process`` in wave ``wave``.

    ``corrupt``: a bit of a message flips; ``allocation``: memory is refused; ``raise``: an exception; ``exit``: the
    process ends without a word; ``hang``: it stops answering.
    """

    kind: str
    process: int = 0
    wave: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("corrupt", "allocation", "raise", "exit", "hang"):
            raise ValueError(f"no drill '{self.kind}'")
