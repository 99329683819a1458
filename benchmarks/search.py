"""The search for plans: against brute force, and how long it takes: `make bench` runs the small part.

python benchmarks/search.py                40 random settings against brute force; times at 16, 64 and 1,024 GPUs
python benchmarks/search.py --full         500 settings

Brute force builds every combination of every layout and setting, asks the memory model of `nereusc check` about each
whole plan, and schedules it; nothing of the search's own bounds or sums is used.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.lang.api import resolve_text
from nereus.models.memory import check_memory, steady_state
from nereus.planner.calibration import Calibration, calibrate
from nereus.planner.candidates import choices_of
from nereus.planner.limits import Limits
from nereus.planner.rl_step import order_of, stage_time
from nereus.planner.search import LEAST_GAIN, search

SIZES = (16, 64, 1024)
#: Placements are tried one by one where there are about as few.
_FEW = 64


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


@dataclass(frozen=True)
class Option:
    """One layout of one owner on certain GPUs; the keys of both count."""

    num_keys: int
    alone: Plan
    seconds: dict[str, float]


def options_of(plan: Plan, owner: Stage, calibration: Calibration, *, moved: bool) -> list[Option]:
    found = []
    for choice in choices_of(plan, owner, moved=moved):
        alone = choice.alone
        times = {stage.name: stage_time(alone, stage, calibration).seconds for stage in alone.stages}
        found.append(Option(sum(text.count("=") for text in choice.changes.values()) + moved, alone, times))
    return found


def brute_force(plan: Plan, calibration: Calibration, *, move: bool) -> float | None:
    """Cost of the best plan that fits; None where none does. ``move``: owners on any runs of neighbouring GPUs, each
    two of them on the same or on different ones."""
    known: dict[tuple[str, tuple[Device, ...]], list[Option]] = {}
    wholes, fastest_s = [], math.inf
    for devices in _placements(plan) if move else [{owner.name: owner.devices for owner in plan.owners()}]:
        put, options = _put(plan, devices), []
        for owner in put.owners():
            key = (owner.name, owner.devices)
            if key not in known:
                moved = owner.devices != plan.stage(owner.name).devices
                known[key] = options_of(put, owner, calibration, moved=moved)
            options.append(known[key])
        if all(options):
            order = order_of(put)
            fastest = {n: min(o.seconds[n] for o in of_owner) for of_owner in options for n in of_owner[0].seconds}
            fastest_s = min(fastest_s, max(order.ends(fastest).values()))
            wholes.append((put, order, options))
    price_s, ranked = LEAST_GAIN * fastest_s, []
    for number, (_, order, options) in enumerate(wholes):
        shape = tuple(len(of_owner) for of_owner in options)
        at = np.indices(shape).reshape(len(shape), -1)
        times = {
            name: np.array([o.seconds[name] for o in of_owner])[column]
            for of_owner, column in zip(options, at, strict=True)
            for name in of_owner[0].seconds
        }
        keys = sum(
            np.array([o.num_keys for o in of_owner])[column] for of_owner, column in zip(options, at, strict=True)
        )
        costs = order.last_ends(times) + price_s * keys
        ranked.append((costs, np.full(len(costs), number), np.arange(len(costs))))
    if not ranked:
        return None
    costs, whole, combination = (np.concatenate(column) for column in zip(*ranked, strict=True))
    for row in np.argsort(costs, kind="stable").tolist():
        put, _, options = wholes[whole[row]]
        places = np.unravel_index(combination[row], tuple(len(of_owner) for of_owner in options))
        chosen = [of_owner[int(at)] for of_owner, at in zip(options, places, strict=True)]
        by_name = {stage.name: stage for option in chosen for stage in option.alone.stages}
        tried = replace(put, stages=tuple(by_name[stage.name] for stage in put.stages))
        report = steady_state(tried)
        if not all(each.fits for each in (*report.worst_rows(), *report.hosts)):
            continue  # check_memory would say so too, and look for remedies
        if not any(d.severity.value == "error" for d in check_memory(tried, report)):
            return float(costs[row])
    return None


def _placements(plan: Plan) -> Iterator[dict[str, tuple[Device, ...]]]:
    devices = plan.cluster.devices
    runs = [devices[a:b] for a in range(len(devices)) for b in range(a + 1, len(devices) + 1)]
    names = [owner.name for owner in plan.owners()]
    for chosen in itertools.product(runs, repeat=len(names)):
        if all(a == b or set(a).isdisjoint(b) for a, b in itertools.combinations(chosen, 2)):
            yield dict(zip(names, chosen, strict=True))


def _put(plan: Plan, devices: dict[str, tuple[Device, ...]]) -> Plan:
    def of(stage: Stage) -> tuple[Device, ...]:
        return devices[stage.name if stage.with_ is None else stage.with_]

    return replace(plan, stages=tuple(replace(stage, devices=of(stage), place=None) for stage in plan.stages))


def agrees(plan: Plan, calibration: Calibration, *, move: bool = False) -> tuple[float | None, float | None]:
    """(cost that the search finds, cost of the best there is)."""
    found = search(plan, calibration, count=1, limits=Limits(move=move))
    return (found.best[0].cost if found.best else None), brute_force(plan, calibration, move=move)


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
    num, wrong, none, moving = (500 if args.full else 40), 0, 0, 0
    for number in range(num):
        plan = random_plan(random.Random(f"{args.seed} {number}"))
        move = len(plan.cluster.devices) ** len(plan.owners()) <= _FEW
        found, best = agrees(plan, calibration, move=move)
        none, moving = none + (best is None), moving + move
        if (found is None) != (best is None) or (best is not None and abs(found - best) > 1e-9 * best):  # type: ignore[operator]
            wrong += 1
            print(f"setting {number}: found {found}, best {best}")
    print(f"{num} settings, {moving} of them with other GPUs for each stage, {none} without a plan that fits:")
    print(f"{num - wrong} times the best was found")
    print("GPUs  placements   CPU s   candidates   branches")
    for size, move in itertools.product(SIZES, (False, True)):
        plan, limits = pool(size), Limits(move=move)
        search(plan, calibration, count=1, limits=limits)
        start = time.process_time()
        searched = search(plan, calibration, count=1, limits=limits)
        seconds = time.process_time() - start
        candidates = sum(searched.num_candidates.values())
        print(f"{size:5}  {'all' if move else 'present':>10}  {seconds:6.3f}  {candidates:11}  {searched.num_tried:9}")


if __name__ == "__main__":
    main()
