"""Random streams after a change of layout: every rank derives fresh ones, by one rule, and says so.

The streams of the old ranks cannot be dealt to the new ones (their number differs, and a stream taken over by the
wrong rank repeats numbers). So after a change *all* ranks, old and new, seed each stream from
(seed, step, role, rank, stream), where ``rank`` depends on the stream's scope.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nereus.runtime.job_state import RngRule
from nereus.runtime.job_values import JobStateError


class Scope(StrEnum):
    """Who draws the same numbers from a stream."""

    RANK = "rank"  # nobody else
    ALIKE = "alike"  # the ranks that compute the same replicated activations: one tensor-parallel group
    ROLE = "role"  # all ranks of the role: what initialises replicated parameters


#: The scopes that frameworks assume. Tensor-parallel ranks repeat the layers that are not cut, and their dropout: those
#: streams must agree inside the group, or the replicas drift apart without an error.
SCOPES: dict[str, Scope] = {
    "python": Scope.ALIKE,
    "numpy": Scope.ALIKE,
    "torch": Scope.ALIKE,
    "cuda": Scope.ALIKE,
    # Megatron's tracker
    "data-parallel-rng": Scope.ROLE,
    "model-parallel-rng": Scope.RANK,
    "expert-parallel-rng": Scope.RANK,
    "gtp-remat-rng": Scope.RANK,
    "egtp-remat-rng": Scope.RANK,
}

_MEGATRON = "megatron.core.tensor_parallel.random"


@dataclass(frozen=True, slots=True, kw_only=True)
class RngPlace:
    """A process in its role; roles that share a process share its streams, and one name. ``alike``: the first rank of
    those that compute the same replicated activations (itself where there is no tensor parallelism)."""

    role: str
    rank: int
    alike: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All streams of this process, to go back to if a change is given up."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    tracker: Mapping[str, Any]


def derive_seed(rule: RngRule, step: int, place: RngPlace, stream: str) -> int:
    """The seed of ``stream``: 63 bits, the same on every machine. Raises JobStateError for an unknown stream."""
    scope = scope_of(rule, stream)
    rank = {Scope.RANK: place.rank, Scope.ALIKE: place.alike, Scope.ROLE: 0}[scope]
    text = f"nereus rng 1|{rule.seed}|{step}|{place.role}|{rank}|{stream}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def scope_of(rule: RngRule, stream: str) -> Scope:
    declared = dict(rule.declared).get(stream)
    if declared is not None:
        try:
            return Scope(declared)
        except ValueError:
            raise JobStateError(f"rng.declared.{stream}: {declared!r} is not one of {', '.join(Scope)}") from None
    if stream not in SCOPES:
        raise JobStateError(
            f"rng: who shares the stream {stream!r} is not known; declare it in RngRule.declared as {', '.join(Scope)}"
        )
    return SCOPES[stream]


def live_streams() -> tuple[str, ...]:
    """The streams that exist in this process."""
    tracker = _tracker()
    names = tuple(tracker.get_states()) if tracker is not None else ()
    return ("python", "numpy", "torch", *(("cuda",) if torch.cuda.is_available() else ()), *names)


def rederive(rule: RngRule, *, step: int, place: RngPlace) -> tuple[RngRule, str]:
    """Seed all streams of this process afresh; to be called on every rank of the new layout once the framework has
    made its own. Returns the rule for the job state, and what to tell the user. Raises JobStateError, nothing changed,
    where a stream is not known."""
    seeds = {stream: derive_seed(rule, step, place, stream) for stream in live_streams()}
    tracker = _tracker()
    if tracker is not None:
        names = tuple(tracker.get_states())
        tracker.reset()
        for name in names:
            tracker.add(name, seeds[name])
    # After the tracker, which goes through the device's own generator.
    random.seed(seeds["python"])
    np.random.seed(np.random.SeedSequence(seeds["numpy"]).generate_state(624))
    torch.default_generator.manual_seed(seeds["torch"])
    if "cuda" in seeds:
        torch.cuda.manual_seed(seeds["cuda"])
    note = (
        f"random streams {', '.join(seeds)} of every {place.role} rank are derived afresh from (seed {rule.seed}, "
        f"step {step}, role, rank): from here on the job draws other numbers than it would have without the change"
    )
    return replace(rule, derived_step=step), note


def snapshot() -> Snapshot:
    tracker = _tracker()
    return Snapshot(
        python=random.getstate(),
        numpy=np.random.get_state(),
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        tracker={name: _copy(state) for name, state in tracker.get_states().items()} if tracker is not None else {},
    )


def restore(saved: Snapshot) -> None:
    tracker = _tracker()
    if tracker is not None:
        tracker.set_states({name: _copy(state) for name, state in saved.tracker.items()})
    random.setstate(saved.python)
    np.random.set_state(saved.numpy)
    torch.set_rng_state(saved.cpu)
    if saved.cuda is not None:
        torch.cuda.set_rng_state(saved.cuda)


def fingerprints() -> dict[str, str]:
    """A digest of each stream's present state."""
    now = snapshot()
    states: dict[str, bytes] = {
        "python": repr(now.python).encode(),
        "numpy": repr(now.numpy[0]).encode() + now.numpy[1].tobytes() + repr(now.numpy[2:]).encode(),
        "torch": now.cpu.numpy().tobytes(),
    }
    if now.cuda is not None:
        states["cuda"] = now.cuda.numpy().tobytes()
    for name, state in now.tracker.items():
        # A generator where CUDA graphs are on, else its state.
        data = state.get_state() if isinstance(state, torch.Generator) else state
        states[name] = data.cpu().numpy().tobytes()
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in states.items()}


def verify(rule: RngRule, place: RngPlace, group: Any = None) -> None:
    """Check on all ranks of ``group``, before anyone draws, that each stream is shared by exactly those that its scope
    names. Raises JobStateError on every rank, naming stream and ranks."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (place, fingerprints()), group=group)
    wrong: list[str] = []
    first: dict[tuple[str, str], tuple[RngPlace, str]] = {}
    owner: dict[tuple[str, str], tuple[str, RngPlace]] = {}
    for other, streams in everyone:
        for stream, found in streams.items():
            scope = scope_of(rule, stream)
            rank = {Scope.RANK: other.rank, Scope.ALIKE: other.alike, Scope.ROLE: 0}[scope]
            sharers = f"{other.role}:{rank}"
            known, expected = first.setdefault((stream, sharers), (other, found))
            if found != expected:
                wrong.append(f"{stream}: {_who(other)} differs from {_who(known)}, which must draw the same")
            theirs, holder = owner.setdefault((stream, found), (sharers, other))
            if theirs != sharers:
                wrong.append(f"{stream}: {_who(other)} repeats {_who(holder)}, which must draw other numbers")
    if wrong:
        raise JobStateError("random streams: " + "; ".join(wrong))


def _who(place: RngPlace) -> str:
    return f"{place.role} rank {place.rank}"


def _copy(state: Any) -> Any:
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()


def _tracker() -> Any:
    """Megatron's tracker of named streams; None where Megatron has not made one in this process."""
    module = sys.modules.get(_MEGATRON)
    if module is None or not getattr(module, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False):
        return None
    tracker: Any = module.__dict__["get_cuda_rng_tracker"]()
    return tracker if tracker.is_initialized() else None
