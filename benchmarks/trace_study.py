"""Policies of adaptation on traces of lengths, pools and machines: `make bench` runs three traces.

python benchmarks/trace_study.py               one trace of each cluster
python benchmarks/trace_study.py --full        24 traces on three clusters, and 1,000 steps to 1,024 GPUs
python benchmarks/trace_study.py --full --write    and writes the tables into docs/trace-study.md

Traces, clusters and jobs are `nereus/replay/generator.py` and `jobs.py`: one seed each, nothing drawn elsewhere.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from nereus.planner.calibration import calibrate
from nereus.replay.generator import Recipe, generate
from nereus.replay.jobs import SITES, Site, job, limits_of
from nereus.replay.policies import Static
from nereus.replay.run import run
from nereus.replay.space import Space
from nereus.replay.study import USUAL, Study, study
from nereus.replay.trace import Trace
from nereus.replay.world import World

DOC = Path(__file__).parent.parent / "docs" / "trace-study.md"
NODES = {"h200": 8, "a100": 16, "mi250x": 8}
PROMPTS, MINI_BATCH = 1536, 384
BUDGET_TOKENS = 16_384
FRAMEWORKS = ("openrlhf", "verl", "areal")
#: (trace, whether training packs micro-batches by tokens).
TRACES: tuple[tuple[Recipe, bool], ...] = (
    (Recipe(lengths="growth", steps=26), False),  # the paper's first
    (Recipe(lengths="growth", pool="elastic"), False),
    (Recipe(lengths="reasoning", drift=True), True),
    (Recipe(lengths="reasoning", pool="spot"), False),
    (Recipe(lengths="shrink", pool="spot", drift=True), False),
    (Recipe(lengths="stage"), False),
    (Recipe(lengths="saw", pool="failing"), False),
    (Recipe(lengths="growth", pool="spot", losses=6), True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    site: str
    trace: str
    budget: bool
    study: Study
    #: Seconds of the frameworks' fixed plans, by name; those that have none for some pool are left out.
    frameworks: dict[str, float]
    cpu_s: float


def one(site: Site, recipe: Recipe, budget: bool, *, model_error: float) -> Result:
    start = time.process_time()
    calibration, num_nodes = calibrate(()), NODES[site.name]
    tokens = BUDGET_TOKENS if budget else None
    trace = generate(recipe, [site.gpus_per_node] * num_nodes)
    plan = job(site, num_nodes, max_tokens=tokens, prompts=PROMPTS, mini_batch=MINI_BATCH)
    found = study(plan, trace, calibration, model_error=model_error)
    cpu_s = time.process_time() - start
    frameworks = {}
    for name in FRAMEWORKS:
        fixed = job(site, num_nodes, framework=name, max_tokens=tokens, prompts=PROMPTS, mini_batch=MINI_BATCH)
        space = Space(fixed, calibration, limits_of(name))
        world = World(space, trace, model_error=model_error)
        if _has_plans(space, world, trace):
            frameworks[name] = run(Static(), world).total_s
    return Result(
        site=site.name, trace=recipe.name, budget=budget, study=found, frameworks=frameworks, cpu_s=cpu_s
    )  # fmt: skip


def _has_plans(space: Space, world: World, trace: Trace) -> bool:
    steps = enumerate(trace.rows)
    return all(space.choices(world.num_nodes[step], row.response_mean) for step, row in steps)


def large(steps: int = 1000) -> Study:
    """To 1,024 GPUs of the MI250X cluster, in doublings from one node, while lengths grow."""
    site = next(site for site in SITES if site.name == "mi250x")
    plan = job(site, 128, prompts=4096, mini_batch=1024)
    trace = generate(Recipe(lengths="growth", pool="elastic", steps=steps), [8] * 128)
    return study(plan, trace, calibrate(()), policies=("sleep-wake", "payback", "ours"))


def tables(results: Sequence[Result], scale: Study | None) -> list[str]:
    names = [*USUAL, "offline"]
    lines = [f"{len(results)} traces; predictions off by 5 % a layout.", ""]
    columns = ("policy", "s a step", "mean regret", "worst", "changes", "share between steps", "worst stall, s", "OOM")
    lines += [f"| {' | '.join(columns)} |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for number, name in enumerate(names):
        outcomes = [result.study.outcomes[number] for result in results]
        regrets = [result.study.regret(outcome) for result, outcome in zip(results, outcomes, strict=True)]
        lines.append(
            f"| `{name}` | {fmean(o.total_s / len(o.plans) for o in outcomes):.1f} | {100 * fmean(regrets):.2f}% | "
            f"{100 * max(regrets):.1f}% | {fmean(o.num_changes for o in outcomes):.1f} | "
            f"{100 * sum(sum(o.between_s) for o in outcomes) / sum(o.total_s for o in outcomes):.2f}% | "
            f"{max(o.worst_stall_s for o in outcomes):.0f} | {sum(o.overflows for o in outcomes)} |"
        )
    lines += ["", "Mean regret:", "", *_bars(names, results)]
    lines += ["", "Regret on each trace, and the fixed plans of frameworks against `ours` (times as long):", ""]
    shown = list(USUAL)
    lines.append(f"| cluster, trace | {' | '.join(shown)} | {' | '.join(FRAMEWORKS)} | CPU s |")
    lines.append("|---" * (len(shown) + len(FRAMEWORKS) + 2) + "|")
    for result in results:
        ours = result.study.outcomes[names.index("ours")].total_s
        cells = [f"{100 * result.study.regret(outcome):.1f}%" for outcome in result.study.outcomes[:-1]]
        fixed = [f"{result.frameworks[f] / ours:.2f}" if f in result.frameworks else "" for f in FRAMEWORKS]
        name = f"{result.site}, {result.trace}{', token budget' if result.budget else ''}"
        lines.append(f"| {name} | {' | '.join(cells)} | {' | '.join(fixed)} | {result.cpu_s:.0f} |")
    if scale is not None:
        lines += ["", "1,000 steps from 8 to 1,024 GPUs (MI250X), lengths growing:", ""]
        lines += ["| policy | s a step | regret | changes | between steps, s | share | worst stall, s |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for outcome in scale.outcomes:
            lines.append(
                f"| `{outcome.policy}` | {outcome.total_s / len(outcome.plans):.1f} | "
                f"{100 * scale.regret(outcome):.2f}% | {outcome.num_changes} | {sum(outcome.between_s):.1f} | "
                f"{100 * outcome.share_between:.3f}% | {outcome.worst_stall_s:.1f} |"
            )
    return lines


def _bars(names: Sequence[str], results: Sequence[Result]) -> list[str]:
    """One # for a tenth of a percent."""
    means = [fmean(result.study.regret(result.study.outcomes[n]) for result in results) for n in range(len(names))]
    return [
        f"    {name:10} {'#' * round(1000 * mean)} {100 * mean:.2f}%" for name, mean in zip(names, means, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--write", action="store_true", help="into docs/trace-study.md; with --full")
    parser.add_argument("--model-error", type=float, default=0.05)
    args = parser.parse_args()
    chosen = TRACES if args.full else TRACES[:1]
    results = []
    for site in SITES:
        for recipe, budget in chosen:
            results.append(one(site, recipe, budget, model_error=args.model_error))
            regrets = (f"{o.policy} {100 * results[-1].study.regret(o):.2f}%" for o in results[-1].study.outcomes)
            print(f"{site.name} {recipe.name}: {', '.join(regrets)}; {results[-1].cpu_s:.1f} CPU s", flush=True)
    lines = tables(results, large() if args.full else None)
    print("\n".join(lines))
    if args.write and args.full:
        begin, end = "<!-- study: begin -->", "<!-- study: end -->"
        before, _, rest = DOC.read_text().partition(begin)
        DOC.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
