"""The reader of launch scripts: what bash would make of each feature, without running it."""

from __future__ import annotations

import pytest

from nereus.lang.importers.shell import ShellError, read_script
from nereus.lang.importers.shell_arith import ArithmeticFault, evaluate


def words(script: str) -> list[str]:
    """Arguments of the last command."""
    return [f.text for f in read_script(script).commands[-1].fields]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a=1 b='x y' \"c=$HOME/d\"", ["run", "a=1", "b=x y", "c=$HOME/d"]),
        ("X=4\nrun tp=$X pp=${X}", ["run", "tp=4", "pp=4"]),
        ("run tp=${TP:-8} ep=${EP-2}", ["run", "tp=8", "ep=2"]),
        ("TP=4\nTP=${TP:-8}\nrun $TP", ["run", "4"]),
        ('B="${A:-"${ROOT:-/mnt}/m"}"\nrun $B', ["run", "/mnt/m"]),
        ("run ${N:=3} $N", ["run", "3", "3"]),
        ("X=1\nrun ${X:+yes} ${Y:+no}", ["run", "yes"]),
        ("export A=1 B=2\nrun $A$B", ["run", "12"]),
        ("A=1 B=2; run $A $B", ["run", "1", "2"]),
        ("TP=2 run x=$TP", ["run", "x=$TP"]),  # set for the command only, after its words are expanded
        ("run \\\n  a=1\\\n  b=2 \\\n  c=3", ["run", "a=1", "b=2", "c=3"]),
        ("run a=1 # b=2\n", ["run", "a=1"]),
        ("run a#b '#c'", ["run", "a#b", "#c"]),
        ("run $((1024 * 2)) $(( (3+1)*2 ))", ["run", "2048", "8"]),
        ("a=2\nb=$((a*3))\nrun $(($a + b))", ["run", "8"]),
        ("ARGS=( a=b 'c d' )\nrun \"${ARGS[@]}\"", ["run", "a=b", "c d"]),
        ("A=(x)\nA+=(y z)\nrun ${A[@]}", ["run", "x", "y", "z"]),
        ("A=(\n  x # why\n  y\n)\nrun ${A[*]}", ["run", "x", "y"]),
        ("S='a=1 b=2'\nrun $S", ["run", "a=1", "b=2"]),
        ("S='a=1 b=2'\nrun \"$S\"", ["run", "a=1 b=2"]),
        ("S=a; S+=b\nrun $S", ["run", "ab"]),
        ('run $@ "$@" $*', ["run"]),
        ("run x=${1:-vllm}", ["run", "x=vllm"]),
        ("cat <<EOF\nnot a command\nEOF\nrun b", ["run", "b"]),
        ("cat <<-'EOF' > f\n\tnot\n\tEOF\nrun b", ["run", "b"]),
        ("run a > out.log 2>&1", ["run", "a"]),
        ("M=QWEN\nrun ${M,,} ${M^^}", ["run", "qwen", "QWEN"]),
        ("P=/a/b.tar\nrun ${P##*/} ${P%.tar} ${P/a/x}", ["run", "b.tar", "/a/b", "/x/b.tar"]),
        ("X=1\nunset X\nrun ${X:-2}", ["run", "2"]),
        ("f() { X=5; }\nf\nrun $X", ["run", "5"]),
        ("function f { X=5; }\nrun ${X:-0}", ["run", "0"]),
        ("(X=5)\nrun ${X:-0}", ["run", "0"]),
        ("{ X=5; }\nrun $X", ["run", "5"]),
        ("eval 'run a=1'", ["run", "a=1"]),
        ('bash -lc "run a=1"', ["run", "a=1"]),
        ("run {a:1,b:2} [1,2]", ["run", "{a:1,b:2}", "[1,2]"]),
        ("run a=1\r\n", ["run", "a=1"]),
    ],
)
def test_words(script: str, expected: list[str]) -> None:
    assert words(script) == expected


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ('[ "$A" = "x" ]', "then"),
        ('[[ $A == "x" && -n $A ]]', "then"),
        ("[[ $A == y || $A == x ]]", "then"),
        ('[ "$A" != x ]', "else"),
        ('[ -z "$UNSET" ]', "then"),
        ("[ 3 -lt 2 ]", "else"),
        ("[[ x.sh == *.sh ]]", "then"),
        ("[[ ! -z $A ]]", "then"),
        ("true", "then"),
    ],
)
def test_conditions_that_the_script_decides(condition: str, value: str) -> None:
    script = f"A=x\nif {condition}; then V=then; else V=else; fi\nrun $V"
    assert words(script) == ["run", value]


@pytest.mark.parametrize(
    "condition", ["[ -f /etc/hosts ]", "nvidia-smi | grep H100", "! grep -q x file", '[ "$(hostname)" = "n0" ]']
)
def test_undecidable_branches_are_not_believed(condition: str) -> None:
    script = f"V=0\nif {condition}; then V=1; else V=2; fi\nrun v=$V"
    command = read_script(script).commands[-1]
    value = command.fields[-1]
    assert value.text == "v=$V"
    assert "only a run decides" in value.missing[0].why
    assert command.conditional is None


def test_commands_under_an_undecidable_condition_are_marked() -> None:
    found = [c for c in read_script("if [ -d x ]; then run a; fi").commands if c.fields[0].text == "run"]
    assert len(found) == 1
    assert found[0].conditional is not None


def test_case_and_elif() -> None:
    case = "B=mega\ncase $B in fsdp) T=1 ;; m*|x) T=2 ;; *) T=3 ;; esac\n"
    assert words(case + "if false; then :; elif true; then U=4; fi\nrun $T $U") == ["run", "2", "4"]


def test_loops_are_not_followed() -> None:
    value = read_script("T=1\nfor n in 1 2; do T=$n; done\nrun $T").commands[-1].fields[1]
    assert value.text == "$T"
    assert "loop" in value.missing[0].why


def test_missing_names_say_why() -> None:
    fields = read_script("run a=$NOPE b=$(hostname) c=$((NOPE * 2))").commands[-1].fields
    assert [f.missing[0].unset for f in fields[1:]] == [True, False, True]
    assert fields[1].missing[0].name == "NOPE"
    assert "output of a command" in fields[2].missing[0].why


def test_spans_point_at_what_was_written() -> None:
    text = 'ARGS=(trainer.nnodes=4)\nrun x.y=1 "${ARGS[@]}"'
    fields = read_script(text).commands[-1].fields
    assert [text[f.start : f.end] for f in fields[1:]] == ["x.y=1", "trainer.nnodes=4"]


@pytest.mark.parametrize("text", ["run 'abc", 'run "abc', "run ${X", "run $((1+2", "run `x", "A=(1 2", "(" * 500])
def test_what_never_closes_is_refused_with_a_place(text: str) -> None:
    with pytest.raises(ShellError) as caught:
        read_script(text)
    assert 0 <= caught.value.start <= caught.value.end <= len(text)


def test_hostile_scripts_stay_small() -> None:
    doubling = "X=aaaaaaaaaaaaaaaa\n" + "X=$X$X\n" * 200 + "run $X"
    assert len(words(doubling)[1]) < 100_000
    arrays = "A=(a b c d)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + "run"
    assert words(arrays) == ["run"]
    assert read_script("f() { f; f; }\nf\nrun a").commands[-1].fields[0].text == "run"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2**10", 1024),
        ("-7/2", -3),
        ("-7%2", -1),
        ("1<<4|1", 17),
        ("3>2?10:20", 10),
        ("0x10+010", 24),
        ("!0", 1),
        ("", 0),
    ],
)
def test_arithmetic(text: str, value: int) -> None:
    assert evaluate(text, lambda name: 0) == value


@pytest.mark.parametrize("text", ["1/0", "2**99999", "1+", "(1", "1 2", "08", "1.5", "9" * 60, "1?2"])
def test_arithmetic_faults(text: str) -> None:
    with pytest.raises(ArithmeticFault):
        evaluate(text, lambda name: 0)
