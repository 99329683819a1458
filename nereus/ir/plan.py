"""The typed plan: what the front end hands to everything else. All defaults are filled in; nothing here is inferred
later."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.ir.arch import Arch, Lora
from nereus.ir.cluster import Cluster, Device
from nereus.ir.diagnostic import Span
from nereus.ir.emu import unit_of_dp
from nereus.ir.units import DTYPE_BYTES

#: Rank orders, fastest axis first. ``ep`` never changes where dense tensors lie (it is carved out of cp x dp).
ORDER_REPLICA = "tp-cp-pp-dp"
ORDER_MEGATRON = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    arch: Arch
    source: str  # preset name, or the path given to hf(...)
    head: str = "lm"  # lm | value
    frozen: bool = False
    #: Name of the model it was declared from (``model ref = actor { ... }``), whose initial weights it shares.
    base: str | None = None
    precision: str = "bf16"
    lora: Lora | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    algorithm: str = "ppo"
    mode: str = "sync"  # sync | async
    staleness: int = 0
    sync_every: int = 1  # optimizer updates between two weight syncs (async)
    partial: bool = False
    prompts: int = 1
    samples: int = 1  # per prompt
    mini_batch: int = 1  # samples per optimizer update
    epochs: int = 1
    prompt_len: int = 1024
    response_len: int = 1024  # observed
    max_response: int | None = None  # promised
    max_tokens: int | None = None
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def num_samples(self) -> int:
        """Samples of one RL step."""
        return self.prompts * self.samples

    @property
    def seq_len(self) -> int:
        return self.prompt_len + self.response_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One kind of state kept per parameter: ``weight``, ``master``, ``exp_avg``, ``exp_avg_sq``, ... (open set)."""

    name: str
    dtype: str
    host: bool = False  # kept in host memory even while the stage runs
    #: With ``host``: how much of it, above 0; the rest stays on the GPU. ``ir.offload`` says which tensors' parts.
    host_share: float = 1.0

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def text(self) -> str:
        """As the plan language says it: ``fp32``, ``fp32 @host``, ``fp32 @host(0.5)``."""
        share = "" if self.host_share == 1 else f"({self.host_share!r})"
        return f"{self.dtype} @host{share}" if self.host else self.dtype

    @property
    def is_split(self) -> bool:
        """Whether a part of it lies in host memory and a part on the GPU."""
        return self.host and self.host_share < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    min: int = 1
    dormant: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One model in one stage, e.g. ``actor.train``.

    A stage ``with_`` another runs in that stage's processes and layout: degrees and devices are copied from it. For
    the same model it uses the very same tensors; another model has a copy of its own, in host memory when ``swap ==
    'host'``.
    """

    model: str
    kind: str  # generate | logprob | infer | train
    devices: tuple[Device, ...]
    with_: str | None = None
    service: str | None = None  # url: outside the pool, no devices
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1
    dp: int = 1
    sp: bool = False  # Megatron sequence parallelism
    pp_split: tuple[int, ...] = ()  # layers per pipeline stage, length pp; always filled in
    #: With vp > 1: layers of every chunk in model order, length pp x vp; chunk i lies on pipeline stage i % pp.
    chunks: tuple[int, ...] = ()
    zero: int = 0
    fsdp: int = 0  # ranks of a shard group, out of dp x cp; 0 = off
    order: str = ORDER_REPLICA
    place: tuple[Device, ...] | None = None  # pinned: device of each rank, in ``order``
    backend: str | None = None  # megatron | fsdp | deepspeed | torch
    engine: str | None = None  # vllm | sglang
    micro_batch: int = 1
    max_tokens: int | None = None
    recompute: str = "none"  # none | selective | full
    optimizer: str | None = None
    kv_cache_bytes: int | None = None  # per GPU
    mem_fraction: float | None = None  # engine memory share of the GPU (`mem`), instead of kv_cache
    idle: str = "resident"  # resident | offload | discard
    swap: str | None = None  # host
    slots: tuple[Slot, ...] = ()
    replicas: Replicas | None = None
    inflight: str = "drain"  # drain | resume | drop
    span: Span | None = field(default=None, compare=False, repr=False)
    #: Where each written key stands, for diagnostics.
    key_spans: tuple[tuple[str, Span], ...] = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.model}.{self.kind}"

    @property
    def ranks(self) -> tuple[Device, ...]:
        """Device of every rank; rank r has the coordinate that ``order`` gives to r."""
        return self.place if self.place is not None else self.devices

    @property
    def is_train(self) -> bool:
        return self.kind == "train"

    @property
    def num_alike(self) -> int:
        """Ranks that hold the same parts of the model before anything is sharded over them: dp x cp."""
        return self.dp * self.cp

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the sharded slots (1 = nothing is sharded). All frameworks shard over dp x cp:
        context parallelism splits samples, not weights."""
        if self.fsdp:
            return self.fsdp
        return self.num_alike if self.zero else 1

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts: devices / (pp x ep x etp). Means nothing for a model without experts."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.etp))

    @property
    def unit_of_dp(self) -> tuple[int, ...]:
        """Which complete replica each data-parallel rank belongs to: sets of ranks closed under tp, pp, cp, ep and the
        shard groups of every slot."""
        return unit_of_dp(
            tp=self.tp,
            cp=self.cp,
            dp=self.dp,
            ep=self.ep,
            etp=self.etp,
            num_shards=self.num_shards,
            num_expert_shards=min(self.num_shards, self.expert_dp),
            order=self.order,
        )

    @property
    def num_emus(self) -> int:
        """Complete replicas."""
        return max(self.unit_of_dp) + 1

    @property
    def unit_dp(self) -> int:
        """Data-parallel ranks of one complete replica."""
        return self.dp // self.num_emus

    @property
    def framework(self) -> str | None:
        """Whose rules cut the matrices: the engine's where it has processes of its own, else the training backend's."""
        return self.backend if self.backend == "megatron" or self.engine is None else self.engine

    def key_span(self, key: str) -> Span | None:
        return dict(self.key_spans).get(key, self.span)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: str
    format: str = "dcp"
    every: int = 1  # RL steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    cluster: Cluster
    models: tuple[Model, ...]
    workload: Workload
    stages: tuple[Stage, ...]
    checkpoint: Checkpoint | None = None
    path: str = ""

    def model(self, name: str) -> Model:
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def find_stage(self, name: str) -> Stage | None:
        return next((s for s in self.stages if s.name == name), None)

    def owners(self) -> tuple[Stage, ...]:
        """Stages with processes of their own (not ``with``, not a service)."""
        return tuple(s for s in self.stages if s.with_ is None and s.service is None)
