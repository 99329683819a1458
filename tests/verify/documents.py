"""Documents to judge: transitions of tiny models and of the example plans, as ``nereusc compile`` writes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from passes.cycles import cycle
from passes.execute import pipeline
from passes.plans import ARCHS, guest, node, stage

from nereus.cli.transition.saved import saved_document
from nereus.ir.arch import Arch, Moe
from nereus.ir.cluster import Cluster
from nereus.ir.plan import Model, Plan, Stage, Workload
from nereus.ir.units import GB, GIB
from nereus.lang.api import load_plan, pinned, placed_plan_text, resolve_text
from nereus.passes.compiled import Transition
from nereus.passes.manager import Pipeline
from nereus.passes.pipeline import compile_transition
from nereus.verify.api import verify
from nereus.verify.digest import document_digest
from nereus.verify.document import read_document

Json = dict[str, Any]

PLANS = Path(__file__).resolve().parents[1] / "plans"
WORKLOAD = Workload(prompts=840, samples=1, mini_batch=840, prompt_len=4, response_len=4)
MOE = Arch(
    family="qwen3_moe",
    num_layers=2,
    hidden=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    ffn=8,
    vocab=20,
    qk_norm=True,
    moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=4),
)


def cluster(*sizes: int) -> Cluster:
    """With so much host memory that GPUs are the fullest."""
    return Cluster(nodes=tuple(node(f"n{i}", size, host_mem=1024 * GIB) for i, size in enumerate(sizes)))


def document_of(transition: Transition, options: Pipeline | None = None) -> Json:
    saved = saved_document(
        transition, pipeline=options or Pipeline(), allow_destroy=False, old_path="old.plan", new_path="new.plan"
    )
    found: Json = json.loads(json.dumps(saved))
    return found


def plan_of(on: Cluster, models: tuple[Model, ...], *stages: Stage, mode: str = "sync") -> Plan:
    return Plan(cluster=on, models=models, workload=replace(WORKLOAD, mode=mode), stages=stages)


def trainer(on: Cluster, devices: slice, arch: Arch = ARCHS[0], **settings: object) -> Plan:
    actor = Model(name="actor", arch=arch, source="tiny")
    return plan_of(on, (actor,), stage(actor, "train", on.devices[devices], **settings))


def compiled(old: Plan, new: Plan, options: Pipeline) -> Transition:
    """Of what the front end makes of the plans' placed texts, as a saved file has them."""
    sides = []
    for plan in (old, new):
        result = resolve_text(placed_plan_text(pinned(plan)))
        assert result.plan is not None, [d.headline for d in result.diagnostics]
        sides.append(result.plan)
    return compile_transition(*sides, options)


def relays(mode: str = "auto") -> Transition:
    """One node holds everything; two others take it in, relaying to each other."""
    on = cluster(4, 4, 4)
    old, new = trainer(on, slice(0, 4), tp=2, pp=2), trainer(on, slice(4, 12), tp=2, zero=1)
    return compiled(old, new, pipeline(64, 16, 2000, mode=mode))


def rails() -> Transition:
    """As with relays, and every GPU has a NIC of its own."""
    on = Cluster(nodes=tuple(replace(n, rails=4) for n in cluster(4, 4, 4).nodes))
    old, new = trainer(on, slice(0, 4), tp=2, pp=2), trainer(on, slice(4, 12), tp=2, zero=1)
    return compiled(old, new, pipeline(64, 16, 2000))


def sharded() -> Transition:
    """ZeRO-1 over more GPUs: weights are made from masters that arrive."""
    on = cluster(4, 4)
    return compiled(
        trainer(on, slice(0, 4), tp=2, zero=1), trainer(on, slice(0, 8), tp=1, zero=1), pipeline(64, 16, 800)
    )


def lost() -> Transition:
    """A node is lost and its replica with it."""
    on = cluster(4, 4, 4)
    left = Cluster(nodes=(on.nodes[0], on.nodes[2]), lost=("n1",))
    old, new = trainer(on, slice(0, 8), tp=2, pp=2), trainer(left, slice(0, 8), tp=2, pp=2)
    return compiled(old, new, pipeline(64, 16, 800))


def experts() -> Transition:
    on = cluster(4, 4)
    old = trainer(on, slice(0, 4), MOE, tp=2, ep=2, etp=1)
    new = trainer(on, slice(0, 8), MOE, tp=2, ep=4, etp=1, zero=1)
    return compiled(old, new, pipeline(64, 16, 800))


def concurrent() -> Transition:
    """Asynchronous: generation has GPUs of its own, and gives one node to training."""
    on = cluster(4, 4, 4)
    actor = Model(name="actor", arch=ARCHS[0], source="tiny")

    def both(split: int, **settings: object) -> Plan:
        generate = stage(actor, "generate", on.devices[:split], tp=2, engine="vllm")
        return plan_of(on, (actor,), generate, stage(actor, "train", on.devices[split:], **settings), mode="async")

    return compiled(both(8, tp=2), both(4, tp=2, zero=1), pipeline(64, 16, 800))


def stale() -> Transition:
    """Synchronous: generation on GPUs of its own has weights that are a version behind."""
    on = cluster(4, 4, 4)
    actor = Model(name="actor", arch=ARCHS[0], source="tiny")
    ref = Model(name="ref", arch=ARCHS[0], source="tiny", frozen=True, base="actor")

    def plan(last: int) -> Plan:
        train = stage(actor, "train", on.devices[4:last], tp=2)
        generate = stage(actor, "generate", on.devices[:4], tp=2, engine="vllm")
        aside = guest(train, ref, "infer", swap="host")
        return plan_of(on, (actor, ref), generate, train, aside)

    return compiled(plan(8), plan(12), pipeline(64, 16, 800))


def split() -> Transition:
    """Optimizer state partly in host memory, and less of it there after the change."""
    on = cluster(4, 4)

    def plan(devices: slice, share: float, **settings: object) -> Plan:
        found = trainer(on, devices, **settings)
        slots = tuple(
            replace(s, host=True, host_share=share) if s.name != "weight" else s for s in found.stages[0].slots
        )
        return replace(found, stages=(replace(found.stages[0], slots=slots),))

    return compiled(plan(slice(0, 4), 0.5, tp=2, zero=1), plan(slice(0, 8), 0.25, zero=1), pipeline(64, 16, 800))


def through_host() -> Transition:
    """Three model-stages trade full GPUs: one storage of the cycle passes through host memory."""
    options = replace(pipeline(10**6, 10**6, 200), mode="tight")
    old, new = cycle(3)
    full = int(compile_transition(old, new, options).memory.tight_base[:3].max())
    return compile_transition(*(with_capacity(plan, full, 2**30) for plan in (old, new)), options)


def with_capacity(plan: Plan, gpu_bytes: int, host_bytes: int) -> Plan:
    """Machines that no data sheet has: such plans have no text."""
    nodes = tuple(
        replace(n, gpu=replace(n.gpu, mem_gb=(gpu_bytes + 0.5) / 0.9 / GB), host_mem_bytes=host_bytes)
        for n in plan.cluster.nodes
    )
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


def example(old: str, new: str) -> Callable[[], Transition]:
    """Two of ``tests/plans``."""

    def make() -> Transition:
        sides = [load_plan(str(PLANS / f"{name}.plan")).plan for name in (old, new)]
        assert sides[0] is not None and sides[1] is not None
        return compile_transition(sides[0], sides[1])

    return make


MAKERS: dict[str, Callable[[], Transition]] = {
    "relays": relays,
    "tight": lambda: relays("tight"),
    "rails": rails,
    "sharded": sharded,
    "lost": lost,
    "experts": experts,
    "concurrent": concurrent,
    "stale": stale,
    "split": split,
    "through-host": through_host,
    "8b-grows": example("ppo-8b-2k", "ppo-8b-4k"),
    "8b-zero1": example("ppo-8b-zero1", "ppo-8b-2k"),
    "swap-full": example("swap-full", "swap-full-new"),
    "overlap": example("overlap-before", "overlap-after"),
    "moe-ep8": example("grpo-30b-moe-ep4", "grpo-30b-moe-ep8"),
}
TINY = ("relays", "tight", "rails", "sharded", "lost", "experts", "concurrent", "stale", "split")


@cache
def _compiled(name: str) -> tuple[Transition, str]:
    transition = MAKERS[name]()
    return transition, json.dumps(document_of(transition))


def document(name: str) -> Json:
    """A fresh copy of a compiled document."""
    found: Json = json.loads(_compiled(name)[1])
    return found


def transition(name: str) -> Transition:
    return _compiled(name)[0]


def sealed(name: str, value: Json) -> Json:
    """``value`` with digest and certificate about the schedule that it has: whoever planted a fault covers it up."""
    value = copy.copy(value)
    known = transition(name)
    value["digest"] = document_digest(read_document(value), known.old, known.new)
    value["certificate"] = {**value["certificate"], "digest": value["digest"]}
    return value


def broken(name: str, value: Json) -> dict[str, str]:
    """Properties that do not hold, with what is said about them."""
    plans = None
    if name == "through-host":
        plans = (transition(name).old, transition(name).new)
    return {f.name: f.evidence for f in verify(value, plans).findings if not f.holds}
