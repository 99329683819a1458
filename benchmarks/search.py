"""The search for plans: against brute force, and how long it takes: `make bench` runs the small part.

python benchmarks/search.py                40 random settings against brute force; times at 16, 64 and 1,024 GPUs
python benchmarks/search.py --full         500 settings

Brute force builds every combination of every layout and setting, asks the memory model of `nereusc check` about each
whole plan, and schedules it; nothing of the search's own bounds or sums is used.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.models.memory import check_memory
from nereus.models.memory.neighbours import members
from nereus.planner.calibration import Calibration, calibrate
from nereus.planner.candidates import choices_of
from nereus.planner.rl_step import order_of, stage_time
from nereus.planner.search import LEAST_GAIN, search

SIZES = (16, 64, 1024)


def random_plan(rng: random.Random) -> Plan:
    """Two or three owners on 2 or 4 GPUs of one node, colocated or apart; memory is tight in about half of them."""
    num_gpus = rng.choice([2, 4])
    gpu = rng.choice(["a6000-48gb", "l40s-48gb", "a100-sxm-40gb", "v100-sxm-32gb"])
    model = rng.choice(["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"])
    half = num_gpus // 2
    first = f"n0.gpu[0-{half - 1}]" if half > 1 else "n0.gpu0"
    second = f"n0.gpu[{half}-{num_gpus - 1}]" if half > 1 else f"n0.gpu{num_gpus - 1}"
    apart = rng.random() < 0.5
    generate_on, train_on = (first, second) if apart else ("n0", "n0")
    idle = rng.choice(["resident", "offload"])
    length, cache = rng.choice([512, 1024, 3072]), rng.choice([2, 6])
    lines = [
        f'cluster {{ node n0 {{ gpus = {num_gpus} x "{gpu}"  host_mem = {rng.choice(["64 GiB", "1 TiB"])} }} }}',
        f'model actor = "{model}"',
        "model ref = actor { frozen = true }",
        f"workload {{ algorithm = grpo  prompts = 8  samples = 2  mini_batch = {rng.choice([4, 8])}",
        f"prompt_len = 512  response_len = {length} }}",
        f"stage actor.generate {{ on = {generate_on}  engine = vllm  kv_cache = {cache} GiB  idle = {idle} }}",
        f"stage actor.train {{ on = {train_on}  backend = megatron  optimizer = adam  idle = {idle} }}",
        "stage actor.logprob { with = actor.train }",
    ]
    if rng.random() < 0.4:
        lines.append(f"stage ref.infer {{ on = {generate_on}  backend = megatron  idle = {idle} }}")
    result = resolve_text("\n".join(lines), path="random.plan", base_dir=".")
    assert result.plan is not None, result.diagnostics
    return result.plan


def brute_force(plan: Plan, calibration: Calibration) -> float | None:
    """Cost of the best plan that fits; None where none does."""
    order, options = order_of(plan), []
    for owner in plan.owners():
        found = [(choice.changes, choice.alone) for choice in choices_of(plan, owner)]
        names = [stage.name for stage in members(plan, owner)]
        options.append(
            [
                (changes, alone, {name: stage_time(alone, alone.stage(name), calibration).seconds for name in names})
                for changes, alone in found
            ]
        )
    fastest: dict[str, float] = {}
    for of_owner in options:
        for name in of_owner[0][2]:
            fastest[name] = min(times[name] for _, _, times in of_owner)
    price = LEAST_GAIN * max(order.ends(fastest).values())
    ranked = []
    for combination in itertools.product(*options):
        times = {name: s for _, _, of_owner in combination for name, s in of_owner.items()}
        num_keys = sum(text.count("=") for changes, _, _ in combination for text in changes.values())
        ranked.append((max(order.ends(times).values()) + price * num_keys, [changed for _, changed, _ in combination]))
    for cost, parts in sorted(ranked, key=lambda item: item[0]):
        by_name = {stage.name: stage for part in parts for stage in part.stages}
        whole = _with_stages(plan, by_name)
        if not any(d.severity.value == "error" for d in check_memory(whole)):
            return cost
    return None


def _with_stages(plan: Plan, by_name: dict[str, object]) -> Plan:
    from dataclasses import replace

    return replace(plan, stages=tuple(by_name[stage.name] for stage in plan.stages))  # type: ignore[misc]


def agrees(plan: Plan, calibration: Calibration) -> tuple[float | None, float | None]:
    """(cost that the search finds, cost of the best there is)."""
    found = search(plan, calibration, count=1)
    return (found.best[0].cost if found.best else None), brute_force(plan, calibration)


def pool(num_gpus: int) -> Plan:
    """PPO of an 8B actor and critic over a whole pool."""
    nodes = f"n[0-{num_gpus // 8 - 1}]"
    text = f"""
cluster {{ node {nodes} {{ gpus = 8 x "h100-sxm-80gb"  host_mem = 2 TiB }} }}
model actor = "llama-3.1-8b"
model ref = actor {{ frozen = true }}
model critic = "llama-3.1-8b" {{ head = value }}
workload {{ algorithm = ppo  prompts = {32 * num_gpus}  samples = 1  mini_batch = {8 * num_gpus}
  prompt_len = 1024  response_len = 1024 }}
stage actor.generate {{ engine = vllm  on = {nodes}  tp = 2  kv_cache = 24 GiB  idle = offload }}
stage actor.logprob {{ with = actor.train }}
stage ref.infer {{ backend = megatron  on = {nodes}  tp = 2  idle = offload }}
stage actor.train {{ backend = megatron  on = {nodes}  tp = 4  optimizer = adam }}
stage critic.train {{ backend = megatron  on = {nodes}  tp = 4  optimizer = adam  idle = offload }}
stage critic.infer {{ with = critic.train }}
"""
    result = resolve_text(text, path="pool.plan", base_dir=".")
    assert result.plan is not None, result.diagnostics
    return result.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    calibration = calibrate(())
    num, wrong, none = (500 if args.full else 40), 0, 0
    for number in range(num):
        found, best = agrees(random_plan(random.Random(f"{args.seed} {number}")), calibration)
        none += best is None
        if (found is None) != (best is None) or (best is not None and abs(found - best) > 1e-9 * best):  # type: ignore[operator]
            wrong += 1
            print(f"setting {number}: found {found}, best {best}")
    print(f"{num} settings, {none} of them without a plan that fits: {num - wrong} times the best was found")
    print("GPUs   CPU s   candidates   branches")
    for size in SIZES:
        plan = pool(size)
        search(plan, calibration, count=1)
        start = time.process_time()
        searched = search(plan, calibration, count=1)
        seconds = time.process_time() - start
        print(f"{size:5}  {seconds:6.3f}  {sum(searched.num_candidates.values()):11}  {searched.num_tried:9}")


if __name__ == "__main__":
    main()
