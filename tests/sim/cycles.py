"""Plan pairs in which model-stages that fill their GPUs go round in a circle."""

from __future__ import annotations

from dataclasses import replace

from passes.plans import ARCHS, WORKLOAD, cluster, stage

from nereus.ir.plan import Model, Plan
from nereus.lang.api import resolve_text


def cycle_plans(count: int, gpus: int = 4) -> tuple[Plan, Plan]:
    """``count`` trainers, each alone on a node of ``gpus`` L40S and filling it so far that no second copy fits; in the
    new plan each has the node of the next. Node and trainer i are numbered alike in the old plan."""

    def text(shift: int) -> str:
        lines = [f'cluster {{ node n[0-{count - 1}] {{ gpus = {gpus} x "l40s-48gb"  host_mem = 256 GiB }} }}']
        for number in range(count):
            # One actor; the others are critics of their own, since a job has one policy.
            head = "" if number == 0 else " { head = value }"
            lines.append(f'model {_name(number)} = "qwen2.5-7b"{head}')
        lines.append(
            "workload { algorithm = ppo  mode = async { staleness = 1 }  prompts = 128  samples = 1  mini_batch = 128  "
            "prompt_len = 512  response_len = 512 }"
        )
        for number in range(count):
            node = (number + shift) % count
            lines.append(
                f"stage {_name(number)}.train {{ on = n{node}  tp = {gpus}  micro_batch = 1  recompute = full  "
                "optimizer = adam }"
            )
        return "\n".join(lines) + "\n"

    plans = []
    for shift in (0, 1):
        result = resolve_text(text(shift))
        assert result.plan is not None, [str(d) for d in result.diagnostics]
        plans.append(result.plan)
    return plans[0], plans[1]


def _name(number: int) -> str:
    return "actor" if number == 0 else ("critic" if number == 1 else f"critic{number}")


def tiny_cycle(count: int, gpus: int = 2, *, relayout: bool = False, shift: int = 1) -> tuple[Plan, Plan]:
    """The same with tiny models. ``relayout``: tensor parallelism becomes pipeline parallelism on the way."""
    on = cluster(*(gpus,) * count)
    models = tuple(
        Model(name=_name(n), arch=ARCHS[n % 2], source="tiny", head="lm" if n == 0 else "value") for n in range(count)
    )

    def one(by: int, **degrees: int) -> Plan:
        stages = tuple(
            stage(model, "train", on.nodes[(number + by) % count].devices, **degrees)
            for number, model in enumerate(models)
        )
        workload = replace(WORKLOAD, mode="async")
        return Plan(cluster=on, models=models, workload=workload, stages=stages)

    before = {"tp": gpus}
    return one(0, **before), one(shift, **({"pp": gpus} if relayout else before))
