"""Job state across ranks: all copies must agree, and ranks that join get one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from nereus.runtime.job_state import JobState, as_json, digest, dumps, loads
from nereus.runtime.job_values import JobStateError, flatten


def exchange(held: JobState | str | None, group: Any = None) -> JobState:
    """The job's state on every rank of ``group``. ``held``: this rank's copy, as a record or as ``dumps`` wrote it;
    None on a rank that joins.

    Raises JobStateError, on all ranks alike, where copies differ (naming fields and ranks), one is damaged, or nobody
    has one. No rank may stay away: it is a collective.
    """
    size = dist.get_world_size(group)
    state, text, problem = _checked(held)
    mine = (None if state is None else digest(as_json(state)), problem)
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, mine, group=group)
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(size))
    # A rank that cannot read its copy must not leave the others waiting for it: all stop together.
    if bad := [f"rank {ranks[i]}: {problem}" for i, (_, problem) in enumerate(answers) if problem]:
        raise JobStateError("; ".join(bad))
    holders = [i for i, (found, _) in enumerate(answers) if found is not None]
    if not holders:
        raise JobStateError("no rank has the state of the job")
    if len({answers[i][0] for i in holders}) > 1:
        raise JobStateError(_disagreement(text, ranks, group))
    if len(holders) < size:
        box = [text]
        dist.broadcast_object_list(box, src=ranks[holders[0]], group=group)
        if state is None:
            state, _, problem = _checked(box[0])
        # The checksum travelled with it; everyone learns whether it held everywhere.
        dist.all_gather_object(answers, problem, group=group)
        if bad := [f"rank {ranks[i]}: {answer}" for i, answer in enumerate(answers) if answer]:
            raise JobStateError("; ".join(bad))
    assert state is not None
    return state


def _checked(held: JobState | str | None) -> tuple[JobState | None, str | None, str | None]:
    """(record, text, what is wrong)."""
    try:
        if held is None:
            return None, None, None
        text = held if isinstance(held, str) else dumps(held)
        return loads(text), text, None
    except JobStateError as error:
        return None, None, str(error)


def _disagreement(text: str | None, ranks: Sequence[int], group: Any) -> str:
    """Which fields differ, and which ranks say what."""
    texts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(texts, text, group=group)
    fields: dict[str, dict[int, object]] = {}
    holders = [(rank, loads(text)) for rank, text in zip(ranks, texts, strict=True) if text is not None]
    for rank, state in holders:
        for path, value in flatten(as_json(state)):
            fields.setdefault(path, {})[rank] = value
    lines = []
    for path, values in fields.items():
        said: dict[str, list[int]] = {}
        for rank, _ in holders:
            said.setdefault(repr(values[rank]) if rank in values else "absent", []).append(rank)
        if len(said) > 1:
            lines.append(f"{path}: " + ", ".join(f"{what} on rank {_list(who)}" for what, who in said.items()))
    return "copies of the job state differ: " + "; ".join(lines)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} and {len(ranks) - 1} more"
