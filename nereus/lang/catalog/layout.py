"""NRS30xx: layouts that do not fit the devices, the model or the batch."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry, one

_ASYNC = "algorithm = sft  mode = async { staleness = 1 }  prompts = 512  mini_batch = 128"
_MOE = 'model actor = "qwen3-30b-a3b"'

ENTRIES = (
    CodeEntry(
        code="NRS3001",
        title="device listed twice",
        cause="A stage has one rank on each of its devices.",
        example=one("stage actor.train { on = [n0, n0.gpu3] }"),
        fix="Name each device once.",
    ),
    CodeEntry(
        code="NRS3002",
        title="device used twice at the same time",
        cause=(
            "In async mode generation runs while everything else does, so its GPUs are its own. In sync mode stages "
            "that share GPUs take turns."
        ),
        example=one(
            "stage actor.generate { engine = vllm  on = n0  tp = 2 }",
            "stage actor.train { on = n[0-1] }",
            workload=_ASYNC,
        ),
        fix="Give generation GPUs of its own, or write mode = sync.",
    ),
    CodeEntry(
        code="NRS3003",
        title="device count that the degrees do not divide",
        cause="A replica takes tp x pp x cp GPUs; a stage has a whole number of replicas.",
        example=one("stage actor.train { on = n0.gpu[0-5]  tp = 4 }"),
        fix="Change the number of GPUs or a degree; the message names the nearest counts.",
    ),
    CodeEntry(
        code="NRS3004",
        title="written dp disagrees",
        cause="dp follows from the devices: devices / (tp x pp x cp). A written dp is only a check.",
        example=one("stage actor.train { on = n0  tp = 2  dp = 8 }"),
        fix="Leave dp out, or correct what it disagrees with.",
    ),
    CodeEntry(
        code="NRS3005",
        title="tp that the model does not allow",
        cause=(
            "Tensor parallelism cuts attention heads, the MLP and the vocabulary, and tp must divide all of them; kv "
            "heads may also be copied when tp is a multiple of them. Megatron pads the vocabulary so that it always "
            "divides, vLLM and SGLang to a multiple of 64; the others do not pad it."
        ),
        example=one(
            "stage actor.train { on = n0  tp = 8 }",
            models='model actor = "qwen2.5-7b"',
        ),
        fix="Use one of the legal degrees listed.",
    ),
    CodeEntry(
        code="NRS3006",
        title="tp across nodes",
        cause=(
            "The ranks of a tensor-parallel group exchange activations in every layer. Where they lie on several "
            "nodes the slow links between nodes set the pace."
        ),
        example=one("stage actor.infer { on = n[0-1]  tp = 16 }", models='model actor = "llama-3.1-70b"'),
        fix="Keep tp within the GPUs of a node, and use pp or dp across nodes.",
    ),
    CodeEntry(
        code="NRS3007",
        title="mini_batch that does not come out",
        cause=(
            "mini_batch = dp x micro_batch x accumulation: every replica takes the same whole number of micro-batches."
        ),
        example=one("stage actor.train { on = n0  micro_batch = 3 }"),
        fix="Use one of the legal micro_batch or dp listed.",
    ),
    CodeEntry(
        code="NRS3008",
        title="pp that would lose layers",
        cause="The layers do not divide by pp, and frameworks that round down would silently train a smaller model.",
        example=one("stage actor.train { on = n0.gpu[0-2]  pp = 3 }", workload="algorithm = sft  prompts = 96"),
        fix="Use a pp that divides the layers, or say how they are split: pp_split = (11, 11, 10) or (10, rest).",
    ),
    CodeEntry(
        code="NRS3009",
        title="pp_split that does not come out",
        cause=(
            "pp_split lists the layers of each pipeline stage, pp numbers that add up to the model's layers; `rest` in "
            "it stands for all pipeline stages that are not named (with vp too: stages, not chunks), which share what "
            "is left evenly. With vp, pp x vp numbers list the chunks."
        ),
        example=one("stage actor.train { on = n0  pp = 2  pp_split = (17, 16) }"),
        fix="Correct the numbers; pp_split = default returns to an even split.",
    ),
    CodeEntry(
        code="NRS3010",
        title="zero together with fsdp",
        cause="Both shard state over the ranks of dp x cp, in different shapes.",
        example=one("stage actor.train { on = n0  zero = 1  fsdp = full }"),
        fix="Keep one of the two.",
    ),
    CodeEntry(
        code="NRS3011",
        title="fsdp that does not divide dp x cp",
        cause=(
            "fsdp = N shards over groups of N of the dp x cp ranks, so N must divide dp x cp; experts are sharded "
            "over groups of at most N expert-dp ranks, which must divide too."
        ),
        example=one("stage actor.train { on = n0  fsdp = 3 }"),
        fix="Use a divisor of dp x cp, or fsdp = full.",
    ),
    CodeEntry(
        code="NRS3012",
        title="expert degrees on a dense model",
        cause="ep and etp spread experts, and the model has none.",
        example=one("stage actor.train { on = n0  ep = 8 }"),
        fix="Remove the key.",
    ),
    CodeEntry(
        code="NRS3013",
        title="expert degrees that do not divide",
        cause="ep must divide the number of experts, and ep x etp the GPUs of a pipeline stage (tp x cp x dp).",
        example=one("stage actor.train { on = n0  ep = 3 }", models=_MOE),
        fix="Use one of the legal degrees listed.",
    ),
    CodeEntry(
        code="NRS3014",
        title="place that is no permutation",
        cause="place pins the device of every rank, so it lists the devices of 'on', each once, in the order of ranks.",
        example=one("stage actor.train { on = n0.gpu[0-3]  tp = 2  place = (n0.gpu[2-3], n0.gpu[0,4]) }"),
        fix="List exactly the devices of 'on'; place = default unpins.",
    ),
    CodeEntry(
        code="NRS3015",
        title="frozen model that trains",
        cause="A frozen model keeps its weights; a stage that trains changes them.",
        example=one("stage actor.train { on = n0 }", models='model actor = "llama-3.1-8b" { frozen = true }'),
        fix="Drop frozen, or the stage.",
    ),
    CodeEntry(
        code="NRS3016",
        title="replicas that do not synchronise",
        cause=(
            "A shard group of one rank exchanges nothing, so each replica would train on its own and drift away "
            "without a word."
        ),
        example=one("stage actor.train { backend = fsdp  on = n0  fsdp = 1 }"),
        fix="Write fsdp = full, a larger group, or fsdp = off, where gradients are all-reduced.",
    ),
    CodeEntry(
        code="NRS3017",
        title="vp that does not come out",
        cause="vp cuts the layers of each pipeline stage into equal chunks; it needs pp above 1 and must divide them.",
        example=one("stage actor.train { on = n0  pp = 2  vp = 3 }"),
        fix="Use one of the legal numbers listed, or give the layers of every chunk: pp x vp numbers in pp_split.",
    ),
    CodeEntry(
        code="NRS3018",
        title="order that cannot be read",
        cause="order names the axes tp, cp, pp and dp once each (ep if you like), the fastest first.",
        example=one("stage actor.train { on = n0  order = tp-pp-dp }"),
        fix="Write for instance order = tp-cp-pp-dp.",
    ),
    CodeEntry(
        code="NRS3019",
        title="idle or swap that loses state or has no meaning",
        cause=(
            "idle = discard drops a stage's state between its turns: fine for weights that come from elsewhere, a "
            "loss where a stage trains. swap = host needs 'with' a stage of another model."
        ),
        example=one("stage actor.train { on = n0  idle = discard }"),
        fix="Use idle = offload; write swap only beside 'with' another model's stage.",
    ),
    CodeEntry(
        code="NRS3020",
        title="mini_batch that does not divide the step",
        cause="An RL step has prompts x samples samples, and updates of mini_batch samples each use all of them.",
        example=one("stage actor.train { on = n0 }", workload="algorithm = sft  prompts = 512  mini_batch = 96"),
        fix="Use a divisor; the message lists some.",
    ),
    CodeEntry(
        code="NRS3021",
        title="usual stages that the plan does not name",
        cause=(
            "The algorithm usually has more stages. That is no fault: a plan may name only the stages it cares about, "
            "but memory and time then count only those."
        ),
        example=one(
            "stage actor.train { on = n0  tp = 4 }", workload="algorithm = grpo  prompts = 512  mini_batch = 128"
        ),
        fix="Add the stages if the job has them.",
    ),
    CodeEntry(
        code="NRS3022",
        title="value model that generates",
        cause="A value head gives one number per token and no words.",
        example=one(
            "stage critic.generate { on = n0 }",
            models='model critic = "llama-3.1-8b" { head = value }',
        ),
        fix="Generate with a model whose head is lm.",
    ),
    CodeEntry(
        code="NRS3023",
        title="more replicas than there are",
        cause=(
            "A complete replica is a set of ranks that holds everything once; with zero or fsdp that is a whole shard "
            "group."
        ),
        example=one("stage actor.train { on = n0  tp = 2  replicas { min = 6 } }"),
        fix="Lower min or dormant.",
    ),
    CodeEntry(
        code="NRS3024",
        title="sp without tp",
        cause=(
            "Megatron's sequence parallelism splits along the sequence inside a tensor-parallel group; with tp = 1 "
            "there is nothing to split."
        ),
        example=one("stage actor.train { on = n0  pp = 4  zero = 1  sp = true }"),
        fix="Remove sp.",
    ),
    CodeEntry(
        code="NRS3025",
        title="observed length above the promised one",
        cause="response_len is what responses have now, max_response the longest that the job promises.",
        example=one(
            "stage actor.train { on = n0 }",
            workload="algorithm = sft  prompts = 512  response_len = 4096  max_response = 2048",
        ),
        fix="Correct one of them.",
    ),
    CodeEntry(
        code="NRS3026",
        title="stage that runs on another model's frozen weights",
        cause=(
            "A model declared from another without its adapter (lora = none) has the very weights that the other keeps "
            "frozen. In the same processes there is one copy of them."
        ),
        example=one(
            "stage actor.train { on = n0 }",
            "stage ref.infer { with = actor.train }",
            models=(
                'model actor = "llama-3.1-8b" { lora { rank = 16 } }\nmodel ref = actor { frozen = true  lora = none }'
            ),
        ),
        fix="Nothing to do. A reference in processes of its own (on = ...) holds its own copy.",
    ),
    CodeEntry(
        code="NRS3027",
        title="degree that cuts fp8 blocks",
        cause=(
            "In fp8 weights 128 x 128 elements share a scale, so a rank's rows and columns end on block borders, and "
            "so does each of the matrices that an engine fuses (q, k, v; gate, up)."
        ),
        example=one(
            "stage actor.generate { engine = vllm  on = n0.gpu[0-3]  tp = 4  state { weight = fp8 } }",
            models='model actor = "qwen3-30b-a3b"',
        ),
        fix="Use one of the legal degrees listed, spread experts with ep, or keep bf16 weights.",
    ),
    CodeEntry(
        code="NRS3028",
        title="optimizer whose state has no parts",
        cause=(
            "Optimizer state moves with the part of the parameter that it belongs to. Factored, projected or "
            "block-quantised state belongs to no part, so it cannot be cut or moved rightly."
        ),
        example=one("stage actor.train { on = n0  optimizer = adafactor }"),
        fix="Use one of the optimizers listed, or an optimizer with moments shaped like the parameters.",
    ),
)
