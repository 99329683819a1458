"""Degrees, sharding, batching and offload of one verl worker (actor, reference or critic) as entries of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.arch import Arch
from nereus.ir.diagnostic import Severity
from nereus.lang.importers.hydra import Config
from nereus.lang.importers.plan_text import Block, Entry

_TRANSFORMER = "override_transformer_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Where verl keeps the settings of a role."""

    role: str  # actor_rollout_ref.actor
    engine: str  # ...fsdp_config or ...megatron
    megatron: bool
    trains: bool


def data_parallel(config: Config, worker: Worker, gpus: int) -> int:
    """Data-parallel size, at least 1 even where the degrees do not divide."""
    if not worker.megatron:
        return max(1, gpus // ulysses(config, worker))
    model = 1
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        model *= config.integer(f"{worker.engine}.{key}", least=1) or 1
    return max(1, gpus // model)


def ulysses(config: Config, worker: Worker) -> int:
    nested = f"{worker.engine}.ulysses_sequence_parallel_size"
    size = config.integer(f"{worker.role}.ulysses_sequence_parallel_size", least=1) or 1
    return max(size, (config.integer(nested, least=1) or 1) if config.written(nested) else 1)


def add_layout(block: Block, config: Config, worker: Worker, gpus: int, arch: Arch | None) -> None:
    """Degrees and sharding; what decides where bytes lie."""
    if worker.megatron:
        _megatron(block, config, worker, arch)
    else:
        _fsdp(block, config, worker, gpus)


def _fsdp(block: Block, config: Config, worker: Worker, gpus: int) -> None:
    strategy = config.text(f"{worker.role}.strategy") or "fsdp"
    notes = {"fsdp": "", "fsdp2": "fsdp2 there"}
    block.add("backend", "fsdp", notes.get(strategy, f"`{strategy}` there, described as FSDP"))
    if strategy not in notes:
        config.reports.add(
            "NRS2508",
            Severity.WARNING,
            f"the training backend `{strategy}` has no description of its own here",
            config.place(f"{worker.role}.strategy"),
            label="described as FSDP with the same sharding",
        )
    sequence = ulysses(config, worker)
    size = config.integer(f"{worker.engine}.fsdp_size")
    written = size if size is not None and 0 < size < gpus else None
    if sequence > 1:
        block.add("cp", sequence, "Ulysses sequence parallelism, as context parallelism: dp = GPUs / cp")
    if written is None:
        which = "data-parallel and Ulysses" if sequence > 1 else "data-parallel"
        block.add("fsdp", "full", f"fsdp_size -1: over all {which} ranks")
    elif written == 1:
        block.add("fsdp", "off", "fsdp_size 1")
    else:
        block.add("fsdp", written, "counts Ulysses ranks too, here as there" if sequence > 1 else "")


def _megatron(block: Block, config: Config, worker: Worker, arch: Arch | None) -> None:
    def degree(key: str) -> int:
        return config.integer(f"{worker.engine}.{key}", least=1) or 1

    block.add("backend", "megatron")
    tp, pp = degree("tensor_model_parallel_size"), degree("pipeline_model_parallel_size")
    unset = "" if config.written(f"{worker.engine}.tensor_model_parallel_size") else _source(worker)
    block.add("tp", tp, unset)
    block.add("pp", pp)
    if (split := pipeline_split(config, worker, arch, pp)) is not None:
        layers, why = split
        block.add("pp_split", f"({', '.join(map(str, layers))})", why)
    if (cp := degree("context_parallel_size")) > 1:
        block.add("cp", cp)
    if arch is None or arch.moe is not None:
        if (ep := degree("expert_model_parallel_size")) > 1:
            block.add("ep", ep)
        etp = config.integer(f"{worker.engine}.expert_tensor_parallel_size", least=1)
        if etp is None and tp > 1:
            block.add("etp", tp, "Megatron's default: expert tp = tp")
        elif etp is not None and etp != tp:
            block.add("etp", etp)
    if (vp := degree("virtual_pipeline_model_parallel_size")) > 1:
        block.add("vp", vp)
    if tp > 1 and not config.flag(f"{worker.engine}.sequence_parallel"):
        block.add("sp", "false")
    if worker.trains and config.flag(f"{worker.engine}.use_distributed_optimizer"):
        default = "" if config.written(f"{worker.engine}.use_distributed_optimizer") else ", verl's default"
        block.add("zero", 1, f"use_distributed_optimizer{default}")


def _source(worker: Worker) -> str:
    return "not set there: the actor's" if worker.role.endswith(".ref") else "not set there: 1"


def pipeline_split(config: Config, worker: Worker, arch: Arch | None, pp: int) -> tuple[tuple[int, ...], str] | None:
    """Layers per stage where they are uneven, with the reason; None for an even split or an unknown model."""
    if pp <= 1 or arch is None:
        return None
    layers = arch.num_layers
    prefix = f"{worker.engine}.{_TRANSFORMER}"
    first = config.integer(f"{prefix}.num_layers_in_first_pipeline_stage", least=1)
    last = config.integer(f"{prefix}.num_layers_in_last_pipeline_stage", least=1)
    embedding = int(config.flag(f"{prefix}.account_for_embedding_in_pipeline_split"))
    loss = int(config.flag(f"{prefix}.account_for_loss_in_pipeline_split"))
    if embedding or loss:
        units, rest = divmod(layers + embedding + loss, pp)
        if rest:
            return None
        split = [units] * pp
        split[0] -= embedding
        split[-1] -= loss
        return tuple(split), f"embedding and loss count as layers: {layers + embedding + loss} units over {pp} stages"
    if first is None and last is None:
        return None
    ends = (first is not None) + (last is not None)
    middle = layers - (first or 0) - (last or 0)
    if pp == ends:
        split = [first, last] if first is not None and last is not None else []
        return (tuple(split), "as written for first and last stage") if sum(split) == layers else None
    each, rest = divmod(middle, pp - ends)
    if rest or each < 1:
        return None
    split = [each] * (pp - ends)
    if first is not None:
        split.insert(0, first)
    if last is not None:
        split.append(last)
    named = " and ".join(n for n, v in (("first", first), ("last", last)) if v is not None)
    return tuple(split), f"{named} stage as written, the rest of {layers} layers evenly"


def add_batch(block: Block, config: Config, *, dynamic: str, tokens: str, micro: str, legacy: str, dp: int) -> None:
    """``max_tokens`` where verl packs by tokens, else ``micro_batch`` per GPU; ``legacy`` counts over all ranks."""
    if config.flag(dynamic):
        if (budget := config.integer(tokens, least=1)) is not None:
            block.add("max_tokens", budget, "use_dynamic_bsz: packed up to so many tokens per GPU")
        return
    per_gpu = config.integer(micro, least=1)
    if per_gpu is not None:
        block.add("micro_batch", per_gpu)
        return
    total = config.integer(legacy, least=1)
    if total is not None:
        name = legacy.rpartition(".")[2]
        block.add("micro_batch", max(1, total // dp), f"{name} {total} counts over dp = {dp} (verl's old key)")
    elif block.header.endswith(".train"):
        block.add("micro_batch", 1, f"{micro.rpartition('.')[2]} is not set there")


def add_memory(block: Block, config: Config, worker: Worker, recompute_key: str) -> None:
    """Recompute, optimizer and offload of a worker that trains."""
    reports = config.reports
    engine = worker.engine
    if worker.megatron:
        granularity = config.text(f"{engine}.{_TRANSFORMER}.recompute_granularity")
        block.add("recompute", granularity if granularity in ("full", "selective") else "none")
    else:
        default = "" if config.written(recompute_key) else ", verl's default"
        on = config.flag(recompute_key)
        block.add("recompute", "full" if on else "none", f"enable_gradient_checkpointing{default}" if on else "")
    _optimizer(block, config, worker)
    params = config.flag(f"{engine}.param_offload")
    moments = config.flag(f"{engine}.optimizer_offload")
    if params or moments:
        only = "" if params and moments else "parameters only there; " if params else "optimizer only there; "
        note = f"{only}a plan moves a stage's state as a whole" if only else "param_offload and optimizer_offload"
        block.add("idle", "offload", note)
    if config.flag(f"{engine}.offload_policy"):
        reports.add(
            "NRS2508",
            Severity.WARNING,
            "FSDP2's offload_policy keeps parameters on the host also while training; the plan keeps them on the GPU",
            config.place(f"{engine}.offload_policy"),
        )


def _optimizer(block: Block, config: Config, worker: Worker) -> None:
    name = config.text(f"{worker.role}.optim.optimizer") or "adam"
    known = name.lower() in ("adam", "adamw", "sgd")
    block.add("optimizer", "sgd" if name.lower() == "sgd" else "adam", "" if known else f"`{name[:40]}` there")
    if not known:
        config.reports.add(
            "NRS2508",
            Severity.WARNING,
            f"the optimizer `{name[:40]}` is written as adam: two fp32 moments per parameter",
            config.place(f"{worker.role}.optim.optimizer"),
            help="write its state into the plan's `state { ... }` if it keeps something else",
        )
    override = f"{worker.role}.optim.override_optimizer_config"
    if not config.flag(f"{override}.optimizer_cpu_offload"):
        return
    fraction = config.number(f"{override}.optimizer_offload_fraction")
    if fraction is not None and fraction <= 0:
        return
    # Megatron's hybrid optimizer: master and moments live, and are updated, on the host.
    place = "@host" if fraction is None or fraction >= 1 else f"@host({fraction:g})"
    slots = ("weight = bf16", *(f"{name} = fp32 {place}" for name in ("master", "exp_avg", "exp_avg_sq")))
    comment = "optimizer_cpu_offload: the optimizer steps on the host"
    block.entries.append(Entry(text=f"state {{ {'  '.join(slots)} }}", comment=comment))


def warn_mismatch(config: Config, actor: str, critic: str, what: str) -> None:
    """A plan has one value where verl lets actor and critic differ."""
    a, c = config.text(actor), config.text(critic)
    if a != c and a is not None and c is not None:
        at = config.place(critic) or config.place(actor)
        config.reports.add(
            "NRS2509",
            Severity.WARNING,
            f"actor and critic differ in {what} ({a} and {c}); a plan has one, the actor's is taken",
            at,
        )
