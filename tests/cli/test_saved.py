"""``nereusc compile`` and ``show``: what was saved is what is shown, or it is refused."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from cli_support import SAVED_PAIR, change_document, check_schema

pytestmark = pytest.mark.usefixtures("in_plans")


@pytest.mark.parametrize(
    "pair", [SAVED_PAIR, ("ppo-8b-2k.plan", "ppo-8b-4k.plan"), ("swap-full.plan", "swap-full-new.plan")]
)
@pytest.mark.parametrize("name", ["change.json", "change.json.gz"])
def test_show_says_what_diff_says(nereusc, tmp_path: Path, pair, name: str):
    path = tmp_path / name
    text = nereusc("diff", *pair).stdout
    ran = nereusc("compile", *pair, "-o", str(path))
    assert (ran.code, ran.stdout) == (0, text)
    assert str(path) in ran.stderr
    data = path.read_bytes()
    assert data.startswith(b"\x1f\x8b") == name.endswith(".gz")
    check_schema(json.loads(gzip.decompress(data) if name.endswith(".gz") else data), "transition")
    shown = nereusc("show", str(path))
    assert (shown.code, shown.stdout) == (0, text), shown.stderr
    diff, show = nereusc("diff", "--json", *pair).json(), nereusc("show", "--json", str(path)).json()
    for document in (diff, show):
        del document["certificate"]["compile_s"], document["diagnostics"]
    assert show.pop("file") == str(path)
    assert diff.pop("file") is None
    assert show == diff


def test_same_input_same_file(nereusc, saved: Path, tmp_path: Path):
    for name in ("again.json.gz", "third.json.gz"):
        assert nereusc("compile", *SAVED_PAIR, "-o", str(tmp_path / name)).code == 0
    assert gzip.decompress((tmp_path / "again.json.gz").read_bytes()) == saved.read_bytes()
    assert (tmp_path / "again.json.gz").read_bytes() == (tmp_path / "third.json.gz").read_bytes()


def test_options_are_saved(nereusc, tmp_path: Path):
    path = str(tmp_path / "tight.json")
    assert nereusc("compile", *SAVED_PAIR, "-o", path, "--mode", "tight", "--detailed-exitcode").code == 2
    shown = nereusc("show", path)
    assert shown.code == 0, shown.stderr
    assert "tight: peak" in shown.stdout


def test_the_schedule_is_whole(saved: Path):
    """Moves of the file carry the bytes of the certificate, wave by wave, to devices that exist."""
    document = json.loads(saved.read_text())
    schedule = document["schedule"]
    moves, regions = schedule["moves"], schedule["regions"]
    count = len(moves["src"])
    assert all(len(moves[name]) == count for name in ("dst", "table", "region", "bytes", "wave", "link", "slots"))
    assert sum(regions["counts"]) == len(regions["cell"]) == len(regions["start"]) == len(regions["stop"])
    local = schedule["links"].index("local")
    moved = sum(n for n, link in zip(moves["bytes"], moves["link"], strict=True) if link != local)
    assert moved == document["certificate"]["moved_bytes"]
    numel, at = [], 0
    for length in regions["counts"]:
        numel.append(sum(regions["stop"][at : at + length]) - sum(regions["start"][at : at + length]))
        at += length
    for move in range(count):
        table = schedule["tables"][moves["table"][move]]
        assert moves["slots"][move] == -1
        assert numel[moves["region"][move]] * sum(table["slot_bytes"]) == moves["bytes"][move]
    last = [wave + slices for wave, slices in zip(moves["wave"], moves["slices"], strict=True)]
    assert max(last) == schedule["num_waves"]
    assert max(*moves["src"], *moves["dst"]) < 2 * len(schedule["devices"])


def set_in(document: dict[str, Any], keys: str, value: object) -> None:
    *parents, last = keys.split(".")
    for key in parents:
        document = document[key]
    document[last] = value


@pytest.mark.parametrize(
    ("keys", "value", "code", "exit_code"),
    [
        ("digest", "0" * 64, "NRS5511", 4),
        ("certificate.downtime_s", 0.5, "NRS5511", 4),
        ("schedule.moves.wave", [], "NRS5511", 4),
        ("fingerprints.cluster", "0" * 64, "NRS5511", 4),
        ("fingerprints.models", "0" * 64, "NRS5511", 4),
        ("fingerprints.old_plan", "0" * 64, "NRS5510", 4),
        ("plans.new.text", "cluster { }\n", "NRS5510", 4),
        ("pipeline", "hold,magic", "NRS5511", 4),
        ("pipeline", "hold,place,lower,diff,lifecycle,route,memory,schedule{mode=tight},emit,check", "NRS5511", 4),
        ("format_version", "2.0", "NRS5503", 1),
        ("kind", "diff", "NRS5501", 1),
        ("plans", None, "NRS5502", 1),
        ("choices", [{"stage": "actor.train"}], "NRS5502", 1),
        ("options.allow_destroy", "yes", "NRS5502", 1),
    ],
)
def test_what_does_not_hold_is_refused(nereusc, saved: Path, keys: str, value: object, code: str, exit_code: int):
    path = change_document(saved, lambda document: set_in(document, keys, value))
    ran = nereusc("show", path)
    assert (ran.code, ran.stdout) == (exit_code, ""), ran.stderr
    assert f"error[{code}]" in ran.stderr
    document = nereusc("show", "--json", path).json()
    assert document["ok"] is False
    assert document["certificate"] is None
    assert code in [d["code"] for d in document["diagnostics"]]


def test_no_reason_of_a_placement_can_be_edited(nereusc, saved: Path):
    good = json.loads(saved.read_text())
    values = {name: value for name, value in good["choices"][0].items() if name != "stage"}
    assert {"chosen", "exact", "listed_moved_bytes", "best_moved_bytes", "transfer_s", "step_s"} <= set(values)
    for name, value in values.items():
        match value:
            case str():
                other: object = "nodes" if value != "nodes" else "bytes"
            case bool():
                other = not value
            case list():
                other = value[1:] if value else [1]
            case _:
                other = value + 1
        saved.write_text(json.dumps(good))
        ran = nereusc("show", change_document(saved, lambda d, n=name, o=other: set_in(d["choices"][0], n, o)))  # type: ignore[misc]
        assert ran.stdout == "" and ran.code in (1, 4), name
        assert "NRS5511" in ran.stderr or "NRS5502" in ran.stderr, name
    saved.write_text(json.dumps(good))
    assert nereusc("show", str(saved)).code == 0


def test_both_digests_are_shown(nereusc, saved: Path):
    digest = json.loads(saved.read_text())["digest"]
    path = change_document(saved, lambda document: set_in(document, "digest", "ab" * 32))
    ran = nereusc("show", path)
    assert ran.code == 4
    assert "ab" * 32 in ran.stderr
    assert digest in ran.stderr


def test_a_later_minor_version_is_read(nereusc, saved: Path):
    path = change_document(saved, lambda document: document.update({"format_version": "1.9", "novelty": 1}))
    assert nereusc("show", path).code == 0


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "NRS5501"),
        (b"\x00\xff\xfe", "NRS5501"),
        (b"[1, 2]", "NRS5501"),
        (b"[" * 100_000, "NRS5501"),
        (b'{"format_version": "1.0", "kind": "transition", ', "NRS5502"),
        (b"\x1f\x8b\x08 not gzip", "NRS5502"),
    ],
)
def test_what_is_no_saved_transition(nereusc, tmp_path: Path, content: bytes, code: str):
    path = tmp_path / "file"
    path.write_bytes(content)
    ran = nereusc("show", str(path))
    assert (ran.code, ran.stdout) == (1, ""), ran.stderr
    assert f"error[{code}]" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_files_that_cannot_be_read_or_written(nereusc, tmp_path: Path):
    assert nereusc("show", str(tmp_path / "missing")).code == 1
    assert nereusc("show", str(tmp_path)).code == 1
    assert nereusc("show", "nul\x00byte").code == 1
    ran = nereusc("compile", *SAVED_PAIR, "-o", str(tmp_path / "no" / "such" / "folder.json"))
    assert (ran.code, ran.stdout) == (1, "")
    assert nereusc("compile", *SAVED_PAIR).code == 64


def test_nothing_is_written_where_there_is_no_transition(nereusc, tmp_path: Path):
    path = tmp_path / "change.json"
    ran = nereusc("compile", "ppo-8b-zero1.plan", "ppo-8b-zero1-lost.plan", "-o", str(path))
    assert ran.code == 3
    assert not path.exists()


def test_mutated_files_never_end_in_a_bug(nereusc, saved: Path, tmp_path: Path):
    """Random damage of the head, where names and options stand, and of the whole."""
    generator = random.Random(5)
    good = saved.read_bytes()
    for attempt in range(40):
        data = bytearray(good)
        reach = 12_000 if attempt % 2 else len(data)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(reach)
            match generator.randrange(3):
                case 0:
                    data[at] = generator.randrange(256)
                case 1:
                    del data[at : at + generator.randint(1, 50)]
                case _:
                    data[at:at] = bytes(data[at : at + generator.randint(1, 50)])
        path = tmp_path / "mutated.json"
        path.write_bytes(bytes(data))
        ran = nereusc("show", str(path))
        assert ran.code in (0, 1, 4), ran.stderr
        assert "Traceback" not in ran.stderr
