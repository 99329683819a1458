"""Codes of the passes (nereus.passes) and of saved transitions."""

from __future__ import annotations

import hashlib
import json

from nereus.lang.catalog.entry import CodeEntry, plan

_TRAINERS = 'model actor = "qwen2.5-7b"\nmodel critic = "qwen2.5-7b" { head = value }'


def _two(old: str, new: str) -> dict[str, str]:
    return {"old.plan": old, "new.plan": new}


_ONE_STAGE = plan(
    "stage actor.train { on = n0  tp = 2  micro_batch = 1 }",
    cluster='node n0 { gpus = 2 x "h100-sxm-80gb" }',
    models='model actor = "qwen2.5-0.5b"',
)


def _saved(*, fingerprint: str) -> str:
    """The head of a saved transition, as far as it is read before it is refused."""
    side = {"path": "job.plan", "text": _ONE_STAGE}
    document = {
        "format_version": "1.0",
        "kind": "transition",
        "plans": {"old": side, "new": side},
        "fingerprints": {"old_plan": fingerprint, "new_plan": fingerprint, "cluster": "0", "models": "0"},
        "pipeline": "",
        "options": {"allow_destroy": False},
        "digest": "0",
    }
    return json.dumps(document, indent=2) + "\n"


ENTRIES: tuple[CodeEntry, ...] = (
    CodeEntry(
        code="NRS5001",
        title="state is lost: its only copies were on lost nodes",
        cause=(
            "The new plan wants state of which no living GPU or host memory holds a copy. Sharded state (zero, fsdp) "
            "exists once over the data-parallel ranks; a node that is gone takes its shards along, and no transition "
            "can bring them back."
        ),
        example=_two(
            plan("stage actor.train { on = n[0-1]  tp = 4  zero = 1  micro_batch = 1 }"),
            'extends "old.plan"\ncluster { remove = n1 }\nstage actor.train { on = n0 }\n',
        ),
        command="diff",
        fix=(
            "Roll the whole job back to one version, from the checkpoint named in checkpoint { path = ... }. If the "
            "node is not lost but to be left in good order, keep it in the cluster and name no stage on it: then its "
            "state is still a source."
        ),
    ),
    CodeEntry(
        code="NRS5002",
        title="the change itself does not fit in memory",
        cause=(
            "Both plans fit, but not the way between them: new engines start while the old plan's state still lies on "
            "their GPUs, or no order of moving and releasing state leaves room for the next piece. The notes say "
            "what stays, goes and comes on the fullest GPU."
        ),
        example=_two(
            plan(
                "stage actor.generate { on = n0  tp = 1  engine = vllm  kv_cache = 8 GiB  idle = offload }",
                "stage actor.train { on = n0  tp = 1  micro_batch = 1  recompute = full }",
                cluster='node n0 { gpus = 8 x "h100-sxm-80gb" }',
                models='model actor = "llama-3.2-3b"',
                workload="algorithm = grpo  prompts = 64  samples = 8  prompt_len = 1024  response_len = 1024",
            ),
            'extends "old.plan"\nstage actor.generate { kv_cache = 44 GiB }\nstage actor.train { zero = 1 }\n',
        ),
        command="diff",
        fix=(
            "Go in two steps (first what frees memory, then what takes it), lower the new engine's kv_cache, or let "
            "state that lies on these GPUs leave them first (idle = offload)."
        ),
    ),
    CodeEntry(
        code="NRS5003",
        title="reversible mode was asked for and does not fit",
        cause=(
            "In reversible mode the old plan stays whole until every receiver has verified the new one, so a GPU "
            "holds both at once. Here some GPU cannot."
        ),
        example=_two(
            plan(
                "stage actor.train  { on = n0  tp = 4  recompute = full }",
                "stage critic.train { on = n1  tp = 4  recompute = full }",
                cluster='node n[0-1] { gpus = 4 x "l40s-48gb" }',
                models=_TRAINERS,
            ),
            'extends "old.plan"\nstage actor.train  { on = n1 }\nstage critic.train { on = n0 }\n',
        ),
        command="diff",
        options=("--mode", "reversible"),
        fix=(
            "Leave out --mode: the compiler then takes tight mode, which releases old state as it goes. After its "
            "point of no return the way back is a checkpoint."
        ),
    ),
    CodeEntry(
        code="NRS5004",
        title="a model is another one in the new plan",
        cause=(
            "The two plans give one name to models of different shape or head. A transition moves state between "
            "layouts; it does not turn one model into another."
        ),
        example=_two(
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }"),
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }", models='model actor = "qwen2.5-7b"'),
        ),
        command="diff",
        fix="Keep the model, or give the new one a name of its own.",
    ),
    CodeEntry(
        code="NRS5005",
        title="a slot changes its dtype",
        cause=(
            "The same state has another dtype in the new plan. A transition is exact to the bit, and a conversion "
            "would round."
        ),
        example=_two(
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }"),
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1  state { exp_avg = bf16 } }"),
        ),
        command="diff",
        fix="Keep the dtype in state { }, and change it with the training framework, at a checkpoint.",
    ),
    CodeEntry(
        code="NRS5006",
        title="experts that are spread inside FSDP have no known layout",
        cause=(
            "With ep > 1 and fsdp together, frameworks shard an expert by expert, by row or not at all, each in its "
            "own way. No rule holds for all of them, and a wrong guess would lose experts silently. check looks at one "
            "plan and warns: the job can run so, but no change from or to it can be compiled."
        ),
        example=_two(
            plan(
                "stage actor.train { on = n0  tp = 1  ep = 8  fsdp = 8  recompute = full  micro_batch = 1 }",
                cluster='node n0 { gpus = 8 x "h200-sxm-141gb" }',
                models='model actor = "qwen3-30b-a3b"',
            ),
            'extends "old.plan"\nstage actor.train { ep = 4 }\n',
        ),
        command="diff",
        fix="Write ep = 1 with fsdp, or zero = 1 with ep; or describe the live objects, which needs no rule.",
    ),
    CodeEntry(
        code="NRS5007",
        title="state would be destroyed",
        cause=(
            "The old plan holds state of a model that no stage of the new plan holds. Once the transition is "
            "committed it is gone."
        ),
        example=_two(
            plan(
                "stage actor.train  { on = n0  tp = 4  micro_batch = 1 }",
                "stage critic.train { on = n1  tp = 4  micro_batch = 1 }",
                models=_TRAINERS,
            ),
            'extends "old.plan"\nremove stage critic.train\n',
        ),
        command="diff",
        fix=(
            "Keep a stage that holds the state (idle = offload puts it into host memory), or say that the loss is "
            "meant: --allow-destroy."
        ),
    ),
    CodeEntry(
        code="NRS5008",
        title="a node is another machine in the new plan",
        cause=(
            "A node is known by its name. Where the new plan gives it another kind of GPU, it is another machine, and "
            "nothing that the old plan has on it could be a source."
        ),
        example=_two(
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }"),
            plan(
                "stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }",
                cluster='node n[0-1] { gpus = 8 x "h200-sxm-141gb" }',
            ),
        ),
        command="diff",
        fix="Give the new machine a name of its own; remove the old one if it is gone.",
    ),
    CodeEntry(
        code="NRS5009",
        title="another model of the same shape keeps the old weights",
        cause=(
            "The new plan names another source for a model, and it has the same shape. A transition moves the state "
            "that the job has; it loads no weights. What is not shape (rotary scaling, say) is the user's to change."
        ),
        example=_two(
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }", models='model actor = "llama-3-8b"'),
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }", models='model actor = "llama-3.1-8b"'),
        ),
        command="diff",
        fix="No fault if the same model is meant. Give another model a name of its own.",
    ),
    CodeEntry(
        code="NRS5010",
        title="two models are said to hold the same weights and cannot",
        cause=(
            "--same states that two models are equal now, so that each is a source of the other: a new reference model "
            "and the actor that it starts as, say. They must have the same tensors in the same precision, the old plan "
            "must hold one of them, and one must keep nothing but weights, since of masters and moments nothing is "
            "stated. Whether the weights are equal only the job knows."
        ),
        example=_two(
            plan("stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }", models='model actor = "qwen2.5-7b"'),
            plan(
                "stage actor.train { on = n[0-1]  tp = 4  micro_batch = 1 }\nstage ref.infer { on = n0  tp = 2 }",
                models='model actor = "qwen2.5-7b"\nmodel ref = "qwen2.5-0.5b" { frozen = true }',
            ),
        ),
        command="diff",
        options=("--same", "actor=ref"),
        fix="Name two models of one shape and precision, one of them frozen, that are equal now.",
    ),
    CodeEntry(
        code="NRS5501",
        title="the file is no saved transition",
        cause="It is not JSON, or JSON of another kind: a plan, or the output of nereusc diff --json.",
        example={"job.plan": _ONE_STAGE},
        command="show",
        fix="Give show a file that nereusc compile OLD NEW -o FILE wrote.",
    ),
    CodeEntry(
        code="NRS5502",
        title="a saved transition is damaged",
        cause="The file starts like a saved transition and is cut off, or entries are missing or of a wrong kind.",
        example={"change.json": '{\n  "format_version": "1.0",\n  "kind": "transition",\n  "plans": {"old"\n'},
        command="show",
        fix="Compile the transition again from its two plans.",
    ),
    CodeEntry(
        code="NRS5503",
        title="a saved transition has a format that this version does not read",
        cause="Another major version of the format means other fields or other meanings of them.",
        example={"change.json": '{\n  "format_version": "9.0",\n  "kind": "transition"\n}\n'},
        command="show",
        fix="Compile the transition again, or read it with the version of Nereus that wrote it.",
    ),
    CodeEntry(
        code="NRS5510",
        title="a plan in a saved transition does not match its fingerprint",
        cause="The text of a plan in the file was changed after it was saved, by hand or by damage.",
        example={"change.json": _saved(fingerprint="0")},
        command="show",
        fix="Edit the plans, not the file, and compile again.",
    ),
    CodeEntry(
        code="NRS5511",
        title="a saved transition is stale",
        cause=(
            "Compiling the plans in the file gives another transition than the one that was saved: the compiler, a "
            "preset or a data sheet has changed since, or the file was edited. Its figures and its schedule can not "
            "be trusted any more."
        ),
        example={"change.json": _saved(fingerprint=hashlib.sha256(_ONE_STAGE.encode()).hexdigest())},
        command="show",
        fix="Compile the transition again, look at the new one, and use that.",
    ),
)
