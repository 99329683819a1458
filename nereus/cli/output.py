"""Where a subcommand writes: results to stdout, messages to stderr, colour and width decided once.

``--json`` makes stdout one document; its diagnostics are then part of it and also go to stderr as text, so that a log
shows them. Text that is piped differs from text on a terminal only in escape codes and in where paragraphs wrap.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from nereus.ir.diagnostic import Diagnostic

#: major.minor of every JSON document. A minor version adds fields; readers ignore what they do not know.
FORMAT_VERSION = "1.0"
PIPED_WIDTH = 100

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def use_color(choice: str, stream: TextIO, environ: Mapping[str, str]) -> bool:
    """In this order: ``choice`` (``--color``), NO_COLOR, FORCE_COLOR, TERM=dumb, the kind of stream."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    if environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def _width(stream: TextIO) -> int:
    return max(60, shutil.get_terminal_size().columns) if stream.isatty() else PIPED_WIDTH


class Output:
    """``mode``: ``full`` diagnostics with source lines and carets, or ``concise``, one line each."""

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        color: str = "auto",
        mode: str = "full",
        json: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        environ = os.environ if environ is None else environ
        self.color = use_color(color, self._stdout, environ)
        self._stderr_color = use_color(color, self._stderr, environ)
        self.width = _width(self._stdout)
        self.mode = mode
        self.json = json
        self._closed: set[int] = set()

    def print(self, text: str = "") -> None:
        """One result, to stdout; a newline is added."""
        self._write(self._stdout, text + "\n")

    def raw(self, text: str) -> None:
        """A result that is a file's content: to stdout as it is."""
        self._write(self._stdout, text)

    def document(self, kind: str, content: Mapping[str, Any]) -> None:
        """The one JSON document of ``--json``; keys keep their order, so equal inputs give equal bytes."""
        import json

        whole = {"format_version": FORMAT_VERSION, "kind": kind, **content}
        self._write(self._stdout, json.dumps(whole, indent=2, allow_nan=False) + "\n")

    def message(self, text: str) -> None:
        """Progress or a remark, to stderr."""
        self._write(self._stderr, text + "\n")

    def diagnostics(self, diagnostics: Iterable[Diagnostic]) -> None:
        from nereus.lang.render import render

        diagnostics = tuple(diagnostics)
        if diagnostics:
            text = render(diagnostics, color=self._stderr_color, width=_width(self._stderr), mode=self.mode)
            self._write(self._stderr, text if text.endswith("\n") else text + "\n")

    def style(self, text: str, *names: str) -> str:
        """``text`` for stdout in the given styles; unchanged where colour is off."""
        if not self.color or not names or not text:
            return text
        return f"\x1b[{';'.join(_STYLES[name] for name in names)}m{text}\x1b[0m"

    def flush(self) -> None:
        for stream in (self._stdout, self._stderr):
            self._write(stream, "")

    def _write(self, stream: TextIO, text: str) -> None:
        # A reader that left (`nereusc ... | head`) must not turn a result into a failure: the command runs on, mute.
        if id(stream) in self._closed:
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except BrokenPipeError:
            self._closed.add(id(stream))
            _silence(stream)


def _silence(stream: TextIO) -> None:
    """Let the interpreter's last flush of a broken pipe succeed."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2
) -> list[str]:
    """Lines of a table with two spaces between columns; columns in ``right`` are right-aligned. Nothing is cut off."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        parts = [row[i].rjust(width) if i in right else row[i].ljust(width) for i, width in enumerate(widths)]
        lines.append((" " * indent + "  ".join(parts)).rstrip())
    return lines


#: A space at which ``wrap`` does not break.
GLUE = "\u00a0"


def wrap(text: str, *, width: int, indent: str = "", first: str | None = None) -> str:
    """A paragraph in ``width`` columns; ``first`` starts its first line, ``indent`` the others; words stay whole."""
    import textwrap

    filled = textwrap.fill(
        text,
        width=width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(GLUE, " ")
