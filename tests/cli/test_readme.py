"""What the README shows is true: its two plans check, and the variant differs from its base."""

from __future__ import annotations

import re
from pathlib import Path


def blocks(text: str) -> list[str]:
    """Indented code blocks of a Markdown text, without their indent."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, flags=re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip("\n") + "\n" for block in found]


def test_the_plans_of_the_readme(nereusc, repo_root: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = blocks((repo_root / "README.md").read_text())
    (before,) = [text for text in texts if text.startswith("cluster {")]
    (after,) = [text for text in texts if text.startswith("extends ")]
    Path("before.plan").write_text(before)
    Path("after.plan").write_text(after)
    ran = nereusc("check", "--json", "before.plan", "after.plan")
    assert ran.code == 0, ran.stderr
    degrees = []
    for file in ran.json()["files"]:
        (train,) = [stage for stage in file["plan"]["stages"] if stage["name"] == "actor.train"]
        degrees.append((train["dp"], train["tp"], train["pp"]))
    assert degrees == [(4, 2, 2), (4, 4, 1)]


def test_the_commands_of_the_readme_exist(repo_root: Path):
    from nereus.cli.main import COMMANDS

    makefile = (repo_root / "Makefile").read_text()
    for text in blocks((repo_root / "README.md").read_text()):
        for line in text.splitlines():
            if target := re.match(r"make ([a-z-]+)", line):
                assert re.search(rf"^{target[1]}:", makefile, flags=re.MULTILINE), line
            if command := re.match(r"nereusc ([a-z]+)", line):
                assert command[1] in COMMANDS, line
