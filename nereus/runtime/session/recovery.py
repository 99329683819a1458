"""After a loss: who is left, which boundary they have in common, and who says what comes next.

A turn is one attempt of the members of a plan to agree. Where its leader is lost too, the others take another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Plan
from nereus.runtime.faults import CANNOT_START, DEADLINE, EXPELLED, PROCESS_ENDED, WRONG_STATE, Fault
from nereus.runtime.session.members import Losses, Member, report_loss
from nereus.runtime.session.record import Record, never

#: Old plan and lost devices -> the plan to go on with.
Replan = Callable[[Plan, tuple[Device, ...]], Plan]


def no_replan(plan: Plan, lost: tuple[Device, ...]) -> Plan:
    """Where losses were not thought of."""
    raise Fault(CANNOT_START, f"no plan to go on with without {', '.join(map(str, lost))} was given", where="job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """``key``: of its entries; no two turns have one."""

    record: Record
    losses: Losses
    members: tuple[Member, ...]
    key: str
    deadline_s: float

    def survivors(self, versions: Sequence[int], ward: tuple[int, int] | None = None) -> tuple[Member, ...]:
        """Whoever speaks within the deadline; the first list written counts. What is known of losses makes it shorter.
        ``versions``: the boundaries that this process holds; ``ward``: another one's number, and the boundary at which
        it keeps what only that one had. Raises Fault (EXPELLED) where it is not in the list."""
        self.record.put(f"{self.key}/alive/{self.record.me}", (tuple(versions), ward))
        end = time.monotonic() + self.deadline_s
        while (agreed := self.agreed()) is None:
            self.losses.look()
            waited = [m for m in self.members if not self.losses.has(m)]
            there = [m for m in waited if self.record.get(f"{self.key}/alive/{m.number}") is not None]
            if len(there) == len(waited) or time.monotonic() > end:
                agreed = self.record.first(f"{self.key}/members", tuple(m.number for m in there))
                break
            time.sleep(0.01)
        for member in self.members:
            if member.number not in agreed and not self.losses.has(member):
                report_loss(self.record, member.number)
        if self.record.me not in agreed:
            raise Fault(EXPELLED, "the others went on without this process", where=self.record.where)
        return tuple(m for m in self.members if m.number in agreed)

    def agreed(self) -> tuple[int, ...] | None:
        """The survivors' numbers, once they have agreed."""
        found: tuple[int, ...] | None = self.record.decided(f"{self.key}/members")
        return found

    def common_version(self, survivors: Sequence[Member]) -> int:
        """The newest boundary that all have who hold any, and at which what only a lost one had is kept, if it is."""
        said = [self.record.get(f"{self.key}/alive/{m.number}") for m in survivors]
        holding = [set(versions) for versions, _ in said if versions]
        common = set.intersection(*holding) if holding else set()
        left = {m.number for m in survivors}
        kept = {ward[1] for _, ward in said if ward is not None and ward[0] not in left}
        common = common & kept or common
        if not common:
            text = "no boundary is held by all survivors; use snapshots=True, or start again from a checkpoint"
            raise Fault(WRONG_STATE, text, where="job")
        return max(common)

    def agreed_epoch(self, survivors: Sequence[Member], lead: Callable[[], int] | None) -> int | None:
        """The epoch that the survivors begin: what ``lead`` returns to the first of them, or what the controller says
        (``lead`` None). None where the first one is lost too. What leading raises is raised as a Fault in all."""
        if lead is not None and survivors[0].number == self.record.me:
            self.say(lead)
        try:
            word = self.record.wait(
                f"{self.key}/epoch",
                2 * self.deadline_s,  # it may itself wait that long for a new process
                of=f"process {survivors[0].number}, which leads now" if lead is not None else "the controller",
                decided=True,
                stop=(lambda: self.losses.among(survivors[:1])) if lead is not None else never,
            )
        except Fault as fault:
            if lead is None or fault.code not in (PROCESS_ENDED, DEADLINE):
                raise
            report_loss(self.record, survivors[0].number)
            return None
        if isinstance(word, str):
            raise Fault.decode(word)
        assert isinstance(word, int)
        return word

    def say(self, lead: Callable[[], int]) -> int | str:
        """The leader: what ``lead`` returns is the epoch that the survivors begin; what it raises, they raise. What
        was said, a fault encoded."""
        word: int | str
        try:
            word = lead()
        except DiagnosticError as problem:
            first = problem.diagnostics[0]
            word = Fault(first.code, first.headline, where="job").encode()
        except Exception as problem:
            word = Fault.of(problem, self.record.where).encode()
        found: int | str = self.record.first(f"{self.key}/epoch", word)
        return found
