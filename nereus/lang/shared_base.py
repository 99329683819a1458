"""Models that are another one without its adapter, in the same processes: one copy of the frozen weights for both."""

from __future__ import annotations

from dataclasses import replace

from nereus.ir.plan import Plan, Stage
from nereus.lang.sink import Sink
from nereus.models.memory.state import copies, keeper_of


def share_bases(plan: Plan, sink: Sink) -> Plan | None:
    """Says which stages run on weights that another model keeps, and gives them the idle policy of that copy. None
    where one of them writes its own."""
    if all(model.lora is None for model in plan.models):
        return plan
    lead: dict[str, Stage] = {}
    for copy in copies(plan):
        for user in copy.users:
            if user.model != copy.model.name:
                lead[user.name] = copy.stage
    stages, refused = [], False
    for stage in plan.stages:
        keeper = lead.get(stage.name)
        if keeper is None:
            stages.append(stage)
            continue
        headline = f"{stage.name} runs on the frozen weights of {keeper.name}, without the adapter"
        sink.note(
            "NRS3026",
            headline,
            stage.span,
            notes=("no second copy is held, moved or counted",),
        )
        for key in ("idle", "swap"):
            if key in dict(stage.key_spans):
                headline = f"{stage.name} runs on the frozen weights of {keeper.name}: {key} has no meaning of its own"
                help_text = f"remove it; what {keeper.name} says holds for both"
                sink.error("NRS3019", headline, stage.key_span(key), "remove it", help=help_text)
                refused = True
        stages.append(replace(stage, idle=keeper.idle, swap=keeper.swap))
    return None if refused else replace(plan, stages=tuple(stages))


def runs_on_another(plan: Plan, stage: Stage) -> bool:
    """Whether ``stage`` has no copy of its own model."""
    return stage.service is None and keeper_of(plan, stage) != stage.model
