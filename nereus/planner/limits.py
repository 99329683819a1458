"""What a search for plans has to keep to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from nereus.ir.plan import Plan, Stage

#: Keys of a stage whose values can be limited.
LIMITED = ("tp", "pp", "dp", "ep", "micro_batch", "zero", "recompute")


Serves: TypeAlias = Callable[[Stage], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``pinned``: stages whose processes stay as they are. ``values``: by stage and key (``LIMITED``), those that are
    allowed, as they are written. ``num_gpus``: by stage, least and most; a stage that shares another's processes has
    that one's. ``move``: whether stages may be put on other GPUs of the cluster. ``free``: nodes that stay without
    stages; ``most_gpus``: of the cluster's others, in its order (None: all). ``serves``: whether the job's program can
    serve a stage in a layout other than the present one (None: in all)."""

    pinned: frozenset[str] = frozenset()
    values: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    num_gpus: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    move: bool = False
    free: frozenset[str] = frozenset()
    most_gpus: int | None = None
    serves: Serves | None = None


NO_LIMITS = Limits()


def broken(plan: Plan, stages: Iterable[Stage], limits: Limits) -> str | None:
    """The limit, as an option, that ``stages`` of ``plan`` as they are do not keep to; None where they keep to all."""
    for stage in stages:
        for (name, key), allowed in limits.values.items():
            if name == stage.name and str(getattr(stage, key)) not in allowed:
                return f"--only {name}.{key}={','.join(sorted(allowed))}"
        if not limits.move or stage.service is not None:
            continue
        least, most = limits.num_gpus.get(stage.name, (1, len(stage.devices)))
        if not least <= len(stage.devices) <= most:
            return f"--gpus {stage.name}={least}-{most}"
        node = next((device.node for device in stage.devices if device.node in limits.free), None)
        if node is not None:
            return f"--free {node}"
    return None
