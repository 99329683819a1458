"""Full GPUs whose model-stages trade places, with spares of every size: what the compiler finds is proved."""

from __future__ import annotations

import pytest
from passes.cycles import Case, cycle
from passes.execute import pipeline
from verify.documents import document_of

from nereus.passes.compiled import Transition
from nereus.verify.api import verify

OPTIONS = pipeline(400, 40, 4000)
LAYOUTS = {
    "one": {"group": 1},
    "dp-tp": {"group": 2, "settings": ({}, {"tp": 2})},
    "trained": {"group": 2, "trained": True, "settings": ({"tp": 2}, {"zero": 1})},
}


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cycles_of_full_gpus_are_proved(num_stages: int, layout: str) -> None:
    case = Case.of(cycle(num_stages, **LAYOUTS[layout]), OPTIONS)  # type: ignore[arg-type]
    room = 4 * int(case.memory.state.old.max())
    staged = 0
    for memory in (
        case.within(case.largest),
        case.within(case.largest // 2, host_spare=room),
        case.within(0, host_spare=room),
    ):
        transition = case.tight(memory)
        assert isinstance(transition, Transition)
        staged += len(transition.schedule.staged)
        value = document_of(transition)
        value["certificate"]["digest"] = value["digest"]
        found = {
            f.name: f.evidence for f in verify(value, plans=(transition.old, transition.new)).findings if not f.holds
        }
        # The certificate is that of the roomy compilation which the case began with.
        assert set(found) <= {"certificate", "bounds"}, found
    # Where devices hold as much before as after, the first to come has no room at all.
    assert staged or layout != "one"
