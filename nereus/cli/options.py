"""Options that several subcommands share, so that they are spelt and explained the same everywhere."""

from __future__ import annotations

import argparse


def add_color(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour of text; auto: on a terminal, unless NO_COLOR is set or TERM=dumb (default: auto)",
    )


def add_output_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-format",
        choices=("full", "concise"),
        default="full",
        help="messages with source lines and carets, or one line each (default: full)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
