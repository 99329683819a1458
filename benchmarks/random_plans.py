"""Random transitions with fixed seeds, up to 1,024 GPUs: degrees, orders, sharding, pools, NICs and models are drawn,
and a draw that the front end or the memory model refuses is drawn again with the next number of the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from transitions import ASYNC, ORDERS, SYNC, Case, on, plan_text, resolved, train

from nereus.ir.diagnostic import DiagnosticError, Severity
from nereus.ir.plan import Plan
from nereus.models.legality import legal_tp
from nereus.models.memory import check_memory
from nereus.models.presets import preset
from nereus.passes.hold import hold
from nereus.passes.refusals import check_state

#: (nodes of 8 GPUs, seeds): 27 transitions from 8 to 1,024 GPUs.
SIZES = ((1, 5), (2, 5), (4, 5), (8, 4), (16, 3), (32, 2), (64, 2), (128, 1))
MODELS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen3-8b", "llama-3.1-8b", "qwen2.5-14b", "qwen3-32b", "llama-3.1-70b")
GPUS = ("h100-sxm-80gb", "h200-sxm-141gb", "mi250x-gcd-64gb", "a100-sxm-80gb")
NICS = (25, 100, 200, 400)
TRIES = 200


def random_transitions() -> Iterator[Case]:
    for nodes, count in SIZES:
        for seed in range(count):
            yield Case(f"random-{nodes * 8}-{seed}", "random", nodes * 8, _maker(nodes, seed))


def _maker(nodes: int, seed: int) -> Callable[[], tuple[Plan, Plan]]:
    def make() -> tuple[Plan, Plan]:
        for attempt in range(TRIES):
            dice = random.Random(f"{nodes} {seed} {attempt}")
            try:
                old, new = _draw(dice, nodes)
            except ValueError:
                continue
            if all(_fits(plan) for plan in (old, new)) and not _drops(old, new):
                return old, new
        raise ValueError(f"no pair of plans for {nodes} nodes in {TRIES} draws")

    return make


def _fits(plan: Plan) -> bool:
    return all(found.severity is not Severity.ERROR for found in check_memory(plan))


def _drops(old: Plan, new: Plan) -> bool:
    try:
        return bool(check_state(hold(old), hold(new), new, allow_destroy=False))
    except DiagnosticError:
        return True


def _draw(dice: random.Random, nodes: int) -> tuple[Plan, Plan]:
    model, gpu, nic = dice.choice(MODELS), dice.choice(GPUS), dice.choice(NICS)
    mode = dice.choice((SYNC, SYNC, ASYNC)) if nodes > 1 else SYNC
    critic = dice.random() < 0.5
    models = f'model actor = "{model}"' + (f'\nmodel critic = "{model}" {{ head = value }}' if critic else "")
    order = dice.choice(tuple(ORDERS.values()))
    sides = [_stages(dice, nodes, model, critic, mode, order) for _ in range(2)]
    texts = [plan_text(nodes, models, stages, gpu=gpu, nic=nic, mode=mode) for stages in sides]
    return resolved(texts[0], "random old"), resolved(texts[1], "random new")


def _stages(dice: random.Random, nodes: int, model: str, critic: bool, mode: str, order: str) -> list[str]:
    first = 0
    found = []
    if mode == ASYNC:
        first = dice.choice([n for n in (1, nodes // 4, nodes // 2) if 0 < n < nodes])
        tp = dice.choice([t for t in legal_tp(preset(model), limit=8) if 8 % t == 0])
        found.append(f"stage actor.generate {{ engine = vllm  on = {on(0, 8 * first)}  tp = {tp}  kv_cache = 8 GiB }}")
    for name in ("actor", "critic") if critic else ("actor",):
        most = nodes - first
        size = dice.choice([n for n in (1, 2, 3, 4, 8, 16, 32, 64, 128) if n <= most and 4 * n >= most])
        start = first + dice.choice((0, most - size))
        tp = dice.choice([t for t in legal_tp(preset(model), limit=8) if 8 % t == 0])
        layers = preset(model).num_layers
        pp = dice.choice([p for p in (1, 2, 4, 8) if layers % p == 0 and 8 * size % (tp * p) == 0])
        zero = dice.choice((0, 0, 1, 1, 3))
        found.append(train(name, on(8 * start, 8 * (start + size)), order, tp=tp, pp=pp, zero=zero))
    return found
