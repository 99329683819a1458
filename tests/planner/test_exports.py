"""Exports as the three frameworks write them (recorded, or made by their own writers), read back and learned from."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.test_rl_step import COLOCATED, PRIOR, plan_of
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from nereus.ir.diagnostic import DiagnosticError
from nereus.planner.exports.learn import learn_export, stages_of
from nereus.planner.exports.names import FRAMEWORKS, ROLES
from nereus.planner.exports.read import Export, Step, read_export
from nereus.planner.rl_step import stage_time

DATA = Path(__file__).parents[1] / "data" / "exports"
PPO = COLOCATED.replace("grpo", "ppo").replace(
    "stage actor.logprob",
    'model critic = "llama-3.1-8b" { head = value }\nstage critic.train { on = n[0-1]  tp = 4  idle = offload }\n'
    "stage actor.logprob",
)


def read(name: str) -> Export:
    return read_export(str(DATA / name))


def parts(step: Step) -> dict[str, float]:
    return {"+".join(roles): seconds for roles, seconds in step.parts_s}


VERL_FIRST = {"generate": 31.482, "logprob": 4.127, "ref": 3.904, "actor": 17.03}


def test_verl_on_the_console_and_in_its_file() -> None:
    """Ray's prefixes and colours, numpy's numbers and what is no number are passed over."""
    printed, filed = read("verl_console.log"), read("verl_file.jsonl")
    assert printed.framework == filed.framework == "verl"
    assert [step.number for step in printed.steps] == [step.number for step in filed.steps] == [1, 2, 3]
    assert parts(printed.steps[0]) == {**VERL_FIRST, "reward": 0.91}
    assert parts(filed.steps[0]) == VERL_FIRST
    for export in (printed, filed):
        first, second = export.steps[:2]
        assert (first.step_s, first.response_len, first.prompt_len) == (59.437, 812.4375, 104.12)
        assert first.peak_bytes == 41.25 * 2**30
        assert parts(second)["generate"] == 32.1


def test_a_panel_of_wandb_names_its_run_in_every_column(tmp_path: Path) -> None:
    export = read("wandb_panel.csv")
    assert export.framework == "verl" and [step.step_s for step in export.steps] == [None, None]
    assert [parts(step) for step in export.steps] == [
        {"generate": 31.482, "actor": 17.03},
        {"generate": 32.1, "actor": 17.44},
    ]
    two = (DATA / "wandb_panel.csv").read_text().replace("qwen2.5-7b-grpo - response", "another - response")
    with pytest.raises(DiagnosticError, match="it has 2 runs"):
        read_export("two.csv", two.encode())


def test_nemo_rl_in_wandb_and_on_the_console() -> None:
    history, printed = read("nemo_wandb_history.csv"), read("nemo_console.log")
    assert history.framework == printed.framework == "NeMo-RL"
    assert [step.step_s for step in history.steps] == [97.7, 97.4, 98.8]
    assert [step.step_s for step in printed.steps] == [97.7, 97.4]
    for export in (history, printed):
        assert parts(export.steps[0]) == {"generate": 48.13, "logprob+ref": 9.02, "actor": 31.41}
        assert export.steps[0].response_len == 1403.25
    assert history.steps[1].prompt_len == 210.75, "the row of the validation of step 2 takes nothing away"
    rows = [{"_step": 1, "timing/train/total_step_time": 97.7}, {"_step": 1, "train/mean_gen_tokens_per_sample": 5.0}]
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        (only,) = read_export("history.json", text.encode()).steps
        assert (only.step_s, only.response_len) == (97.7, 5.0)


def test_openrlhf_in_tensorboard_and_on_the_console() -> None:
    """The event file was written by torch's SummaryWriter with the calls that OpenRLHF makes."""
    events, printed = read("events.out.tfevents.1790000000.host.1.0"), read("openrlhf_console.log")
    assert events.framework == printed.framework == "OpenRLHF"
    assert read_export(str(DATA)) == events, "a folder of event files"
    with pytest.raises(FileNotFoundError):
        read("events.out.tfevents.0.absent")
    assert [step.number for step in events.steps] == [1, 2, 3]
    for export in (events, printed):
        first = export.steps[0]
        assert first.step_s == pytest.approx(61.6) and first.response_len == 1050.5
        assert parts(first) == pytest.approx(
            {"generate": 31.2, "logprob+ref+value+reward": 6.1, "actor+critic": 22.4}, rel=1e-6
        )


def test_scalars_that_are_written_as_tensors(tmp_path: Path) -> None:
    """By TensorBoard's writer: floats, doubles and whole numbers; a text and a histogram beside them are no scalars."""
    writer = EventFileWriter(str(tmp_path))
    for step, value in enumerate((np.float32(61.5), np.float64(62.5), np.int64(63)), start=1):
        scalar = Summary.Value(tag="train/timing/step_total", tensor=make_tensor_proto(value))
        text = Summary.Value(tag="train/rollout/response_length_mean", tensor=make_tensor_proto(b"900"))
        rows = Summary.Value(tag="train/timing/generation", tensor=make_tensor_proto(np.ones((4, 3))))
        writer.add_event(Event(step=step, summary=Summary(value=[scalar, rows] if step > 1 else [text, scalar])))
    writer.close()
    found = read_export(str(tmp_path))
    assert [(step.number, step.step_s) for step in found.steps] == [(1, 61.5), (2, 62.5), (3, 63.0)]
    assert not any(step.parts_s for step in found.steps)


def test_a_file_that_is_still_written_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = (DATA / "events.out.tfevents.1790000000.host.1.0").read_bytes()
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(whole[:-9])
    assert [step.number for step in read_export(str(path)).steps] == [1, 2, 3]
    path.write_bytes(whole[: len(whole) // 2])
    assert 1 <= len(read_export(str(path)).steps) < 3
    path.write_bytes(b"no event file at all")
    with pytest.raises(DiagnosticError, match="is no export"):
        read_export(str(path))


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(DiagnosticError, match=r"need TensorBoard: pip install '\.\[tensorboard\]'"):
        read("events.out.tfevents.1790000000.host.1.0")


def read_export_bytes(data: bytes) -> Export:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.out.tfevents.1.host")
        path.write_bytes(data)
        return read_export(str(path))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_event_files_end_in_a_diagnostic_or_in_numbers(data: st.DataObject) -> None:
    whole = bytearray((DATA / "events.out.tfevents.1790000000.host.1.0").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        export = read_export_bytes(cut)
    except DiagnosticError as error:
        assert error.diagnostics[0].code == "NRS7006"
    else:
        assert all(step.step_s is None or 0 < step.step_s < 1e15 for step in export.steps)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300), st.sampled_from(("a.csv", "a.json", "a.jsonl", "a.log")))
def test_other_texts_end_in_a_diagnostic(text: str, name: str) -> None:
    with pytest.raises(DiagnosticError, match="is no export of a run"):
        read_export(name, text.encode("utf-8", "surrogatepass"))


def test_no_name_is_two_frameworks() -> None:
    names = [name for framework in FRAMEWORKS for name in framework.known]
    assert len(names) == len(set(names))
    assert {role for framework in FRAMEWORKS for roles in framework.parts.values() for role in roles} == set(ROLES)


def test_stages_of_a_plan_do_what_the_frameworks_call_so() -> None:
    assert stages_of(plan_of(PPO)) == {
        "generate": "actor.generate",
        "logprob": "actor.logprob",
        "ref": "ref.infer",
        "actor": "actor.train",
        "critic": "critic.train",
    }


def test_a_run_is_learned_stage_by_stage_and_what_stages_share_is_dealt() -> None:
    """A world where generation takes 1.7 times what is predicted, and all else 0.6 times."""
    plan = plan_of(COLOCATED)

    def took(name: str, length: int) -> float:
        at = replace(plan, workload=replace(plan.workload, response_len=length))
        return (1.7 if name == "actor.generate" else 0.6) * stage_time(at, at.stage(name), PRIOR).seconds

    steps = []
    for number, length in enumerate(range(1000, 2000, 100)):
        shared = took("actor.logprob", length) + took("ref.infer", length)
        parts_s = (
            (("generate",), took("actor.generate", length)),
            (("logprob", "ref", "value"), shared),
            (("actor",), took("actor.train", length)),
            (("critic",), 5.0),  # no stage of this plan
        )
        whole = sum(seconds for _, seconds in parts_s)
        steps.append(
            Step(
                number=number,
                step_s=whole,
                response_len=length - 0.5,
                prompt_len=None,
                parts_s=parts_s,
                peak_bytes=5e10,
            )
        )
    online, fits = learn_export(Export(framework="any", steps=tuple(steps)), plan, PRIOR)
    assert {fit.stage for fit in fits} == {stage.name for stage in plan.stages}
    for fit in fits:
        assert fit.num == 10 and fit.after < 0.02 < 0.3 < fit.before
        at = replace(plan, workload=replace(plan.workload, response_len=2300))
        predicted = stage_time(at, at.stage(fit.stage), online.calibration()).seconds
        assert predicted == pytest.approx(took(fit.stage, 2300), rel=0.05)
    assert online.between_s() == pytest.approx(5.0, rel=0.01)
    assert np.array_equal(online.calibration().plan_memory.seen.labels[0], ["reading:allocated"])
