"""``nereusc verify``: text, JSON, exit codes, damaged files."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from cli_support import change_document

pytestmark = pytest.mark.usefixtures("in_plans")


def test_a_saved_transition_is_proved(nereusc, saved: Path, tmp_path: Path):
    ran = nereusc("verify", str(saved))
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.startswith("overlap-before.plan -> overlap-after.plan\n")
    assert ran.stdout.endswith("all 13 properties hold\n")
    assert ran.stdout.count("proved") == 13 and "BROKEN" not in ran.stdout
    packed = tmp_path / "change.json.gz"
    packed.write_bytes(gzip.compress(saved.read_bytes()))
    assert nereusc("verify", str(packed)).stdout == ran.stdout


def test_json(nereusc, saved: Path):
    ran = nereusc("verify", "--json", str(saved))
    document = ran.json()
    assert ran.code == 0 and document["ok"] and document["digest"] == json.loads(saved.read_text())["digest"]
    assert all(p["holds"] and p["evidence"] and p["about"] for p in document["properties"])
    assert document["num_devices"] == 32 and document["num_moves"] > 0
    assert "placement_s" in document["not_judged"]


def test_a_violation_is_named_and_has_an_exit_code(nereusc, saved: Path):
    path = change_document(saved, lambda d: d["certificate"].update(moved_bytes=d["certificate"]["moved_bytes"] + 1))
    ran = nereusc("verify", path)
    assert ran.code == 3
    assert "certificate BROKEN moved_bytes is " in ran.stdout
    assert ran.stdout.endswith("does not hold: certificate\n")
    document = nereusc("verify", "--json", path).json()
    assert not document["ok"]
    assert [p["name"] for p in document["properties"] if not p["holds"]] == ["certificate"]


def test_a_missing_move_is_named(nereusc, saved: Path):
    def drop(document: dict[str, Any]) -> None:
        moves = document["schedule"]["moves"]
        assert moves["after_counts"][-1] <= 1
        for _ in range(moves["after_counts"][-1]):
            moves["after"].pop()
        for name in set(moves) - {"after"}:
            moves[name].pop()

    ran = nereusc("verify", change_document(saved, drop))
    assert ran.code == 3
    assert "elements    BROKEN" in ran.stdout and "never arrives" in ran.stdout


def test_show_refuses_what_verify_reads(nereusc, saved: Path):
    """What a schedule counts on beside the state is part of what was compiled."""
    path = change_document(saved, lambda d: d["memory"]["staging"].__setitem__(0, 10**9))
    ran = nereusc("show", path)
    assert ran.code == 4 and "the memory is not the one that its plans compile to" in ran.stderr


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (("schedule", "moves", "src"), ["0"]),
        (("schedule", "moves", "src"), None),
        (("schedule", "moves", "wave"), [0.5]),
        (("schedule", "moves", "slices"), [0]),
        (("schedule", "regions", "counts"), [-1]),
        (("schedule", "tables"), [{"model": "actor"}]),
        (("memory",), {}),
        (("lifecycle",), [{"kind": "spawn"}]),
        (("certificate",), {}),
        (("plans", "old"), {"path": "x"}),
        (("schedule", "acquire"), [[0, "actor.train"]]),
        (("schedule", "num_waves"), True),
    ],
)
def test_damaged_files(nereusc, saved: Path, entry: tuple[str, ...], value: object):
    def edit(document: dict[str, Any]) -> None:
        for key in entry[:-1]:
            document = document[key]
        document[entry[-1]] = value

    path = change_document(saved, edit)
    ran = nereusc("verify", path)
    assert (ran.code, ran.stdout) == (1, "")
    assert "error[NRS5502]" in ran.stderr and "Traceback" not in ran.stderr
    document = nereusc("verify", "--json", path).json()
    assert not document["ok"] and document["diagnostics"][0]["code"] == "NRS5502"


def test_what_is_no_saved_transition(nereusc, tmp_path: Path):
    path = tmp_path / "file"
    for content, code in ((b"", "NRS5501"), (b"\x1f\x8b\x08 not gzip", "NRS5502"), (b"[1]", "NRS5501")):
        path.write_bytes(content)
        ran = nereusc("verify", str(path))
        assert (ran.code, ran.stdout) == (1, "") and code in ran.stderr
    assert nereusc("verify", str(tmp_path / "missing")).code == 1
    assert nereusc("verify").code == 64


def test_mutated_files_never_end_in_a_bug(nereusc, saved: Path, tmp_path: Path):
    generator = random.Random(7)
    good = saved.read_bytes()
    for attempt in range(40):
        data = bytearray(good)
        reach = 12_000 if attempt % 2 else len(data)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(reach)
            match generator.randrange(3):
                case 0:
                    data[at] = ord(generator.choice('0123456789-,[]{}n"e')) if attempt % 3 else generator.randrange(256)
                case 1:
                    del data[at : at + generator.randint(1, 50)]
                case _:
                    data[at:at] = bytes(data[at : at + generator.randint(1, 50)])
        path = tmp_path / "mutated.json"
        path.write_bytes(bytes(data))
        ran = nereusc("verify", str(path))
        assert ran.code in (0, 1, 3), ran.stderr
        assert "Traceback" not in ran.stderr
