"""Recovery: each mistake once, where it is, and the rest of the plan is still read."""

from __future__ import annotations

import pytest
from lang_support import HEAD, codes, found, marked, only

from nereus.ir.diagnostic import Source
from nereus.lang.parser import parse


@pytest.mark.parametrize(
    ("stage", "code", "caret"),
    [
        ("stage actor.train { on = n0  tp: 2 }", "NRS1003", ":"),
        ("stage actor.train { on = n0  tp = ; pp = 2 }", "NRS1003", ";"),
        ("stage actor.train { on = 'n0' }", "NRS1003", "'"),
        ('stage actor.train { on = n0 }\ncheckpoint { path = "x\n}', "NRS1004", '"'),
        ("stage actor.train { on = n0", "NRS1005", "{"),
        ("stage actor.train { on = n0.gpu[0-3\n tp = 2 }", "NRS1005", "["),
        ("stage actor.train { on = n0 pp_split = (16 16\n tp = 2 }", "NRS1005", "("),
        ("stage actor.train { on = n0 }}", "NRS1006", "}"),
        ("stage actor.train { on = n0 ) }", "NRS1006", ")"),
        ("stage actor.train { on = n0 tp =\n pp = 2 }", "NRS1007", "="),
        ("stage actor.train { on = n0 tp = }", "NRS1007", "="),
        ("stage actor.train { on = n0 tp 2 pp = 2 }", "NRS1008", "tp"),
        ("stage actor.train { on = n0 async }", "NRS1008", "async"),
        ("stage actor.train { on = n0 = n1 }", "NRS1009", "="),
        ("extends base.plan\nstage actor.train { on = n0 }", "NRS1009", "base.plan"),
    ],
)
def test_one_mistake_one_message(stage: str, code: str, caret: str) -> None:
    assert marked(only(HEAD + stage, code)) == caret


def test_many_mistakes_in_one_run() -> None:
    text = (
        CLUSTER_WITH_TYPO
        + "model actor = 'llama'\n"
        + "workload { prompts 512  epochs = 1 }\n"
        + "stage actor.train { on = n0\n"
        + "stage actor.logprob { with = actor.trian }\n"
        + 'checkpoint { path = "x\n}\n'
    )
    assert sorted(codes(text)) == sorted(["NRS1003", "NRS1008", "NRS1005", "NRS1004", "NRS2005", "NRS2006"])


CLUSTER_WITH_TYPO = 'cluster { node n0 { gpus = 8 x "h100" } }\n'


def test_open_block_swallows_only_itself() -> None:
    text = HEAD + "stage actor.train { on = n0\nstage critic.train { on = n0  tp = 3 }\n"
    assert codes(text) == ["NRS1005", "NRS3005"]


def test_nothing_is_missing_where_the_text_was_broken() -> None:
    assert codes(HEAD + "stage actor.train { on n0 }") == ["NRS1008"]


def test_deep_nesting_and_huge_numbers() -> None:
    assert codes(HEAD + "stage actor.train { on = " + "(" * 100_000) == ["NRS1010"]
    assert codes(HEAD + f"stage actor.train {{ on = n0  tp = {'9' * 100_000} }}") == ["NRS1011"]
    assert codes(HEAD + "stage actor.train { on = n0  tp = 1e300 }") == ["NRS1011"]
    assert codes(HEAD + "stage actor.train { on = n[0-999999999] }") == ["NRS2028"]
    assert "NRS2028" in codes('cluster { node a[0-999]-b[0-999] { gpus = 8 x "h100-sxm-80gb" } }')


def test_messages_never_show_the_parser() -> None:
    for text in ("stage {", "= = =", "a b c d", "model x = (", "{ } [ ] ( )", "@", "x = 2 y", "a = b @ { c"):
        for d in found(text):
            words = " ".join([d.headline, d.help or "", *d.notes, d.primary.message if d.primary else ""])
            assert not any(w in words for w in ("WORD", "LBRACE", "RSQB", "Token(", "Unexpected", "$END")), words


def test_syntax_errors_are_bounded() -> None:
    diagnostics = parse(Source(path="x", text="a b c d\n" * 500)).diagnostics
    assert len(diagnostics) == 21 and diagnostics[-1].code == "NRS1014"


def test_words_after_numbers_and_comments_between() -> None:
    """What a word after a number is must not depend on its first letter, nor on a comment behind it."""

    def keys(text: str) -> list[str]:
        result = parse(Source(path="x", text=text))
        assert not result.diagnostics, result.diagnostics
        return [item.key.text for item in result.file.items]  # type: ignore[union-attr]

    assert keys("a = 0 xa0 = (a)") == ["a", "xa0"]
    assert keys("a = 0 x = 1") == ["a", "x"]
    assert keys("a = 2 pp # c = d\n # e\n = 4") == ["a", "pp"]
    assert keys("remove # c\n # d\n = n1") == ["remove"]
    assert keys("extends # c\n = n1") == ["extends"]
    assert keys('gpus = 8 x "id" steps = 2 steps') == ["gpus", "steps"]
    assert keys('gpus = 8 # c\n x # d\n "id"') == ["gpus"]
