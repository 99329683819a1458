"""``nereusc version``: what to put into a bug report."""

from __future__ import annotations

import argparse
import platform

import nereus
from nereus.cli.exit_codes import ExitCode
from nereus.cli.options import add_json
from nereus.cli.output import FORMAT_VERSION, Output
from nereus.cli.packages import package_version

_CORE = ("lark", "networkx", "numpy", "ortools", "pyyaml", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    packages = {name: package_version(name) for name in _CORE}
    if out.json:
        content = {
            "nereus": nereus.__version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
            "packages": packages,
        }
        out.document("version", content)
        return ExitCode.OK
    out.print(f"nereusc {nereus.__version__}")
    out.print(f"  Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    out.print("  " + ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items()))
    out.print(f"  JSON documents: format_version {FORMAT_VERSION}")
    return ExitCode.OK
