"""The stored form of job state: exact, checked, and free of facts of one rank or one layout."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.job_states import example

from nereus.runtime.data_position import DataPosition
from nereus.runtime.job_state import (
    JobState,
    MinibatchPosition,
    ModelProgress,
    RngRule,
    Schedule,
    as_json,
    digest,
    dumps,
    loads,
)
from nereus.runtime.job_values import JobStateError, decode, encode

_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abcxyz_ 0", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["lr", "step", "betas", "x"]), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.dictionaries(st.integers(), st.integers(1, 5), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def _document(text: str, change: dict[str, Any], *, sign: bool = True) -> str:
    """``text`` with dotted names set to other values; ``sign``: with a checksum that fits."""
    document = json.loads(text)
    for path, value in change.items():
        at = document
        *steps, last = path.split(".")
        for step in steps:
            at = at[int(step)] if step.isdigit() else at[step]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    if sign:
        document["sha256"] = digest(document["state"])
    return json.dumps(document)


@given(value=_plain)
def test_values_come_back_exactly(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value, "v"), allow_nan=False)), "v")
    assert back == value and repr(back) == repr(value)


def test_state_comes_back_exactly() -> None:
    state = example()
    back = loads(dumps(state))
    assert back == state
    assert repr(back) == repr(state)
    assert back.model("actor").schedule == state.model("actor").schedule


@given(
    step=st.integers(0, 10**9),
    updates=st.integers(0, 10**12),
    index=st.integers(0, 99),
    epoch=st.integers(0, 5),
    trainer=st.dictionaries(st.sampled_from(["scale", "steps"]), _plain, max_size=2),
)
def test_any_state_comes_back(step: int, updates: int, index: int, epoch: int, trainer: dict[str, object]) -> None:
    state = JobState(
        step=step,
        models=(ModelProgress(model="a", num_updates=updates, weight_version=step, trainer=trainer),),
        data=DataPosition(seed=1, size=100, epoch=epoch, index=index, consumed=100 * epoch + index),
        minibatch=MinibatchPosition(epoch=1, num_epochs=2, index=index, num_minibatches=100),
        rng=RngRule(seed=3, derived_step=step),
    )
    assert loads(dumps(state)) == state


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"dp_rank": 3}, r"models\[actor\].trainer.dp_rank: `rank` names a fact of one rank"),
        ({"groups": [{"localShard": 1}]}, r"trainer.groups\[0\].localShard: `local`"),
        ({"cuda_rng_state": [1, 2]}, "`rng` names a fact of one rank"),
        ({"rng_tracker_states": {}}, "`rng`"),
        ({"world_size": 8}, "`world`"),
        ({"data_parallel_size": 8}, "a fact of one layout"),
        ({"num_microbatches": 4}, "a fact of one layout"),
        ({"where": "cuda:3"}, "'cuda:3' is the device of one rank"),
        ({"step": b"1"}, "a bytes is not plain data"),
        ({"step": object()}, "a object is not plain data"),
        ({"$float": "inf"}, "marks of values"),
    ],
)
def test_facts_of_a_rank_or_a_layout_are_refused(trainer: dict[str, object], message: str) -> None:
    state = example()
    models = (replace(state.models[0], trainer=trainer), *state.models[1:])
    with pytest.raises(JobStateError, match=message):
        dumps(replace(state, models=models))


def test_words_of_models_are_no_facts_of_a_rank() -> None:
    trainer = {
        "tensors": {"generator.local_rank.weight": 0},
        "lora_rank": 16,
        "weight_decay": 0.1,
        "parameters": ("a",),
    }
    state = replace(example(), models=(replace(example().models[0], trainer=trainer),))
    assert loads(dumps(state)) == state


def test_a_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    state = example()
    models = (replace(state.models[0], trainer={"step": torch.ones(2)}), *state.models[1:])
    with pytest.raises(JobStateError, match=r"trainer\.step: a Tensor is not plain data"):
        dumps(replace(state, models=models))


def test_state_that_contains_itself_is_refused() -> None:
    trainer: dict[str, object] = {}
    trainer["again"] = trainer
    with pytest.raises(JobStateError, match="contains itself"):
        dumps(replace(example(), models=(replace(example().models[0], trainer=trainer),)))


@pytest.mark.parametrize(
    ("change", "sign", "message"),
    [
        ({"state.step": 8}, False, "does not match its checksum"),
        ({"state.models.0.schedule.lrs": [0.5, 0.5]}, False, "does not match its checksum"),
        ({"sha256": ...}, False, "sha256 is missing"),
        ({"nereus_job_state": 2}, True, "has schema 2; this version reads 1"),
        ({"state.colour": 1}, True, "state: colour is not known"),
        ({"state.rng": ...}, True, "state: rng is missing"),
        ({"state.step": "7"}, True, "step: '7' is not of type int"),
        ({"state.step": True}, True, "step: True is not of type int"),
        ({"state.step": -1}, True, "step: -1 is negative"),
        ({"state.models": {}}, True, "models: {} is not of type list"),
        ({"state.models.0.num_updates": 1.5}, True, r"models\[0\].num_updates: 1.5 is not of type int"),
        ({"state.models.0.model": "zz"}, True, "not in order of their names"),
        ({"state.models.0.schedule.lrs": ["a"]}, True, r"schedule.lrs: 'a' is not of type float"),
        ({"state.models.0.trainer": {"$odd": 1}}, True, r"trainer: \$odd is no mark"),
        ({"state.models.0.trainer": {"$map": [[[1], 2]]}}, True, r"\[1\] cannot be a key"),
        ({"state.data.index": 10**6}, True, "data.index: 1000000 is not in an epoch"),
        ({"state.minibatch.index": 9}, True, "minibatch.index: 9 is not one of 4"),
        ({"state.rng.derived_step": "x"}, True, "rng.derived_step: 'x' is not of type int"),
    ],
)
def test_damaged_state_is_refused(change: dict[str, Any], sign: bool, message: str) -> None:
    with pytest.raises(JobStateError, match=message):
        loads(_document(dumps(example()), change, sign=sign))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"nereus_job_state": NaN}', "[" * 100_000])
def test_what_is_not_job_state_is_refused(text: str) -> None:
    with pytest.raises(JobStateError, match="job state"):
        loads(text)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 6))
def test_no_flipped_bit_goes_unseen(position: int, bit: int) -> None:
    text = dumps(example())
    at = position % len(text)
    damaged = text[:at] + chr(ord(text[at]) ^ (1 << bit)) + text[at + 1 :]
    try:
        back = loads(damaged)
    except JobStateError:
        return
    # White space between the fields may change; a value may not.
    assert as_json(back) == as_json(example())


def test_counters_never_go_back() -> None:
    state = example()
    later = replace(state, step=8, data=state.data.advanced(16))
    later.check_follows(state)
    with pytest.raises(JobStateError, match="step: went back from 8 to 7"):
        state.check_follows(later)
    restarted = replace(later, models=(replace(state.models[0], weight_version=1), *state.models[1:]))
    with pytest.raises(JobStateError, match=r"models\[actor\].weight_version: went back from 31 to 1"):
        restarted.check_follows(state)
    with pytest.raises(JobStateError, match=r"models\[critic\].num_updates: was 21 and is gone"):
        replace(later, models=state.models[:1]).check_follows(state)


def test_schedule_with_infinities_and_counters() -> None:
    schedule = Schedule(kind="MultiStepLR", state={"milestones": Counter({3: 1, 9: 2}), "best": float("inf")}, lrs=())
    models = (ModelProgress(model="a", num_updates=0, weight_version=0, schedule=schedule),)
    back = loads(dumps(replace(example(), models=models))).models[0].schedule
    assert back is not None
    assert back == schedule and isinstance(back.state["milestones"], Counter)


@pytest.mark.parametrize("number", ["1e400", "-1e999"])
def test_numbers_that_are_none_are_damage_and_what_is_no_text_is_no_job_state(number: str) -> None:
    text = dumps(example())
    spoilt = re.sub(r'"step": \d+', f'"step": {number}', text)
    assert spoilt != text
    with pytest.raises(JobStateError, match="does not match its checksum"):
        loads(spoilt)
    with pytest.raises(JobStateError, match="not JSON"):
        loads(None)  # type: ignore[arg-type]
