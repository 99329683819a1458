"""The fullest state of a memory space in tight mode: against every interleaving of small schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from passes.profiles import examples

from nereus.verify.memory import _most_acquired

Storage = tuple[int, int, int, bool]  # process, wave, bytes, whether it comes


def fullest(num_processes: int, num_waves: int, storages: list[Storage]) -> int:
    """Most bytes in host memory over all interleavings: a process acquires and fills wave w, waits for all to have
    done so, releases wave w's storages, and goes on."""
    step = {  # bytes that a process adds when it takes its n-th step: acquire 0, release 0, acquire 1, ...
        (p, 2 * w + (not comes)): 0 for p in range(num_processes) for w in range(num_waves) for comes in (True, False)
    }
    for process, wave, size, comes in storages:
        step[process, 2 * wave + (not comes)] += size if comes else -size

    def following(state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for p in range(num_processes):
            done = state[p]
            if done == 2 * num_waves:
                continue
            if done % 2 and any(other < done for other in state):  # the agreement: all have finished this wave
                continue
            yield (*state[:p], done + 1, *state[p + 1 :])

    first = (0,) * num_processes
    held = {first: 0}
    open_states = [first]
    while open_states:
        state = open_states.pop()
        for after in following(state):
            if after not in held:
                (moved,) = [p for p in range(num_processes) if after[p] != state[p]]
                held[after] = held[state] + step[moved, state[moved]]
                open_states.append(after)
    return max(held.values())


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, list[Storage]]:
    num_processes, num_waves = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    found = draw(
        st.lists(
            st.tuples(
                st.integers(0, num_processes - 1), st.integers(0, num_waves - 1), st.integers(1, 9), st.booleans()
            ),
            min_size=1,
            max_size=9,
        )
    )
    return num_processes, num_waves, found


@examples(200)
@given(schedules())
def test_host_memory_is_the_fullest_of_all_interleavings(case: tuple[int, int, list[Storage]]) -> None:
    num_processes, num_waves, storages = case
    world = SimpleNamespace(
        num_devices=num_processes,
        num_spaces=num_processes + 1,
        nodes=(None,),
        node_of=np.zeros(num_processes, dtype=np.int64),
    )
    coming, going, acquire, release = ({} for _ in range(4))  # type: ignore[var-annotated]
    for number, (process, wave, size, comes) in enumerate(storages):
        key = (process, "actor.train", "weight", number)
        (coming if comes else going)[key] = (num_processes, size)
        (acquire if comes else release)[key] = wave
    document = SimpleNamespace(acquire=acquire, release=release, staged={})
    found: Any = _most_acquired(
        SimpleNamespace(document=document, world=world),  # type: ignore[arg-type]
        SimpleNamespace(coming_keys=coming, going_keys=going),  # type: ignore[arg-type]
    )
    assert int(found[num_processes]) == fullest(num_processes, num_waves, storages)


def test_interleavings_are_what_the_docstring_says() -> None:
    """Two processes: one may come with wave 1 before the other has released wave 0."""
    storages = [(0, 0, 5, False), (1, 0, 5, False), (0, 1, 7, True), (1, 1, 7, True)]
    assert fullest(2, 2, storages) == max(0, 7 - 5, 14 - 10)
    assert fullest(2, 2, [(0, 0, 5, False), (1, 1, 7, True)]) == 7
    assert all(
        fullest(1, 2, [(0, a, 3, True), (0, b, 3, False)]) == (3 if a <= b else 0)
        for a, b in itertools.product(range(2), repeat=2)
    )
