"""NRS20xx: names that do not exist and values of the wrong kind."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry, one, plan

_TRAIN = "stage actor.train { on = n0 }"
_BASE = plan("stage actor.train { on = n[0-1] }")

ENTRIES = (
    CodeEntry(
        code="NRS2001",
        title="unknown block",
        cause="A plan is made of cluster, model, workload, stage and checkpoint blocks.",
        example=one("stages actor.train { on = n0 }", _TRAIN),
        fix="Correct the name; node and pool stand inside cluster.",
    ),
    CodeEntry(
        code="NRS2002",
        title="unknown key",
        cause="The block has no key of this name.",
        example=one("stage actor.train { on = n0  tpp = 2 }"),
        fix="Correct the name; docs/language.md lists the keys of every block.",
    ),
    CodeEntry(
        code="NRS2003",
        title="unknown model",
        cause="A stage is named MODEL.KIND, and no model block defines this MODEL.",
        example=one("stage acter.train { on = n0 }"),
        fix="Correct the name, or define the model.",
    ),
    CodeEntry(
        code="NRS2004",
        title="unknown preset",
        cause="No architecture is built in under this name.",
        example=one(_TRAIN, models='model actor = "llama3.1-8b"'),
        fix='Correct the name, or describe the model by its configuration: hf("config.json").',
    ),
    CodeEntry(
        code="NRS2005",
        title="unknown GPU",
        cause="No data sheet has this id. Memory, links and speed of a GPU come from its data sheet.",
        example=one(_TRAIN, cluster='node n0 { gpus = 8 x "h100-80gb" }'),
        fix="Use the id of a data sheet.",
    ),
    CodeEntry(
        code="NRS2006",
        title="unknown stage",
        cause="'with' names a stage that the plan does not have.",
        example=one(_TRAIN, "stage actor.logprob { with = actor.trian }"),
        fix="Correct the name, or add the stage.",
    ),
    CodeEntry(
        code="NRS2007",
        title="unknown word for a key",
        cause="The key takes one of a few words, and this is none of them.",
        example=one("stage actor.train { on = n0  recompute = fulll }"),
        fix="Use one of the words listed.",
    ),
    CodeEntry(
        code="NRS2008",
        title="value of the wrong type",
        cause="The key wants another type of value: a number, a word, a string in quotes, a size with a unit, a list.",
        example=one('stage actor.train { on = n0  tp = "2" }'),
        fix="Write a value of the type that the message names.",
    ),
    CodeEntry(
        code="NRS2009",
        title="wrong or missing unit",
        cause=(
            "Sizes, rates and times carry a unit, so that GB and GiB, bytes and bits cannot be confused; counts carry "
            "none, or the name of what they count."
        ),
        example=one(_TRAIN, cluster='node n0 { gpus = 8 x "h100-sxm-80gb"  host_mem = 2 TB/s }'),
        fix="Write one of the units listed: sizes in B, GB, GiB, ...; rates in GB/s, Gbit/s, ...; times in s, min, h.",
    ),
    CodeEntry(
        code="NRS2010",
        title="number out of range",
        cause="The number is zero or negative, or outside of what the key allows.",
        example=one("stage actor.train { on = n0  tp = 0 }"),
        fix="Use a number in the range that the message names.",
    ),
    CodeEntry(
        code="NRS2011",
        title="defined twice",
        cause=(
            "A file defines each node, model and stage once. Only a file that extends another overrides what that one "
            "defined."
        ),
        example=one(_TRAIN, "stage actor.train { on = n1 }"),
        fix="Remove one of the two, or join them.",
    ),
    CodeEntry(
        code="NRS2012",
        title="key written twice",
        cause="A block gives each key once; of two values none can win.",
        example=one("stage actor.train { on = n0  tp = 2  pp = 2  tp = 4 }"),
        fix="Remove one of the two.",
    ),
    CodeEntry(
        code="NRS2013",
        title="node that does not exist",
        cause="The cluster has no node of this name.",
        example=one("stage actor.train { on = n[0-2] }"),
        fix="Name nodes of the cluster, or add the node.",
    ),
    CodeEntry(
        code="NRS2014",
        title="GPU that does not exist",
        cause="GPUs of a node are numbered from 0; the node has fewer.",
        example=one("stage actor.train { on = n0.gpu[4-8] }"),
        fix="Use numbers below the node's count of GPUs.",
    ),
    CodeEntry(
        code="NRS2015",
        title="removed node still named",
        cause=(
            "cluster { remove = NODE } says that the node is lost. A stage that still names it, itself or through its "
            "base, could not run."
        ),
        example={"job.plan": 'extends "base.plan"\ncluster { remove = n1 }\n', "base.plan": _BASE},
        fix=(
            "Give the stage other devices, or remove the stage. A node that is to be left in good order stays in the "
            "cluster, with no stage on it."
        ),
    ),
    CodeEntry(
        code="NRS2016",
        title="base file is missing",
        cause="The file that extends names cannot be read. Its path is relative to the file that says extends.",
        example={"job.plan": 'extends "bass.plan"\nstage actor.train { tp = 2 }\n', "base.plan": _BASE},
        fix="Correct the path.",
    ),
    CodeEntry(
        code="NRS2017",
        title="extends in a circle",
        cause="The files extend one another, so none of them is the base.",
        example={"job.plan": 'extends "base.plan"\n', "base.plan": 'extends "job.plan"\n' + _BASE},
        fix="Remove one extends.",
    ),
    CodeEntry(
        code="NRS2018",
        title="model configuration cannot be used",
        cause=(
            'The file that hf("...") names is missing, is no JSON, or describes an architecture that is not supported.'
        ),
        example=one(_TRAIN, models='model actor = hf("config.json")'),
        fix="Correct the path (relative to the plan), or use a preset.",
    ),
    CodeEntry(
        code="NRS2019",
        title="something is missing",
        cause="A block, or a key without a default, is not there.",
        example=one("stage actor.train { tp = 2 }"),
        fix="Add what the message names.",
    ),
    CodeEntry(
        code="NRS2020",
        title="key of another kind of stage",
        cause=(
            "Some keys have a meaning in some kinds of stages only: optimizer where a stage trains, kv_cache where it "
            "generates."
        ),
        example=one("stage actor.train { on = n0  kv_cache = 20 GiB }"),
        fix="Remove the key, or move it to the stage it was meant for.",
    ),
    CodeEntry(
        code="NRS2021",
        title="keys that exclude one another",
        cause=(
            "Two keys decide the same thing: on, with and service; kv_cache and mem; or a key of a stage 'with' "
            "another that only the host may decide."
        ),
        example=one(_TRAIN, "stage actor.logprob { with = actor.train  tp = 2 }"),
        fix="Keep one. KEY = default drops one that comes from a base file.",
    ),
    CodeEntry(
        code="NRS2022",
        title="no host for a stage",
        cause="'with' runs in a circle, or names a service: no stage is left whose processes could be shared.",
        example=one(_TRAIN, "stage actor.logprob { with = actor.infer }", "stage actor.infer { with = actor.logprob }"),
        fix="Give one of the stages devices of its own.",
    ),
    CodeEntry(
        code="NRS2023",
        title="setting of a service",
        cause=(
            "A service runs outside the pool. Its devices, degrees and memory are not the plan's affair, and it "
            "cannot train, since its state would lie outside the plan."
        ),
        example=one(_TRAIN, 'stage actor.infer { service = "http://reward:8000"  tp = 2 }'),
        fix="Remove the key, or run the stage in the pool.",
    ),
    CodeEntry(
        code="NRS2024",
        title="models declared from one another",
        cause="model A = B and model B = A leave both without an architecture.",
        example=one(_TRAIN, models="model actor = ref\nmodel ref = actor"),
        fix="Give one of them a preset or a configuration.",
    ),
    CodeEntry(
        code="NRS2025",
        title="nothing to remove",
        cause="remove names a stage or a node that the base does not have.",
        example={"job.plan": 'extends "base.plan"\nremove stage actor.infer\n', "base.plan": _BASE},
        fix="Correct the name, or drop the remove.",
    ),
    CodeEntry(
        code="NRS2026",
        title="statement in the wrong place or shape",
        cause=(
            "A key stands outside of any block, a block has a name that it cannot have or lacks one, a stage is not "
            "named MODEL.KIND, or a block stands where a key is wanted."
        ),
        example=one("tp = 2", _TRAIN),
        fix="The message says where it belongs.",
    ),
    CodeEntry(
        code="NRS2027",
        title="unknown kind of stage",
        cause="A stage is named MODEL.KIND; KIND is generate, logprob, infer or train.",
        example=one("stage actor.training { on = n0 }"),
        fix="Use one of the four kinds.",
    ),
    CodeEntry(
        code="NRS2028",
        title="range that cannot be read",
        cause="Ranges are written n[0-3] or n[0,2]: numbers that count up, and no more than 65,536 names.",
        example=one(_TRAIN, cluster='node n[3-0] { gpus = 8 x "h100-sxm-80gb" }'),
        fix="Correct the range.",
    ),
)
