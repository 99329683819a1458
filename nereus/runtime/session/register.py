"""A register on 2f+1 stores that outlives f of them: Paxos with stores that only compare and set as its acceptors.

Each store has one text for a key: the highest ballot that it promised to, and the value with the ballot under which it
was accepted. A change takes a new ballot to a majority (promise), applies itself to the value of the highest accepted
ballot there, and takes the result to a majority (accept). What a majority has accepted under one ballot stands: every
later change meets it, whoever has died meanwhile. A store that lost its memory is not one of them any more.

The steps are generators that ask and are answered, with no store, clock or thread in them: what runs over connections
(``replicated.py``) is what the tests run in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

#: (number, whose). Numbers of different owners are never the same ballot.
Ballot = tuple[int, str]

_MISSING = b""
#: No text begins so: asking to replace it replaces nothing.
_NEVER = b"?"


class Ask(NamedTuple):
    """Of store ``store``: where it has ``expected`` (b"": nothing) as the key's text, put ``desired``. The answer is
    what it has then, ``expected`` where it has nothing and something was expected; None: it is lost."""

    store: int
    expected: bytes
    desired: bytes


#: Yielded before another attempt, once another proposer was in the way: to let it finish.
PAUSE = Ask(-1, b"", b"")


class NoMajority(RuntimeError):
    """Too few of the stores are left."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What one store has of a key. ``value``: None: there is none (accepted or not)."""

    promised: Ballot = (0, "")
    accepted: Ballot = (0, "")
    value: bytes | None = None

    def text(self) -> bytes:
        (p, whose), (a, by) = self.promised, self.accepted
        value = b"-" if self.value is None else b"=" + self.value
        return f"{p}.{whose}:{a}.{by}:".encode() + value

    @classmethod
    def read(cls, text: bytes) -> Slot:
        if text in (_MISSING, _NEVER):
            return cls()
        promised, accepted, value = text.split(b":", 2)
        return cls(_ballot(promised), _ballot(accepted), value[1:] if value[:1] == b"=" else None)


Steps = Generator[Ask, bytes | None, bytes | None]


def change(num_stores: int, update: Callable[[bytes | None], bytes | None], me: str) -> Steps:
    """The value after ``update``, which may be called again on a newer value, or on its own result. ``me``: a name of
    this one change, without ":". Raises NoMajority."""
    lost: set[int] = set()
    highest = 0
    while True:
        ballot = (highest + 1, me)
        highest += 1
        promised: dict[int, Slot] = {}
        for store in _left(num_stores, lost):
            slot = yield from _raised(store, ballot, Slot())
            if slot is None:
                lost.add(store)
            elif slot.promised == ballot:
                promised[store] = slot
            else:
                highest = max(highest, slot.promised[0])
        if _majority(num_stores, promised):
            new = update(max(promised.values(), key=lambda slot: slot.accepted).value)
            accepted = set()
            for store in _left(num_stores, lost):
                slot = yield from _raised(store, ballot, promised.get(store, Slot()), accept=(new,))
                if slot is None:
                    lost.add(store)
                elif slot.accepted == ballot:
                    accepted.add(store)
                else:
                    highest = max(highest, slot.promised[0])
            if _majority(num_stores, accepted):
                return new
        if not _majority(num_stores, _left(num_stores, lost)):
            raise NoMajority(f"{len(lost)} of the {num_stores} stores do not answer")
        yield PAUSE


def read(num_stores: int, me: str) -> Steps:
    """The value. One answer of each of a majority, where they are of one mind; else what was begun is ended."""
    seen: list[Ballot] = []
    for store in range(num_stores):
        text = yield Ask(store, _NEVER, _NEVER)
        if text is None:
            continue
        slot = Slot.read(text)
        seen.append(slot.accepted)
        if 2 * seen.count(slot.accepted) > num_stores:
            return slot.value
    return (yield from change(num_stores, lambda value: value, me))


def _raised(
    store: int, ballot: Ballot, guess: Slot, accept: tuple[bytes | None] | None = None
) -> Generator[Ask, bytes | None, Slot | None]:
    """What the store has once it promised to ``ballot`` or accepted it, or why it cannot: a promise to a higher one.
    ``guess``: what it may have now."""
    slot = guess
    text = _MISSING if slot == Slot() else slot.text()
    while slot.promised <= ballot:
        wanted = Slot(ballot, slot.accepted, slot.value) if accept is None else Slot(ballot, ballot, accept[0])
        answer = yield Ask(store, text, wanted.text())
        if answer is None:
            return None
        if answer == wanted.text():
            return wanted
        text = _MISSING if answer == text else answer  # the same again: there is none
        slot = Slot.read(text)
    return slot


def _left(num_stores: int, lost: set[int]) -> tuple[int, ...]:
    return tuple(store for store in range(num_stores) if store not in lost)


def _majority(num_stores: int, some: Iterable[int]) -> bool:
    return 2 * len(tuple(some)) > num_stores


def _ballot(text: bytes) -> Ballot:
    number, _, whose = text.decode().partition(".")
    return int(number), whose
