"""``nereusc diff``: the text, the document and the exit code of the reference pairs of plans."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from nereus.ir.transition import Certificate


@pytest.fixture(autouse=True)
def plans(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = repo_root / "tests" / "plans"
    monkeypatch.chdir(folder)
    return folder


def blocks(text: str) -> dict[str, str]:
    """Text of every model-stage or label, with what goes on below it, in single spaces."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        stage = re.match(r"(?:[=>/&+\-#~] )*[=>/&+\-#~] +([a-z]+\.[a-z]+) +(.*)", line)
        if stage:
            current = found.setdefault(stage[1], [stage[2]])
        elif line[:1].isalpha():
            label, _, rest = line.partition("  ")
            current = found.setdefault(label, [rest])
        else:
            current.append(line)
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}


def block(text: str, name: str) -> str:
    return blocks(text)[name]


def test_text_of_2k_to_4k(nereusc):
    ran = nereusc("diff", "ppo-8b-2k.plan", "ppo-8b-4k.plan")
    assert ran.code == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "ppo-8b-2k.plan -> ppo-8b-4k.plan"
    assert "workload         response_len 1,024 -> 3,072" in lines
    assert "/ & actor.logprob   with actor.train" in lines
    assert "~   critic.train    micro_batch 2 -> 1, accumulation 16 -> 32, same mini_batch" in lines
    assert "= ref.infer, reward.infer, critic.infer unchanged" in lines
    assert all(len(line) <= 100 for line in lines)
    train = block(ran.stdout, "actor.train")
    assert train.startswith("dp 4 tp 2 pp 2 -> dp 4 tp 4 pp 1 16 GPUs n[0-1], order tp-cp-ep-dp-pp split 4 x")
    assert "split 4 x (tp 2 pp 2) into tp 2 pp 1; merge into 4 x (tp 4 pp 1)" in train
    assert "moves 193 GB (bound 193 GB)" in train
    assert "96.4 GB inside nodes" in train
    assert "48.2 GB into each of n[0-1] (bound 48.2 GB)" in train
    assert "32.1 GB of weight derived from the local fp32 master" in train
    assert "as listed, 289 GB would move" in train
    generate = block(ran.stdout, "actor.generate")
    assert generate.startswith("dp 8 tp 2 -> dp 4 tp 4 16 GPUs n[0-1]")
    assert "4 of 4 engines start anew" in generate
    assert "weights come with the next sync from actor.train" in generate
    stop = block(ran.stdout, "training stops")
    assert re.match(
        r"\S+ s = drain 0 s \+ engine start 35 s \+ groups 2\.1 s \+ transfer \S+ s \(bound 0\.121 s\) \+ "
        r"verify, commit 0\.9 s ",
        stop,
    )
    assert "engines start inside the stop: beside training they would need 101.2 of 72.0 GB on n0.gpu0" in stop
    assert block(ran.stdout, "memory").startswith(
        "reversible: peak 62.9 of 72.0 GB on n0.gpu0 (at engine start), bound 62.9"
    )
    assert block(ran.stdout, "safe").startswith("every element once; only held or verified bytes are read; acyclic")
    fits = block(ran.stdout, "fits at 4k")
    assert fits.startswith("actor.train 62.6 of 72.0, critic.train 70.5 of 72.0 GB")
    assert "ppo-8b-2k.plan would not: actor.train 76.6 of 72.0" in fits


def test_text_of_a_lost_node(nereusc):
    ran = nereusc("diff", "ppo-8b-4k.plan", "ppo-8b-node-lost.plan")
    assert ran.code == 0, ran.stderr
    assert "cluster          n1 is lost" in ran.stdout
    train = block(ran.stdout, "actor.train")
    assert "16 -> 8 GPUs n[0-1] -> n0" in train
    assert "reshape: zero 0 -> 1, 1 -> 2 shards of each replica's state; destroy 2 x (tp 4 pp 1) lost with n1" in train
    assert "no byte moves" in train
    assert "all 2 engines run on" in block(ran.stdout, "actor.generate")
    assert "n1" not in block(ran.stdout, "memory")
    # The workload is the same, so nothing is said about the old layout.
    assert "would" not in block(ran.stdout, "fits at 4k")


def test_text_of_an_overlapping_change(nereusc):
    ran = nereusc("diff", "overlap-before.plan", "overlap-after.plan")
    assert ran.code == 0, ran.stderr
    assert "2 of 2 engines start anew, 2 of them while training goes on" in block(ran.stdout, "actor.generate")
    critic = block(ran.stdout, "critic.train")
    assert critic.startswith("dp 2 tp 1 pp 4 8 GPUs n1 -> n3, order tp-cp-ep-dp-pp destroy 2 x")
    assert "destroy 2 x (tp 1 pp 4) released on n1; extend to 2 x (tp 1 pp 4) on n3" in critic
    stop = block(ran.stdout, "training stops")
    assert "engine start" not in stop.split("before the stop")[0]
    assert "before the stop, while training goes on: engine start 35 s, spawn 15 s" in stop
    assert "overlap-before.plan would fit too" in block(ran.stdout, "fits at 4k")


def test_a_drain_is_explained(nereusc, tmp_path: Path):
    for name in ("overlap-before.plan", "overlap-after.plan"):
        (tmp_path / name).write_text(Path(name).read_text().replace("  partial = true", ""))
    ran = nereusc("diff", str(tmp_path / "overlap-before.plan"), str(tmp_path / "overlap-after.plan"))
    assert ran.code == 0, ran.stderr
    stop = block(ran.stdout, "training stops")
    assert re.search(r"= drain [1-9]", stop)
    assert "drain: responses in flight where engines change are finished first" in stop


def test_text_of_a_tight_swap(nereusc):
    ran = nereusc("diff", "swap-full.plan", "swap-full-new.plan")
    assert ran.code == 0, ran.stderr
    memory = block(ran.stdout, "memory")
    assert memory.startswith("tight: peak ")
    assert re.search(r"the old plan cannot stay whole: that needs 5\d\.\d of 43\.2 GB", memory)
    assert "no way back after the first release" in memory
    document = nereusc("diff", "--json", "swap-full.plan", "swap-full-new.plan").json()
    certificate = document["certificate"]
    assert certificate["mode"] == "tight"
    assert certificate["point_of_no_return"]
    assert max(entry["peak_bytes"] for entry in document["memory"]) == certificate["peak_bytes_max"]


def test_sole_copies_on_a_lost_node_are_named(nereusc):
    ran = nereusc("diff", "ppo-8b-zero1.plan", "ppo-8b-zero1-lost.plan")
    assert (ran.code, ran.stdout) == (3, "")
    assert ran.stderr.count("error[NRS5001]") == 2
    for word in ("actor.train", "critic.train", "master", "exp_avg", "n1.gpu0", "n1.host", "ckpt/ppo-8b"):
        assert word in ran.stderr
    document = nereusc("diff", "--json", "ppo-8b-zero1.plan", "ppo-8b-zero1-lost.plan").json()
    assert (document["ok"], document["certificate"], document["different"]) == (False, None, None)
    assert [d["code"] for d in document["diagnostics"]][:2] == ["NRS5001", "NRS5001"]


def test_equal_plans(nereusc):
    ran = nereusc("diff", "ppo-8b-4k.plan", "ppo-8b-4k.plan", "--detailed-exitcode")
    assert (ran.code, ran.stdout) == (0, "no differences\n")
    document = nereusc("diff", "--json", "ppo-8b-4k.plan", "ppo-8b-4k.plan").json()
    assert document["different"] is False
    assert document["certificate"]["mode"] == "none"
    assert document["certificate"]["downtime_s"] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ppo-8b-2k", "ppo-8b-4k"),
        ("ppo-8b-4k", "ppo-8b-node-lost"),
        ("ppo-8b-4k", "ppo-8b-zero1"),
        ("overlap-before", "overlap-after"),
        ("swap-full", "swap-full-new"),
        pytest.param("ppo-8b-512", "ppo-8b-1024", marks=pytest.mark.slow),
    ],
)
def test_document(nereusc, old: str, new: str):
    ran = nereusc("diff", "--json", "--detailed-exitcode", f"{old}.plan", f"{new}.plan")
    assert ran.code == 2, ran.stderr
    document = ran.json()
    certificate = document["certificate"]
    assert list(certificate) == [f.name for f in fields(Certificate)]
    assert certificate["safe"] is True
    assert certificate["checks"]
    assert all(check["holds"] for check in certificate["checks"])
    assert certificate["mode"] == ("tight" if old == "swap-full" else "reversible")
    assert document["ok"] is document["different"] is True
    # What the stages move, keep, derive and copy is what the whole does.
    states = [stage["state"] for stage in document["stages"] if stage["state"] is not None]
    for name in ("moved_bytes", "kept_bytes", "derived_bytes", "local_bytes"):
        assert sum(state[name] for state in states) == certificate[name], name
    # Slivers that could be derived are fetched: the bound of the whole knows, a stage's is for what it demands.
    demanded = sum(state["bound_moved_bytes"] for state in states)
    assert demanded * 31 / 32 <= certificate["bound_moved_bytes"] <= demanded
    links: dict[str, int] = {}
    for state in states:
        assert sum(state["bytes_by_link"].values()) == state["moved_bytes"] >= state["bound_moved_bytes"]
        assert state["untouched_bytes"] <= state["kept_bytes"] + state["local_bytes"] + state["derived_bytes"]
        if state["bound_node_in_bytes_max"] is not None:
            assert max(state["node_in_bytes"].values(), default=0) >= state["bound_node_in_bytes_max"]
        for link, num_bytes in state["bytes_by_link"].items():
            links[link] = links.get(link, 0) + num_bytes
    assert links == {link: n for link, n in certificate["bytes_by_link"].items() if n}
    assert all(entry["peak_bytes"] <= entry["capacity_bytes"] for entry in document["memory"])
    assert max(entry["peak_bytes"] for entry in document["memory"] if entry["devices"]) == certificate["peak_bytes_max"]
    assert all(row["fits"] for row in document["fits"]["training"])


def test_detail_names_the_whole_certificate(nereusc):
    text = nereusc("diff", "--detail", "ppo-8b-2k.plan", "ppo-8b-4k.plan").stdout
    document = nereusc("diff", "--json", "ppo-8b-2k.plan", "ppo-8b-4k.plan").json()
    rows = dict(line.split(None, 1) for line in text.split("\ncertificate\n")[1].splitlines())
    assert list(rows) == [name for name in document["certificate"] if name != "checks"]
    assert rows["safe"] == "true"
    assert rows["moved_bytes"].split()[0].replace(",", "") == str(document["certificate"]["moved_bytes"])
    for check in document["certificate"]["checks"]:
        assert f"{check['name']}: " in text


def test_same_input_same_bytes(spawned, plans: Path):
    argv = ["diff", "overlap-before.plan", "overlap-after.plan"]
    first, second = (spawned(argv, cwd=plans, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert first.code == 0
    assert first == second
    documents = [json.loads(spawned([*argv, "--json"], cwd=plans, env={"PYTHONHASHSEED": s}).stdout) for s in "12"]
    for document in documents:
        assert document["certificate"].pop("compile_s") > 0
    assert documents[0] == documents[1]


def test_mistakes_of_both_plans_are_reported_at_once(nereusc, tmp_path: Path):
    for name, word in (("a.plan", "llama-3.1-9b"), ("b.plan", "h100-sxm-81gb")):
        (tmp_path / name).write_text(
            Path("swap-full.plan").read_text().replace("qwen2.5-7b" if name == "a.plan" else "l40s-48gb", word)
        )
    ran = nereusc("diff", str(tmp_path / "a.plan"), str(tmp_path / "b.plan"))
    assert (ran.code, ran.stdout) == (1, "")
    assert "llama-3.1-9b" in ran.stderr
    assert "h100-sxm-81gb" in ran.stderr
    document = nereusc("diff", "--json", str(tmp_path / "a.plan"), str(tmp_path / "b.plan"))
    assert document.code == 1
    assert {d["severity"] for d in document.json()["diagnostics"]} >= {"error"}


def test_a_new_plan_that_does_not_fit_is_infeasible(nereusc):
    ran = nereusc("diff", "ppo-8b-2k.plan", "ppo-8b-4k-refused.plan")
    assert (ran.code, ran.stdout) == (3, "")
    assert "NRS4001" in ran.stderr


def test_missing_file(nereusc):
    ran = nereusc("diff", "ppo-8b-2k.plan", "no-such.plan")
    assert ran.code == 1
    assert "no-such.plan" in ran.stderr


def test_one_side_from_stdin(spawned, plans: Path):
    text = (plans / "swap-full.plan").read_bytes()
    ran = spawned(["diff", "-", "swap-full-new.plan"], stdin=text, cwd=plans)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith("<stdin> -> swap-full-new.plan\n")
    assert spawned(["diff", "-", "-"], stdin=text, cwd=plans).code == 64


def test_destroyed_state_needs_leave(nereusc, tmp_path: Path):
    new = tmp_path / "new.plan"
    new.write_text(f'extends "{Path("swap-full.plan").resolve()}"\nremove stage critic.train\n')
    ran = nereusc("diff", "swap-full.plan", str(new))
    assert ran.code == 3
    assert "NRS5007" in ran.stderr
    ran = nereusc("diff", "swap-full.plan", str(new), "--allow-destroy")
    assert ran.code == 0, ran.stderr
    assert "destroyed for good: weight, master, exp_avg, exp_avg_sq" in block(ran.stdout, "critic.train")


def test_only_the_workload_changes(nereusc, tmp_path: Path):
    new = tmp_path / "new.plan"
    new.write_text(f'extends "{Path("swap-full.plan").resolve()}"\nworkload {{ response_len = 256 }}\n')
    ran = nereusc("diff", "swap-full.plan", str(new), "--detailed-exitcode")
    assert ran.code == 2, ran.stderr
    assert "response_len 512 -> 256" in ran.stdout
    assert "0 s: nothing moves, starts or ends" in ran.stdout
    assert "= actor.train, critic.train unchanged" in ran.stdout


def test_modes(nereusc):
    pair = ("swap-full.plan", "swap-full-new.plan")
    refused = nereusc("diff", *pair, "--mode", "reversible")
    assert refused.code == 3
    assert "NRS5003" in refused.stderr
    ran = nereusc("diff", "--json", "ppo-8b-2k.plan", "ppo-8b-4k.plan", "--mode", "tight")
    document = ran.json()
    assert document["certificate"]["mode"] == "tight"
    assert document["pipeline"].endswith("schedule{mode=tight},emit,check")
    text = nereusc("diff", "ppo-8b-2k.plan", "ppo-8b-4k.plan", "--mode", "tight").stdout
    assert "the old plan could stay whole; tight mode was asked for" in re.sub(r"\s+", " ", text)


def test_horizon_reaches_placement(nereusc):
    document = nereusc("diff", "--json", "ppo-8b-2k.plan", "ppo-8b-4k.plan", "--horizon", "7").json()
    assert "place{horizon_steps=7}" in document["pipeline"]
    again = nereusc(
        "diff", "--json", "ppo-8b-2k.plan", "ppo-8b-4k.plan", "--pass-pipeline", document["pipeline"]
    ).json()
    for each in (document, again):
        del each["certificate"]["compile_s"]
    assert again == document


@pytest.mark.parametrize(
    "options",
    [
        ("--horizon", "0"),
        ("--horizon", "many"),
        ("--mode", "loose"),
        ("--pass-pipeline", "diff,hold"),
        ("--pass-pipeline", "place{steps=3}"),
        ("--print-ir-after", "magic"),
    ],
)
def test_wrong_options(nereusc, options):
    ran = nereusc("diff", "swap-full.plan", "swap-full-new.plan", *options)
    assert (ran.code, ran.stdout) == (64, "")
    assert options[0] in ran.stderr


def test_every_pass_can_be_printed(nereusc):
    from nereus.passes.manager import PASSES

    plain = nereusc("diff", "ppo-8b-2k.plan", "ppo-8b-4k.plan")
    ran = nereusc("diff", "ppo-8b-2k.plan", "ppo-8b-4k.plan", "--print-ir-after", "all")
    assert ran.stdout == plain.stdout
    sections = re.findall(r"^// after (\S+)$", ran.stderr, flags=re.MULTILINE)
    assert set(sections) == set(PASSES)
    assert len(sections) == len(PASSES)
    assert "actor.train: dp 4 tp 2 pp 2" in ran.stderr
    assert len(ran.stderr) < 40_000
    one = nereusc("diff", "ppo-8b-2k.plan", "ppo-8b-4k.plan", "--print-ir-after", "route")
    assert re.findall(r"^// after (\S+)$", one.stderr, flags=re.MULTILINE) == ["route"]
    assert re.search(r"inter-node: [\d,]+ moves, 96\.4 GB", one.stderr)


def test_times_of_passes(nereusc):
    ran = nereusc("diff", "--json", "--time-passes", "ppo-8b-2k.plan", "ppo-8b-4k.plan")
    names = [timing["pass"] for timing in ran.json()["timings"]]
    assert names[:3] == ["hold", "place", "lower"]
    assert re.search(r"^place +\d+\.\d{3}$", ran.stderr, flags=re.MULTILINE)
    assert "timings" not in nereusc("diff", "--json", "ppo-8b-2k.plan", "ppo-8b-4k.plan").json()


def test_colour_changes_escape_codes_only(nereusc):
    plain = nereusc("diff", "overlap-before.plan", "overlap-after.plan", "--color", "never").stdout
    coloured = nereusc("diff", "overlap-before.plan", "overlap-after.plan", "--color", "always").stdout
    assert "\x1b[32m+" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_passes(nereusc):
    from nereus.passes.manager import PASSES, Pipeline, parse_pipeline

    document = nereusc("passes", "--json").json()
    assert [entry["name"] for entry in document["passes"]] == list(PASSES)
    assert parse_pipeline(document["pipeline"]) == Pipeline()
    options = {entry["name"]: {o["name"]: o["default"] for o in entry["options"]} for entry in document["passes"]}
    assert options["place"]["horizon_steps"] == 100
    assert options["schedule"]["mode"] == "auto"
    # Every option reads back as the pipeline's text writes it.
    for name, values in options.items():
        for option, default in values.items():
            value = "tight" if option == "mode" else default + 1
            text = document["pipeline"].replace(name, f"{name}{{{option}={value}}}")
            assert str(parse_pipeline(text)) == text
    text = nereusc("passes").stdout
    assert document["pipeline"] in text
    assert "horizon_steps = 100" in text


def test_coarse_is_an_estimate_and_says_so(nereusc):
    ran = nereusc("diff", "--coarse", "ppo-8b-2k.plan", "ppo-8b-4k.plan")
    assert ran.code == 0, ran.stderr
    assert ran.stdout.splitlines()[1].startswith("estimate, for the placement as listed: nothing was compiled")
    found = json.loads(nereusc("diff", "--coarse", "--json", "ppo-8b-2k.plan", "ppo-8b-4k.plan").stdout)
    assert found["kind"] == "coarse" and found["ok"]
    assert found["estimate"]["moved_bytes"] > 100e9


def test_coarse_takes_no_option_of_a_compilation(nereusc):
    ran = nereusc("diff", "--coarse", "--detail", "ppo-8b-2k.plan", "ppo-8b-4k.plan")
    assert ran.code == 64
    assert "--coarse compiles nothing" in ran.stderr
