"""Where optimizers count their updates: in each state, in the groups, or in one state of many."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nereus.runtime.adapters.base import BindError  # noqa: E402
from nereus.runtime.adapters.deepspeed import _make_state  # noqa: E402
from nereus.runtime.adapters.deepspeed_job import set_step, step_of  # noqa: E402
from nereus.runtime.adapters.deepspeed_layout import EngineLayout, Master  # noqa: E402


def layout(optimizer: str, module: str, kind: str = "zero12", **group: Any) -> EngineLayout:
    """Two tensors in one group of an optimizer of that name, which has not stepped."""
    inner = type(optimizer, (), {"__module__": module})()
    inner.state, inner.param_groups = {}, [{"params": [], **group}]
    masters = [Master(f"part {number}", 0, torch.zeros(3), ()) for number in range(2)]
    return EngineLayout(kind, inner, masters=masters)


def made(found: EngineLayout) -> list[dict[str, Any]]:
    for master in found.masters:
        _make_state(found.inner, master)
    return [found.inner.state[master.tensor] for master in found.masters]


@pytest.mark.parametrize("kind", ["zero12", "plain"])
@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "FusedAdam", "AdamW"])
def test_states_count(name: str, kind: str) -> None:
    """DeepSpeed's FusedAdam puts a step into the group too, and never counts there."""
    found = layout(name, "deepspeed.ops.adam", kind, step=0)
    states = made(found)
    assert [set(state) for state in states] == [{"step", "exp_avg", "exp_avg_sq"}] * 2
    assert step_of(found, 0) == 0
    set_step(found, 0, 7)
    assert [int(state["step"]) for state in states] == [7, 7] and step_of(found, 0) == 7


def test_groups_of_apex_count() -> None:
    found = layout("FusedAdam", "apex.optimizers.fused_adam")
    assert [set(state) for state in made(found)] == [{"exp_avg", "exp_avg_sq"}] * 2
    set_step(found, 0, 7)
    assert found.inner.param_groups[0]["step"] == 7 and step_of(found, 0) == 7
    found.inner.param_groups[0]["step"] = [4, 4]
    assert step_of(found, 0) == 4


def test_parts_that_disagree_are_refused_but_where_the_last_counts_for_all() -> None:
    found = layout("DeepSpeedCPUAdam", "deepspeed.ops.adam")
    made(found)[1]["step"] = 3
    with pytest.raises(BindError, match=r"group 0 count different steps: \[0, 3\]"):
        step_of(found, 0)
    together = layout("FusedAdam", "deepspeed.ops.adam", "unfused")
    made(together)[1]["step"] = 3
    assert step_of(together, 0) == 3
    apart = layout("FusedAdam", "deepspeed.ops.adam", "zero3")
    made(apart)[1]["step"] = 3
    with pytest.raises(BindError, match=r"count different steps"):
        step_of(apart, 0)
