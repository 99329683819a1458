"""Judge a saved transition from its document alone: plans, schedule, life cycle, memory, certificate.

Nothing of ``nereus.passes`` is used. The plans are parsed by the front end; what every place holds and wants is worked
out from them anew, and every claim of the document is proved against it or refuted with a witness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nereus.ir.diagnostic import Severity
from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.verify import coverage, digest, figures, links, memory, order, priors, processes, storages
from nereus.verify.bounds import Bounds, count_bounds
from nereus.verify.case import Case
from nereus.verify.document import Document, read_document
from nereus.verify.finding import Finding, Violation

T = TypeVar("T")

#: Before the reason, where a property cannot be looked at because of what another check says.
_UNJUDGED = "cannot be judged: "

#: Every property that is judged, in order: name, and what it says.
PROPERTIES: tuple[tuple[str, str], ...] = (
    ("plans", "both plans are as saved and still mean what they meant"),
    ("digest", "the digest is that of these plans and this schedule"),
    ("elements", "every wanted element is there, is made there, or arrives exactly once"),
    ("sources", "every source holds what it sends, or earlier waves brought it"),
    ("order", "one order of all communication, and no wait for what is later"),
    ("windows", "no wave posts more than windows and staging allow"),
    ("lifetimes", "storages are there while they are filled and read"),
    ("memory", "no memory space overflows on any timing"),
    ("processes", "every process is started or ended once, and no device has two owners"),
    ("priors", "set-up, draining and commit are those that the plans ask for, and take what the priors say"),
    ("moves", "bytes and link class of every move"),
    ("bounds", "what is called a lower bound is one"),
    ("certificate", "the certificate's figures are a recount's"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    findings: tuple[Finding, ...]
    digest: str
    num_devices: int
    num_moves: int

    @property
    def holds(self) -> bool:
        return all(finding.holds for finding in self.findings)


def verify(value: Mapping[str, Any], plans: tuple[Plan, Plan] | None = None) -> Verdict:
    """``value``: the document as JSON gives it. ``plans``: old and new, for who has them; else they are parsed from the
    document. Raises DamagedDocument where it cannot be judged."""
    document = read_document(value)
    judge = _Judge(document, plans)
    findings = tuple(judge.finding(name) for name, _ in PROPERTIES)
    return Verdict(
        findings=findings,
        digest=document.digest,
        num_devices=len(document.devices),
        num_moves=len(document.moves),
    )


class _Judge:
    """Checks share what they look at; a property that cannot be looked at does not hold."""

    def __init__(self, document: Document, plans: tuple[Plan, Plan] | None) -> None:
        self.document = document
        self._made: dict[str, object] = {} if plans is None else {"old": plans[0], "new": plans[1]}
        self._failed: dict[str, str] = {}

    def finding(self, name: str) -> Finding:
        check: Callable[[], str] = getattr(self, f"_{name}")
        try:
            return Finding(name=name, holds=True, evidence=check())
        except Violation as violation:
            return Finding(name=name, holds=False, evidence=str(violation))

    def _shared(self, name: str, make: Callable[[], T]) -> T:
        if name in self._failed:
            raise Violation(self._failed[name])
        if name not in self._made:
            try:
                self._made[name] = make()
            except Violation as violation:
                said = str(violation)
                self._failed[name] = said if said.startswith(_UNJUDGED) else _UNJUDGED + said
                raise
        return self._made[name]  # type: ignore[return-value]

    def plan(self, side: str) -> Plan:
        return self._shared(side, lambda: _parse(side, self.document.texts[side]))

    def case(self) -> Case:
        return self._shared("case", lambda: Case(self.document, self.plan("old"), self.plan("new")))

    def storages(self) -> storages.Storages:
        return self._shared("storages", lambda: storages.Storages(self.case()))

    def use(self) -> memory.Use:
        return self._shared("use", lambda: memory.memory_use(self.case(), self.storages()))

    def bounds(self) -> Bounds:
        return self._shared("bounds", lambda: count_bounds(self.case()))

    def _plans(self) -> str:
        same = digest.check_texts(self.document)
        return f"{same}; {digest.check_names(self.document, self.plan('old'), self.plan('new'))}"

    def _digest(self) -> str:
        return digest.check_digest(self.document, self.plan("old"), self.plan("new"))

    def _elements(self) -> str:
        return coverage.check_elements(self.case())

    def _sources(self) -> str:
        return coverage.check_sources(self.case())

    def _order(self) -> str:
        return order.check_order(self.case())

    def _windows(self) -> str:
        return order.check_windows(self.case())

    def _lifetimes(self) -> str:
        return storages.check_lifetimes(self.case(), self.storages())

    def _memory(self) -> str:
        return memory.check_memory(self.case(), self.use())

    def _processes(self) -> str:
        return processes.check_processes(self.case())

    def _priors(self) -> str:
        return priors.check_priors(self.case())

    def _moves(self) -> str:
        return links.check_moves(self.case())

    def _bounds(self) -> str:
        return figures.check_bounds(self.case(), self.bounds())

    def _certificate(self) -> str:
        return figures.check_certificate(self.case(), self.bounds(), self.use(), self.storages())


def _parse(side: str, text: str) -> Plan:
    result = resolve_text(text, path=f"({side} plan)")
    errors = [d for d in result.diagnostics if d.severity is Severity.ERROR]
    if result.plan is None or errors:
        raise Violation(f"the {side} plan is not accepted: {errors[0].code} {errors[0].headline}" if errors else side)
    return result.plan
