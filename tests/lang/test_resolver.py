"""Merging, defaults, and every mistake with its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lang_support import CLUSTER, HEAD, MODELS, WORKLOAD, codes, found, good, marked, only

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import Severity
from nereus.lang.api import load_plan, resolve_text
from nereus.lang.render import render


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.plan").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.plan"


def load(path: Path):  # type: ignore[no-untyped-def]
    result = load_plan(str(path))
    assert result.plan is not None, render(result.diagnostics, color=False)
    return result.plan


BASE = (
    HEAD
    + "stage actor.train { on = n0  tp = 2  dp = 4  micro_batch = 2 }\nstage actor.logprob { with = actor.train }\n"
)


class TestExtends:
    def test_keys_replace_values(self, tmp_path: Path) -> None:
        plan = load(write(tmp_path, a='extends "b.plan"\nstage actor.train { micro_batch = 4 }', b=BASE))
        stage = plan.stage("actor.train")
        assert (stage.tp, stage.micro_batch, stage.dp) == (2, 4, 4)

    def test_default_unsets(self, tmp_path: Path) -> None:
        plan = load(write(tmp_path, a='extends "b.plan"\nstage actor.train { micro_batch = default }', b=BASE))
        assert plan.stage("actor.train").micro_batch == 1

    @pytest.mark.parametrize("change", ["tp = 4", "on = n1.gpu[0-3]", "pp = 2"])
    def test_written_dp_is_dropped_with_what_it_spoke_of(self, tmp_path: Path, change: str) -> None:
        plan = load(write(tmp_path, a=f'extends "b.plan"\nstage actor.train {{ {change} }}', b=BASE))
        assert plan.stage("actor.train").dp == 2

    def test_written_dp_stays_when_something_else_changes(self, tmp_path: Path) -> None:
        text = 'extends "b.plan"\nstage actor.train { zero = 1 }'
        path = write(tmp_path, a=text, b=BASE.replace("dp = 4", "dp = 8"))
        assert [d.code for d in load_plan(str(path)).diagnostics] == ["NRS3004"]

    def test_new_dp_beside_the_change_is_checked(self, tmp_path: Path) -> None:
        path = write(tmp_path, a='extends "b.plan"\nstage actor.train { tp = 4  dp = 4 }', b=BASE)
        assert [d.code for d in load_plan(str(path)).diagnostics] == ["NRS3004"]

    def test_remove_stage(self, tmp_path: Path) -> None:
        plan = load(write(tmp_path, a='extends "b.plan"\nremove stage actor.logprob', b=BASE))
        assert [s.name for s in plan.stages] == ["actor.train"]

    def test_names_bind_after_the_merge(self, tmp_path: Path) -> None:
        text = 'extends "b.plan"\nmodel actor = "llama-3.2-1b"\nstage actor.train { on = n1 }'
        plan = load(write(tmp_path, a=text, b=BASE))
        assert plan.stage("actor.logprob").devices[0] == Device("n1", 0)
        assert sum(plan.stage("actor.logprob").pp_split) == 16

    def test_path_is_relative_to_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "b.plan").write_text('extends "../c.plan"\nstage actor.train { tp = 4 }')
        plan = load(write(tmp_path, a='extends "deep/b.plan"', c=BASE))
        assert plan.stage("actor.train").tp == 4

    def test_nodes_of_a_group_can_be_overridden_one_by_one(self, tmp_path: Path) -> None:
        text = 'extends "b.plan"\ncluster { node n1 { nic = 10 GB/s }  node m0 { gpus = 4 x "l40s-48gb" } }'
        plan = load(write(tmp_path, a=text, b=BASE))
        nics = {n.name: n.nic_bytes_per_s for n in plan.cluster.nodes}
        assert (nics["n0"], nics["n1"], nics["m0"]) == (400e9, 10e9, 4 * 25e9)
        assert plan.cluster.node("n1").num_gpus == 8 and plan.cluster.node("m0").num_gpus == 4

    def test_removed_node_in_stage_that_inherits_it(self, tmp_path: Path) -> None:
        path = write(tmp_path, a='extends "b.plan"\ncluster { remove = n0 }', b=BASE)
        result = load_plan(str(path))
        assert [d.code for d in result.diagnostics] == ["NRS2015"]
        (label,) = result.diagnostics[0].secondary
        assert label.span.source.path.endswith("a.plan")
        assert marked(result.diagnostics[0]) == "n0"

    def test_missing_base_is_the_only_complaint(self, tmp_path: Path) -> None:
        path = write(tmp_path, a='extends "nowhere.plan"\nstage actor.train { tp = 4 }')
        assert [d.code for d in load_plan(str(path)).diagnostics] == ["NRS2016"]

    def test_cycle(self, tmp_path: Path) -> None:
        path = write(tmp_path, a='extends "b.plan"', b='extends "c.plan"', c='extends "b.plan"\n' + BASE)
        (d,) = load_plan(str(path)).diagnostics
        assert d.code == "NRS2017" and "b.plan" in d.notes[0]

    def test_self(self, tmp_path: Path) -> None:
        assert [d.code for d in load_plan(str(write(tmp_path, a='extends "a.plan"\n' + BASE))).diagnostics] == [
            "NRS2017"
        ]


class TestDefaults:
    def test_all(self) -> None:
        plan = good(HEAD + "stage actor.train { on = n0  tp = 2 }")
        s = plan.stage("actor.train")
        assert (s.pp, s.cp, s.ep, s.etp, s.vp, s.dp, s.sp, s.zero, s.fsdp) == (1, 1, 1, 1, 1, 4, True, 0, 0)
        assert (s.order, s.idle, s.recompute, s.micro_batch, s.optimizer) == (
            "tp-cp-pp-dp",
            "resident",
            "none",
            1,
            "adam",
        )
        assert s.pp_split == (32,) and s.place is None
        assert plan.cluster.nodes[0].host_mem_bytes == 2**40
        assert plan.workload.mode == "sync"

    def test_mini_batch_is_all_samples(self) -> None:
        text = (
            CLUSTER + MODELS + "workload { algorithm = sft  prompts = 64  samples = 4 }\nstage actor.train { on = n0 }"
        )
        assert good(text).workload.mini_batch == 256

    def test_fsdp_backend_shards_fully(self) -> None:
        assert good(HEAD + "stage actor.train { backend = fsdp  on = n0 }").stage("actor.train").fsdp == 8
        assert good(HEAD + "stage actor.train { backend = fsdp  on = n0  fsdp = off }").stage("actor.train").fsdp == 0

    def test_with_chain_ends_at_the_owner_of_the_processes(self) -> None:
        text = HEAD + "stage actor.train { on = n0  tp = 2 }\nstage actor.infer { with = actor.logprob }\n"
        plan = good(text + "stage actor.logprob { with = actor.train }")
        assert plan.stage("actor.infer").tp == 2

    def test_guest_of_another_size_has_its_own_layers(self) -> None:
        text = HEAD + 'model small = "llama-3.2-1b" { frozen = true }\n'
        plan = good(text + "stage actor.train { on = n0  pp = 2 }\nstage small.infer { with = actor.train }")
        assert plan.stage("small.infer").pp_split == (8, 8) and plan.stage("actor.train").pp_split == (16, 16)


class TestNumbers:
    def test_device_count_names_the_nearest(self) -> None:
        d = only(HEAD + "stage actor.train { on = n0.gpu[0-5]  tp = 2  pp = 2 }", "NRS3003")
        assert "6 GPUs do not divide by tp 2 x pp 2 = 4" in d.headline and d.help is not None and "4 or 8" in d.help
        d = only(HEAD + "stage actor.train { on = n0.gpu0  tp = 2 }", "NRS3003")
        assert d.help == "it needs at least 2 GPUs"

    def test_tp_refusals_are_reasoned(self) -> None:
        text = HEAD.replace('actor = "llama-3.1-8b"', 'actor = "qwen2.5-7b"')
        d = only(text + "stage actor.train { on = n0  tp = 8 }", "NRS3005")
        assert "28 heads do not divide by 8" in d.notes and "legal tp: 1, 2, 4" in d.notes
        assert any(n.startswith("tp = 7: 4 kv heads") and "ffn width 18944" in n and "152064" in n for n in d.notes)
        assert any(n.startswith("tp = 28: ffn width 18944") and "kv heads" not in n for n in d.notes)
        assert d.fix is not None and d.fix.text == "tp = 4"
        text = HEAD.replace('actor = "llama-3.1-8b"', 'actor = "qwen2.5-1.5b"')
        assert codes(text + "stage actor.train { on = n0  tp = 4 }") == []
        assert codes(text + "stage actor.train { on = n0  tp = 8 }") == ["NRS3005"]

    def test_tp_across_nodes(self) -> None:
        text = HEAD.replace("prompts = 512  mini_batch = 128", "prompts = 384")
        d = only(text + "stage actor.train { on = [n0.gpu[0-5], n1.gpu[0-5]]  tp = 4 }", "NRS3006")
        assert d.severity is Severity.WARNING and "1 of 3 groups" in d.headline
        assert codes(HEAD + "stage actor.train { on = [n0.gpu[0-3], n1.gpu[0-3]]  tp = 4 }") == []
        crossing = "stage actor.train { on = n[0-1]  tp = 2  order = dp-cp-tp-pp }"
        assert codes(HEAD + crossing) == ["NRS3006"]
        place = "place = (n0.gpu0, n1.gpu0, n0.gpu1, n1.gpu1)"
        assert codes(HEAD + f"stage actor.train {{ on = [n0.gpu[0-1], n1.gpu[0-1]]  tp = 2  {place} }}") == ["NRS3006"]

    def test_batch_lists_what_is_legal(self) -> None:
        d = only(HEAD + "stage actor.train { on = n0  micro_batch = 3 }", "NRS3007")
        assert "legal micro_batch at dp 8: 1, 2, 4, 8, 16" in d.notes
        text = HEAD.replace("prompts = 512  mini_batch = 128", "prompts = 256")
        d = only(text + "stage actor.train { on = n0.gpu[0-6] }", "NRS3007")
        assert any("nearest legal dp at micro_batch 1" in n and "8" in n for n in d.notes)

    def test_layers_are_never_lost(self) -> None:
        text = CLUSTER + MODELS + "workload { algorithm = sft  prompts = 96 }\n"
        d = only(text + "stage actor.train { on = n0.gpu[0-2]  pp = 3 }", "NRS3008")
        assert d.help is not None and "pp_split = (" in d.help and d.fix is not None
        split = d.fix.text.split("(")[1].rstrip(")")
        assert sum(int(n) for n in split.split(",")) == 32
        assert good(text + f"stage actor.train {{ on = n0.gpu[0-2]  {d.fix.text} }}").stage("actor.train").pp == 3
        assert codes(text + "stage actor.train { on = n0.gpu[0-2]  pp = 3  pp_split = (16, 16) }") == ["NRS3009"]
        d = only(text + "stage actor.train { on = n0.gpu[0-1]  pp = 2  pp_split = (17, 14) }", "NRS3009")
        assert "31 layers of 32" in d.headline

    def test_concurrent_use_is_an_error_in_async_mode_only(self) -> None:
        stages = "stage actor.generate { on = n[0-1]  tp = 2 }\nstage actor.train { on = n[1-2] }\n"
        stages += "stage critic.train { on = n[1-2] }\n"
        assert codes(HEAD + stages) == []
        text = HEAD.replace("algorithm = sft", "algorithm = sft  mode = async")
        errors = [d for d in found(text + stages) if d.severity is Severity.ERROR]
        assert [d.code for d in errors] == ["NRS3002", "NRS3002"]
        assert "on n1" in errors[0].headline and dict(errors[0].data)["num_shared"] == 8
        guest = "stage actor.train { on = n0 }\nstage actor.generate { with = actor.train }"
        assert codes(text + guest) == ["NRS3002"]

    def test_experts(self) -> None:
        text = HEAD.replace('actor = "llama-3.1-8b"', 'actor = "qwen3-30b-a3b"')
        assert codes(text + "stage actor.train { on = n0  ep = 8 }") == []
        assert codes(text + "stage actor.train { on = n0.gpu[0-3]  ep = 8 }") == ["NRS3013"]
        assert codes(text + "stage actor.train { on = n0  ep = 3 }") == ["NRS3013"]
        assert codes(HEAD + "stage actor.train { on = n0  ep = 2  etp = 2 }") == ["NRS3012", "NRS3012"]

    def test_suggestions(self) -> None:
        d = only(HEAD + "stage actor.train { on = n0  recomputte = full }", "NRS2002")
        assert d.help == "did you mean recompute?" and d.fix is not None and d.fix.text == "recompute"
        d = only(HEAD + "stage actor.trian { on = n0 }", "NRS2027")
        assert marked(d) == "trian" and d.help == "did you mean train?"
        d = only(HEAD + "stage crtic.train { on = n0 }", "NRS2003")
        assert marked(d) == "crtic"

    def test_many_mistakes_in_one_run(self) -> None:
        text = (
            'cluster { node n0 { gpus = 8 x "h100-sxm-80gb"  host_mem = 2 GB/s  color = red } }\n'
            'model actor = "llama-3.1-9b"\n'
            "workload { algorithm = ppoo  prompts = 0 }\n"
            "stage actor.train { on = n7.gpu[0-3]  tp = two  zero = 9  optimizer = adamm }\n"
            "stage actor.logprob { with = actor.tran }\n"
        )
        expected = ["NRS2009", "NRS2002", "NRS2004", "NRS2007", "NRS2010", "NRS2008", "NRS2010", "NRS2007", "NRS2006"]
        assert sorted(codes(text)) == sorted([*expected, "NRS2013"])

    def test_a_wrong_dp_hides_nothing(self) -> None:
        text = CLUSTER + MODELS + "workload { algorithm = grpo  mode = async  prompts = 96 }\n"
        text += "stage actor.generate { on = n0  tp = 2 }\n"
        text += "stage actor.train { on = n[0-1]  tp = 16  dp = 4  micro_batch = 5 }"
        assert codes(text) == ["NRS3002", "NRS3004", "NRS3007", "NRS3006"]

    def test_every_mistake_once_without_echoes(self) -> None:
        """One code for each mistake; the others of a stage do not wait until it is repaired."""
        text = (
            'cluster { node n[0-1] { gpus = 8 x "h100-sxm-80gb"  host_mem = 2 GB/s } }\n'  # NRS2009
            'model actor = "llama-3.1-8b" { frozzen = true }\n'  # NRS2002
            'model critic = "llama-3.1-9b"\n'  # NRS2004
            "workload { algorithm = grpoo  mode = async  samples = two  mini_batch = 96 }\n"  # NRS2007, 2008
            "stage actor.generate { on = n0  tp = 2  engine = vlm }\n"  # NRS3002, 2007
            "stage actor.train { on = n[0-1]  tp = 2  dp = 4  micro_batch = 5  recompute = ful  order = tp-pp\n"
            "  place = n7  zero = 1  fsdp = 4 }\n"  # NRS3004, 3007, 2007, 3018, 2013, 3010
            "stage actor.logprob { with = actor.trian  tp = 2 }\n"  # NRS2006, 2021
            "stage actor.infer { on = n0.gpu9  idle = sleep }\n"  # NRS2014, 2007
        )
        expected = "2009 2002 2004 2007 2008 3002 2007 3004 3007 2007 3018 2013 3010 2006 2021 2014 2007"
        assert codes(text) == [f"NRS{code}" for code in expected.split()]

    @pytest.mark.parametrize(
        ("stage", "expected"),
        [
            ("tp = two  dp = 4  sp = true  micro_batch = 7", ["NRS2008"]),
            ("tp = 3  dp = 4  micro_batch = 7  fsdp = 5", ["NRS3005"]),
            ("tp = 3  pp = 5", ["NRS3003", "NRS3005", "NRS3008"]),
            ("tp = 5  pp = 64", ["NRS3005", "NRS3008"]),
            ("tp 2  dp = 4  micro_batch = 7", ["NRS1008"]),
            ("zero = 9  micro_batch = 7", ["NRS2010", "NRS3007"]),
            ("fsdp = 3  micro_batch = 7", ["NRS3007", "NRS3011"]),
            ("micro_batch = x  max_tokens = 4096 s", ["NRS2008", "NRS2009"]),
            ("ep = x  etp = 2", ["NRS2008", "NRS3012"]),
        ],
    )
    def test_what_follows_from_a_mistake_is_not_said(self, stage: str, expected: list[str]) -> None:
        assert sorted(codes(HEAD + f"stage actor.train {{ on = n0  {stage} }}")) == expected

    @pytest.mark.parametrize(
        ("workload", "expected"),
        [
            ("prompts = x  mini_batch = 64", ["NRS2008", "NRS3007"]),
            ("prompts = x", ["NRS2008"]),
            ("prompts = 64  mini_batch = 48", ["NRS3020"]),
            ("prompts = 64  response_len = x  max_response = 100", ["NRS2008", "NRS3007"]),
            ("prompts = 64  mode = asink", ["NRS2007", "NRS3007"]),
        ],
    )
    def test_mistakes_of_the_workload(self, workload: str, expected: list[str]) -> None:
        text = CLUSTER + MODELS + f"workload {{ {workload} }}\n"
        assert sorted(codes(text + "stage actor.train { on = n0  micro_batch = 7 }")) == expected

    def test_guests_of_a_faulty_host(self) -> None:
        text = HEAD + "stage actor.train { on = n0  tp = 2  dp = 2 }\n"
        text += 'model small = "llama-3.2-1b"\nstage small.train { with = actor.train  micro_batch = 3 }\n'
        assert codes(text) == ["NRS3004", "NRS3007"]
        assert codes(text.replace("tp = 2  dp = 2", "tp = 3")) == ["NRS3005"]

    def test_a_stage_of_no_kind_has_its_other_mistakes_too(self) -> None:
        assert codes(HEAD + "stage actor.trian { on = n7  tp = 3 }") == ["NRS2027", "NRS2013", "NRS3005"]
        assert codes(HEAD + "stage actr.train { on = n0  micro_batch = 3 }") == ["NRS2003", "NRS3007"]
        assert codes(HEAD + "stage actor { on = n7 }\nstage actor.infer { with = actor }") == ["NRS2026", "NRS2013"]


class TestHf:
    CONFIG = json.loads((Path(__file__).parents[1] / "plans" / "tiny-config.json").read_text())

    def test_relative_to_the_plan_and_self_contained_when_placed(self, tmp_path: Path) -> None:
        from nereus.lang.api import placed_plan_text

        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "config.json").write_text(json.dumps(self.CONFIG))
        text = (
            HEAD.replace('actor = "llama-3.1-8b"', 'actor = hf("models/config.json")') + "stage actor.train { on = n0 }"
        )
        plan = load(write(tmp_path, a=text))
        assert plan.model("actor").arch.num_layers == 4 and plan.model("actor").source == "models/config.json"
        by_text = resolve_text(text, base_dir=str(tmp_path)).plan
        assert by_text is not None and by_text.models == plan.models
        elsewhere = resolve_text(placed_plan_text(plan), path="/nowhere/x.plan").plan
        assert elsewhere is not None and elsewhere.models == plan.models

    @pytest.mark.parametrize(
        "content",
        ["", "[1]", "{", "[" * 100_000, '{"model_type": "bert"}', "{}", '{"hidden_size": ' + "9" * 5000 + "}", "\0"],
    )
    def test_bad_configuration(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "c.json").write_text(content)
        text = HEAD.replace('actor = "llama-3.1-8b"', 'actor = hf("c.json")') + "stage actor.train { on = n0 }"
        result = load_plan(str(write(tmp_path, a=text)))
        assert [d.code for d in result.diagnostics] == ["NRS2018"]

    def test_absurd_shape(self, tmp_path: Path) -> None:
        (tmp_path / "c.json").write_text(json.dumps({**self.CONFIG, "num_hidden_layers": 10**9}))
        text = HEAD.replace('actor = "llama-3.1-8b"', 'actor = hf("c.json")') + "stage actor.train { on = n0 }"
        assert [d.code for d in load_plan(str(write(tmp_path, a=text))).diagnostics] == ["NRS2018"]


def test_unreadable_files(tmp_path: Path) -> None:
    assert [d.code for d in load_plan(str(tmp_path)).diagnostics] == ["NRS1001"]
    assert [d.code for d in load_plan("a\0b").diagnostics] == ["NRS1001"]
    (tmp_path / "x.plan").write_bytes(b"\xff\xfe\x00")
    (d,) = load_plan(str(tmp_path / "x.plan")).diagnostics
    assert d.code == "NRS1002"


def test_line_ends_and_byte_order_mark() -> None:
    text = "\ufeff" + (HEAD + "stage actor.train { on = n0 } # x\n").replace("\n", "\r\n")
    assert good(text).stage("actor.train").dp == 8
    assert WORKLOAD in HEAD
