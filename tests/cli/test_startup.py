"""``nereusc --help`` answers at once and loads no part of the compiler."""

from __future__ import annotations

import resource
import subprocess
import sys

#: The goal is 0.2 s; the limit leaves room for a machine that is busy with other tests.
LIMIT_CPU_S = 0.5
HEAVY = ("torch", "ortools", "numpy", "networkx", "lark", "rich", "nereus.lang", "nereus.models", "nereus.passes")


def test_help_cpu_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "nereus.cli.main", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    assert cpu_s < LIMIT_CPU_S


def loaded_by(*argv: str) -> set[str]:
    code = (
        "import sys; from nereus.cli.main import main; code = main(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True, text=True, timeout=60)
    return {name for name in HEAVY if name in done.stderr.split("\n")}


def test_help_loads_nothing_heavy():
    assert loaded_by("--help") == set()


def test_version_loads_nothing_heavy():
    assert loaded_by("version") == set()


def test_help_of_every_command_loads_no_framework():
    from nereus.cli.main import COMMANDS

    for command in COMMANDS:
        assert loaded_by(command, "--help") & {"torch", "ortools"} == set(), command
