"""Adapters, fp8 blocks and open optimizers in the plan language."""

from __future__ import annotations

from pathlib import Path

import pytest
from lang_support import CLUSTER, WORKLOAD, codes, found, good, marked, only

from nereus.ir.arch import Lora
from nereus.ir.diagnostic import Severity
from nereus.lang.api import load_plan, pinned, placed_plan_text, resolve_text
from nereus.lang.render import render

HEAD = CLUSTER + WORKLOAD
ACTOR = 'model actor = "llama-3.1-8b" { lora { rank = 16  alpha = 32  targets = (v_proj, q_proj, v_proj) } }\n'
REF = "model ref = actor { frozen = true  lora = none }\n"
TRAIN = "stage actor.train { on = n0  tp = 2 }\n"


class TestLora:
    def test_values(self) -> None:
        actor = good(HEAD + ACTOR + TRAIN).model("actor")
        assert actor.lora == Lora(rank=16, alpha=32.0, targets=("v_proj", "q_proj"))

    @pytest.mark.parametrize("targets", ["", "targets = all", "targets = (all)"])
    def test_defaults(self, targets: str) -> None:
        text = f'model actor = "llama-3.1-8b" {{ lora {{ rank = 8 {targets} }} }}\n'
        assert good(HEAD + text + TRAIN).model("actor").lora == Lora(rank=8, alpha=8.0, targets=())

    def test_inherited_unless_dropped(self) -> None:
        text = ACTOR + REF + "model same = actor\nmodel other = actor { lora { rank = 4 } }\n"
        plan = good(HEAD + text + TRAIN)
        loras = {m.name: None if m.lora is None else m.lora.rank for m in plan.models}
        assert loras == {"actor": 16, "ref": None, "same": 16, "other": 4}

    @pytest.mark.parametrize(
        ("change", "rank"),
        [
            ("lora = none", None),
            ("lora { rank = 2 }", 2),
            ("lora = default", None),
        ],
    )
    def test_variants_replace_it(self, tmp_path: Path, change: str, rank: int | None) -> None:
        (tmp_path / "base.plan").write_text(HEAD + ACTOR + TRAIN)
        (tmp_path / "top.plan").write_text(f'extends "base.plan"\nmodel actor = "llama-3.1-8b" {{ {change} }}\n')
        plan = load_plan(str(tmp_path / "top.plan")).plan
        assert plan is not None
        lora = plan.model("actor").lora
        assert (None if lora is None else lora.rank) == rank

    def test_a_variant_can_take_none_back(self, tmp_path: Path) -> None:
        (tmp_path / "base.plan").write_text(HEAD + ACTOR + REF + TRAIN)
        (tmp_path / "top.plan").write_text('extends "base.plan"\nmodel ref = actor { lora { rank = 3 } }\n')
        (tmp_path / "back.plan").write_text('extends "base.plan"\nmodel ref = actor { lora = default }\n')
        ranks = []
        for name in ("top", "back"):
            plan = load_plan(str(tmp_path / f"{name}.plan")).plan
            assert plan is not None
            lora = plan.model("ref").lora
            assert lora is not None
            ranks.append(lora.rank)
        assert ranks == [3, 16]

    @pytest.mark.parametrize(
        ("body", "code", "text"),
        [
            ("lora { alpha = 32 }", "NRS2019", "lora"),
            ("lora { rank = 0 }", "NRS2010", "0"),
            ("lora { rank = 1.5 }", "NRS2008", "1.5"),
            ("lora { rank = 8  alpha = 0 }", "NRS2010", "0"),
            ("lora { rank = 8  alpha = big }", "NRS2008", "big"),
            ("lora { rank = 8  alpha = 4 GiB }", "NRS2009", "GiB"),
            ("lora { rank = 8  targets = (q_proj, vproj) }", "NRS2007", "vproj"),
            ("lora { rank = 8  targets = gate }", "NRS2007", "gate"),
            ("lora { rank = 8  targets = 3 }", "NRS2008", "3"),
            ("lora { rank = 8  dropout = 0.1 }", "NRS2002", "dropout"),
            ("lora = off", "NRS2026", "lora"),
            ("lora 4 { rank = 8 }", "", ""),
        ],
    )
    def test_mistakes(self, body: str, code: str, text: str) -> None:
        source = HEAD + f'model actor = "llama-3.1-8b" {{ {body} }}\n' + TRAIN
        if not code:
            assert codes(source)
            return
        assert marked(only(source, code)) == text

    def test_the_router_is_no_target(self) -> None:
        text = 'model actor = "qwen3-30b-a3b" { lora { rank = 8  targets = (gate) } }\n'
        assert "gate_proj" in (only(HEAD + text + TRAIN, "NRS2007").help or "")

    @pytest.mark.parametrize("written", ["all-linear", "(all-linear)", "ALL", "(q_proj, all)"])
    def test_every_linear_is_called_all(self, written: str) -> None:
        text = f'model actor = "llama-3.1-8b" {{ lora {{ rank = 8  targets = {written} }} }}\n'
        found = only(HEAD + text + TRAIN, "NRS2007")
        assert found.help == "every linear of every layer is targets = all, alone"
        assert found.primary is not None and found.primary.message.startswith("all, or some of q_proj, k_proj")
        assert (found.fix is not None) == ("," not in written)
        if found.fix is not None:
            assert found.fix.text == "all"

    def test_modules_are_listed_once(self) -> None:
        text = 'model actor = "llama-3.1-8b" { lora { rank = 8  targets = xyz } }\n'
        shown = render([only(HEAD + text + TRAIN, "NRS2007")], color=False)
        assert shown.count("down_proj") == 1

    def test_words_of_a_key_are_listed_once(self) -> None:
        shown = render(
            [only(HEAD + 'model actor = "llama-3.1-8b"\n' + TRAIN.replace("on =", "idle = xyz  on ="), "NRS2007")],
            color=False,
        )
        assert shown.count("offload") == 1


class TestSharedBase:
    def test_it_is_said_and_survives_its_placed_form(self) -> None:
        text = HEAD + ACTOR + REF + "stage actor.train { on = n0  tp = 2  idle = offload }\n"
        text += "stage ref.infer { with = actor.train }\n"
        result = resolve_text(text)
        (note,) = [d for d in result.diagnostics if d.code == "NRS3026"]
        assert note.headline == "ref.infer runs on the frozen weights of actor.train, without the adapter"
        assert note.severity is Severity.NOTE
        assert result.plan is not None and result.plan.stage("ref.infer").idle == "offload"
        placed = placed_plan_text(result.plan)
        again = resolve_text(placed)
        assert again.plan == pinned(result.plan), render(again.diagnostics, color=False)

    @pytest.mark.parametrize("key", ["swap = host", "idle = offload"])
    def test_what_the_other_decides(self, key: str) -> None:
        d = only(HEAD + ACTOR + REF + TRAIN + f"stage ref.infer {{ with = actor.train  {key} }}\n", "NRS3019")
        assert marked(d) == key

    @pytest.mark.parametrize(
        "text",
        [
            ACTOR + REF + TRAIN + "stage ref.infer { on = n1 }\n",
            ACTOR + "model ref = actor { frozen = true }\n" + TRAIN + "stage ref.infer { with = actor.train }\n",
            'model actor = "llama-3.1-8b"\n' + REF + TRAIN + "stage ref.infer { with = actor.train  swap = host }\n",
        ],
    )
    def test_other_references_have_their_own_copy(self, text: str) -> None:
        assert good(HEAD + text)
        assert not [d for d in found(HEAD + text) if d.code == "NRS3026"]


class TestFp8:
    MOE = 'model actor = "qwen3-30b-a3b"\n'

    def test_an_engine_cuts_experts_like_the_rest(self) -> None:
        stage = "stage actor.generate { engine = vllm  on = n0  tp = 4  state { weight = fp8 } }\n"
        d = only(HEAD + self.MOE + stage, "NRS3027")
        assert d.headline == "actor.generate: tp = 4 cuts fp8 blocks of qwen3-30b-a3b"
        assert d.notes[0] == "gate_proj of an expert: 768 rows over tp 4 are 192 on a rank, no multiple of 128"
        assert "legal tp: 1, 2" in d.notes
        assert "with ep above 1, which leaves experts whole: 1, 2, 4, 8, 16, 32" in d.notes

    @pytest.mark.parametrize(
        "keys",
        ["tp = 2  state { weight = fp8 }", "tp = 4  ep = 8  state { weight = fp8 }", "tp = 4"],
    )
    def test_legal_ones(self, keys: str) -> None:
        assert good(HEAD + self.MOE + f"stage actor.generate {{ engine = vllm  on = n0  {keys} }}\n")

    def test_precision_of_the_model_counts_too(self) -> None:
        text = 'model actor = "moonlight-16b-a3b" { precision = fp8 }\n'
        d = only(HEAD + text + "stage actor.infer { on = n0  tp = 4  etp = 1 }\n", "NRS3027")
        assert "legal tp: 1, 2" in d.notes

    def test_a_guest_points_at_its_host(self) -> None:
        text = self.MOE + 'model judge = "qwen2.5-0.5b" { precision = fp8 }\n'
        text += "stage actor.infer { on = n0  tp = 2 }\nstage judge.infer { with = actor.infer }\n"
        d = only(HEAD + text, "NRS3027")
        assert marked(d) == "with = actor.infer"


def test_refused_optimizers_say_why() -> None:
    text = HEAD + 'model actor = "llama-3.1-8b"\nstage actor.train { on = n0  optimizer = Adafactor }\n'
    d = only(text, "NRS3028")
    assert d.headline.startswith(
        "the state of Adafactor cannot be described: its second moments are row and column sums"
    )


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ("lion", ("weight", "master", "exp_avg")),
        ("muon", ("weight", "master", "momentum_buffer", "exp_avg", "exp_avg_sq")),
    ],
)
def test_open_optimizers(optimizer: str, slots: tuple[str, ...]) -> None:
    text = HEAD + f'model actor = "llama-3.1-8b"\nstage actor.train {{ on = n0  optimizer = {optimizer} }}\n'
    assert tuple(s.name for s in good(text).stage("actor.train").slots) == slots
