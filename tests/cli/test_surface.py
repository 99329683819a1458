"""The subcommands and options that people and scripts rely on. Changing one is a decision: then change surface.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nereus.cli.main import COMMANDS, CommandParser, Parser, build_parser
from nereus.cli.output import FORMAT_VERSION

SURFACE = Path(__file__).with_name("surface.json")


def describe(parser: argparse.ArgumentParser) -> dict[str, Any]:
    options = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        name = ", ".join(action.option_strings) or action.metavar or action.dest
        choices = None if action.choices is None else list(action.choices)
        options[name] = {"nargs": action.nargs, "choices": choices, "default": action.default}
    return options


def surface() -> dict[str, Any]:
    parser = build_parser()
    assert isinstance(parser, Parser)
    (subparsers,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    commands = {}
    for name, sub in subparsers.choices.items():
        assert isinstance(sub, CommandParser)
        sub.load()
        commands[name] = describe(sub)
    return {"format_version": FORMAT_VERSION, "options": describe(parser), "commands": commands}


def test_surface_is_frozen():
    assert surface() == json.loads(SURFACE.read_text())


def test_every_option_and_command_is_explained():
    parser = build_parser()
    (subparsers,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert list(subparsers.choices) == list(COMMANDS)
    for name, sub in subparsers.choices.items():
        sub.load()
        for action in sub._actions:
            assert action.help or not action.option_strings, f"{name} {action.option_strings}"


if __name__ == "__main__":  # python tests/cli/test_surface.py writes surface.json anew
    SURFACE.write_text(json.dumps(surface(), indent=2) + "\n")
