"""Degrees in plans: legal by the rules of the framework that runs the stage; experts, replicas, batches."""

from __future__ import annotations

import pytest
from lang_support import CLUSTER, HEAD, MODELS, codes, good, only

from nereus.ir.layout import layout_of
from nereus.lang.api import pinned, placed_plan_text, resolve_text

MOE = HEAD.replace('actor = "llama-3.1-8b"', 'actor = "qwen3-30b-a3b"')
#: 151552 = 4096 x 37.
ODD_VOCAB = (
    CLUSTER
    + 'model actor = hf("x/config.json") { arch { family = llama  num_layers = 4  hidden = 768  num_heads = 48'
    + "  num_kv_heads = 48  head_dim = 16  ffn = 1536  vocab = 151552 } }\n"
    + "workload { algorithm = sft  prompts = 8 }\n"
)


class TestTensorParallel:
    @pytest.mark.parametrize("who", ["engine = vllm", "engine = sglang", "backend = fsdp", "backend = deepspeed", ""])
    def test_a_vocabulary_that_does_not_divide_is_refused_with_what_does(self, who: str) -> None:
        d = only(ODD_VOCAB + f"stage actor.infer {{ on = n0.gpu[0-5]  tp = 6  {who} }}", "NRS3005")
        assert d.notes[0] == "vocabulary 151552 does not divide by 6"
        assert d.notes[1].startswith("legal tp: 1, 2, 4, 8, 16") and d.fix is not None and d.fix.text == "tp = 4"

    def test_megatron_pads_it(self) -> None:
        stage = "stage actor.infer { on = n0.gpu[0-5]  tp = 6  backend = megatron }"
        assert codes(ODD_VOCAB + stage) == []
        d = only(ODD_VOCAB + stage.replace("5]  tp = 6", "4]  tp = 5"), "NRS3005")
        assert (
            "48 heads do not divide by 5" in d.notes
            and "legal tp: 1, 2, 3, 4, 6, 8" in d.notes[-1] + d.notes[1] + d.notes[2]
        )

    def test_guests_follow_their_hosts_framework(self) -> None:
        other = ODD_VOCAB.replace("workload", 'model other = "llama-3.2-1b" { frozen = true }\nworkload')
        host = "stage other.infer { on = n0.gpu[0-3]  tp = 4  backend = megatron }\n"
        assert codes(other + host + "stage actor.infer { with = other.infer }") == []


class TestExperts:
    def test_expert_tp_defaults_as_in_megatron(self) -> None:
        train = good(MOE + "stage actor.train { backend = megatron  on = n0  tp = 2  ep = 4 }").stage("actor.train")
        assert (train.etp, train.expert_dp, train.dp) == (2, 1, 4)
        train = good(MOE + "stage actor.train { backend = megatron  on = n0  tp = 2  ep = 4  etp = 1 }").stage(
            "actor.train"
        )
        assert (train.etp, train.expert_dp) == (1, 2)
        # Engines leave experts whole where they spread them.
        engine = good(MOE + "stage actor.generate { engine = vllm  on = n0  tp = 2  ep = 8 }").stage("actor.generate")
        assert (engine.etp, engine.expert_dp) == (1, 1)

    def test_attention_replicas_inside_an_engine(self) -> None:
        """SGLang with tp_size 8, dp_size 4, ep_size 8 on 16 GPUs: two engines, the attention of each on 4 replicas."""
        stage = good(MOE + "stage actor.generate { engine = sglang  on = n[0-1]  tp = 2  ep = 8 }").stage(
            "actor.generate"
        )
        assert (stage.dp, stage.expert_dp, stage.num_emus, stage.unit_dp) == (8, 2, 2, 4)
        assert stage.unit_of_dp == (0, 0, 0, 0, 1, 1, 1, 1)
        ranks = layout_of(stage)
        experts = ranks.expert_coordinates()
        for unit in range(2):
            inside = [r for r in range(16) if stage.unit_of_dp[ranks.coordinates()["dp"][r]] == unit]
            assert sorted(experts["ep"][r] for r in inside) == list(range(8))

    def test_replicas_count_units_that_are_closed_under_ep(self) -> None:
        text = MOE + "stage actor.generate { engine = vllm  on = n[0-1]  tp = 2  ep = 8  replicas { min = 2 } }"
        assert codes(text) == []
        d = only(text.replace("min = 2", "min = 3"), "NRS3023")
        assert "2 complete replica" in d.headline and "4 data-parallel rank(s)" in d.notes[0]

    def test_fsdp_groups_of_experts_must_be_complete(self) -> None:
        text = MOE.replace("512  mini_batch = 128", "480")
        stage = "stage actor.train { on = [n0, n1.gpu[0-3]]  backend = fsdp  ep = 4  fsdp = 2 }"
        d = only(text + stage, "NRS3011")
        assert "expert dp 3" in d.headline
        assert codes(text + stage.replace("fsdp = 2", "fsdp = 6")) == []  # three shards of experts, the whole of them

    def test_what_does_not_divide_is_listed(self) -> None:
        d = only(MOE + "stage actor.train { on = n0  ep = 4  etp = 5 }", "NRS3013")
        assert d.primary is not None and d.primary.message.startswith("legal: 1, 2, 3, 4, 6, 8, 12, 16")


class TestBatch:
    def test_the_update_can_be_kept_with_a_smaller_micro_batch(self) -> None:
        d = only(HEAD + "stage actor.train { on = n0  micro_batch = 3 }", "NRS3007")
        assert d.help == "micro_batch = 2, 8 times, is the same update in no more memory"
        assert d.fix is not None and codes(HEAD + f"stage actor.train {{ on = n0  {d.fix.text} }}") == []

    def test_a_budget_needs_equal_shares(self) -> None:
        d = only(HEAD + "stage actor.train { on = n0.gpu[0-5]  max_tokens = 4096 }", "NRS3007")
        assert d.notes == ("nearest legal dp: 1, 2, 4, 8 or 16",) and d.fix is None and d.help is None

    def test_sequence_parallel_ranks_are_no_replicas(self) -> None:
        """T11: dp 8 -> 4, not 8, with cp 2; dp 6 is refused."""
        text = CLUSTER + MODELS + "workload { algorithm = grpo  prompts = 32  samples = 8 }\n"
        halved = good(text + "stage actor.train { on = n0  cp = 2  micro_batch = 4 }").stage("actor.train")
        assert halved.dp == 4
        d = only(text + "stage actor.train { on = n0.gpu[0-5]  micro_batch = 4 }", "NRS3007")
        assert (
            "mini_batch 256" in d.headline and "nearest legal dp at micro_batch 4: 1, 2, 4, 8, 16 or 32" not in d.notes
        )
        assert any(note.startswith("nearest legal dp at micro_batch 4: ") and "4, 8" in note for note in d.notes)


def test_expert_degrees_survive_the_placed_form() -> None:
    plan = good(MOE + "stage actor.train { backend = megatron  on = n0  tp = 2  ep = 4 }")
    assert resolve_text(placed_plan_text(plan)).plan == pinned(plan)
