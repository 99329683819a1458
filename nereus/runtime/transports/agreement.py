"""What the processes of a transition settle through their store: whoever writes first is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nereus.runtime.faults import Fault

#: Begins the text of a failure that is only hearsay.
CLOSED_TEXT = "the connection was closed"
#: A process that only noticed that another closed its connection waits this long for that one's own words.
_HEARSAY_S = 1.0
_ERROR, _DECISION, _COMMIT = "error", "decision", "commit"


def decide(store: Any, barrier: Callable[[], object], where: str) -> bool:
    """Commit, or raise the ``Fault`` for which all abort. ``barrier``: whoever passes it knows that all have come here,
    and so have verified all that they received. Whether this process passed it: one that did not commits all the same
    where another was first, but words of this transition may still be on their way to it."""
    wish = _COMMIT
    try:
        barrier()
    except Exception as error:  # the others may have passed: whatever it is, the decision is the store's
        wish = Fault.of(error, where).encode()
    decision = _first(store, _DECISION, wish)
    if decision != _COMMIT:
        raise Fault.decode(decision)
    return wish == _COMMIT


def forget(store: Any) -> None:
    """What was decided, once all processes are past it."""
    store.delete_key(_DECISION)


def first_failure(store: Any, fault: Fault) -> Fault:
    """What stopped the transition: ``fault``, unless another process wrote something before."""
    try:
        if fault.text.startswith(CLOSED_TEXT):  # whoever closed it is about to say why, if it still can
            end = time.monotonic() + _HEARSAY_S
            while time.monotonic() < end and not store.check([_ERROR]):
                time.sleep(0.01)
        return Fault.decode(_first(store, _ERROR, fault.encode()))
    except (RuntimeError, ValueError):  # the store went with the process that kept it
        return fault


def failure(store: Any) -> Fault | None:
    """What some process has said that stopped it."""
    return Fault.decode(bytes(store.get(_ERROR)).decode()) if store.check([_ERROR]) else None


def _first(store: Any, key: str, value: str) -> str:
    """What the first process to write ``key`` wrote."""
    return bytes(store.compare_set(key, "", value)).decode()
