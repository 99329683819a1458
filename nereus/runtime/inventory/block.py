"""Machines -> the cluster block of a plan. What cannot be told is a comment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from nereus.runtime.inventory.gpus import Host

_GIB = 2**30


def cluster_block(hosts: Sequence[Host]) -> str:
    """Equal machines that follow each other are one line."""
    lines, number = ["cluster {"], 0
    for text, group in groupby(hosts, _node):
        names = [host.name for host in group]
        last = number + len(names) - 1
        which = f"n{number}" if len(names) == 1 else f"n[{number}-{last}]"
        where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"  node {which} {{ {text} }}  # {where}" if text else f"  # {where}: {_why_not(hosts, names[0])}")
        number += len(names) if text else 0
    return "\n".join([*lines, "}"]) + "\n"


def _node(host: Host) -> str:
    """Empty where a plan could not describe it."""
    (kind, *others) = dict.fromkeys(host.hardware) or (None,)
    if kind is None or others:
        return ""
    memory = f"  host_mem = {host.mem_bytes // _GIB} GiB" if host.mem_bytes else ""
    return f'gpus = {len(host.hardware)} x "{kind}"{memory}'


def _why_not(hosts: Sequence[Host], name: str) -> str:
    host = next(host for host in hosts if host.name == name)
    if not host.hardware:
        return "no GPUs"
    return "its GPUs are of several kinds" if len(set(host.hardware)) > 1 else "the hardware table has no such GPU"
