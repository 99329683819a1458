"""The register on three stores, in every order of two proposers' steps, with a store that is lost on the way and words
that arrive late or never: no two decisions are ever read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from nereus.runtime.session.register import PAUSE, Ask, Ballot, NoMajority, Slot, Steps, change, read

STORES = 3
Answers = tuple[bytes | None, ...]


class State(NamedTuple):
    """``texts``: of the stores; ``dead``: those that are gone; ``heard``: what each process was answered, which says
    where it is; ``late``: what was asked on a connection that broke, and may still arrive; ``accepted``: what each
    store ever accepted; ``chosen``: values that a majority accepted under one ballot, at whatever times."""

    texts: tuple[bytes, ...]
    dead: frozenset[int]
    heard: tuple[Answers, ...]
    late: frozenset[Ask]
    accepted: frozenset[tuple[Ballot, int]]
    chosen: frozenset[bytes]


class End(NamedTuple):
    value: bytes | None
    failed: bool


def at(start: Callable[[], Steps], heard: Answers) -> Ask | End:
    """What a process asks next, after these answers."""
    steps = start()
    try:
        ask = next(steps)
        for answer in heard:
            ask = steps.send(answer)
    except StopIteration as end:
        return End(end.value, False)
    except NoMajority:
        return End(None, True)
    return ask


def served(text: bytes, ask: Ask) -> tuple[bytes, bytes]:
    """(the store's text afterwards, the answer), as torch's store does it."""
    if text == ask.expected:
        return ask.desired, ask.desired
    return text, text or ask.expected


def put(state: State, ask: Ask) -> tuple[State, bytes]:
    text, answer = served(state.texts[ask.store], ask)
    texts = (*state.texts[: ask.store], text, *state.texts[ask.store + 1 :])
    slot = Slot.read(text)
    accepted = state.accepted | ({(slot.accepted, ask.store)} if slot.value is not None else set())
    if slot.value is not None and 2 * sum(ballot == slot.accepted for ballot, _ in accepted) > STORES:
        state = state._replace(chosen=state.chosen | {slot.value})
    return state._replace(texts=texts, accepted=accepted), answer


def heard(state: State, process: int, answer: bytes | None) -> State:
    mine = (*state.heard[process], answer)
    return state._replace(heard=(*state.heard[:process], mine, *state.heard[process + 1 :]))


def following(state: State, asks: list[Ask | End], *, deaths: int, breaks: int, attempts: int) -> Iterator[State]:
    for process, ask in enumerate(asks):
        if isinstance(ask, End):
            continue
        if ask is PAUSE:
            if sum(answer == b"pause" for answer in state.heard[process]) + 1 < attempts:
                yield heard(state, process, b"pause")
            continue
        if ask.store in state.dead:
            yield heard(state, process, None)
            continue
        after, answer = put(state, ask)
        yield heard(after, process, answer)
        if breaks and not any(None in answers for answers in state.heard):  # it was asked, and the answer never comes
            yield heard(state._replace(late=state.late | {ask}), process, None)
    for ask in state.late:
        yield put(state, ask)[0]._replace(late=state.late - {ask})
    if len(state.dead) < deaths:  # whoever is asked next: a death that nobody notices yet may as well come later
        for store in {ask.store for ask in asks if isinstance(ask, Ask) and ask is not PAUSE}:
            yield state._replace(dead=state.dead | {store})


def decision_read(before: tuple[bytes, ...], dead: frozenset[int]) -> bytes | None:
    """What somebody reads who comes now, while nobody else does anything."""
    steps, texts = read(STORES, "z"), list(before)
    answer: bytes | None = None
    begun = False
    while True:
        try:
            ask = steps.send(answer) if begun else next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        begun, answer = True, None
        if ask is not PAUSE and ask.store not in dead:
            texts[ask.store], answer = served(texts[ask.store], ask)


def first(value: bytes) -> Callable[[], Steps]:
    return lambda: change(STORES, lambda found: value if found is None else found, value.decode())


def explored(starts: list[Callable[[], Steps]], **limits: int) -> int:
    """Every state that can be reached; the number of them."""
    begin = State((b"",) * STORES, frozenset(), ((),) * len(starts), frozenset(), frozenset(), frozenset())
    known, left = {begin}, [begin]
    asked = cache(lambda process, answers: at(starts[process], answers))
    decided = cache(decision_read)
    while left:
        state = left.pop()
        asks = [asked(process, answers) for process, answers in enumerate(state.heard)]
        told = {ask.value for ask in asks if isinstance(ask, End) and not ask.failed and ask.value is not None}
        assert len(state.chosen) <= 1, state
        assert told <= state.chosen, state
        if state.chosen:
            assert decided(state.texts, state.dead) in state.chosen, state
        for after in following(state, asks, **limits):
            if after not in known:
                known.add(after)
                left.append(after)
    return len(known)


@pytest.mark.parametrize(
    ("limits", "reader"),
    [
        ({"deaths": 0, "breaks": 0, "attempts": 2}, False),
        ({"deaths": 1, "breaks": 1, "attempts": 1}, False),
        ({"deaths": 0, "breaks": 0, "attempts": 1}, True),
    ],
    ids=["they meet twice", "a store dies and a word is late", "another one reads"],
)
def test_two_proposers_in_every_order(limits: dict[str, int], reader: bool) -> None:
    starts = [first(b"A"), first(b"B")]
    if reader:
        starts.append(lambda: read(STORES, "r"))
    assert explored(starts, **limits) > 20_000


def test_a_proposer_that_keeps_to_its_own_value_is_found() -> None:
    def stubborn(value: bytes) -> Callable[[], Steps]:
        return lambda: change(STORES, lambda _: value, value.decode())

    with pytest.raises(AssertionError):
        explored([stubborn(b"A"), stubborn(b"B")], deaths=0, breaks=0, attempts=1)
