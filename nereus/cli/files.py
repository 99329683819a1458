"""Reading and writing the user's files; failures are one plain sentence."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

from nereus.cli.errors import CommandError
from nereus.lang.files import read_file

STDIN = "-"
STDIN_NAME = "<stdin>"


def read_text(path: str) -> str:
    """Text of ``path`` (``-``: standard input). CommandError if it cannot be read or is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if path == STDIN else read_file(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot read {display_name(path)}: {reason}") from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise CommandError(f"cannot read {display_name(path)}: not UTF-8 text (byte {error.start})") from None


def write_text(path: str, text: str) -> None:
    """``write_bytes`` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str, data: bytes) -> None:
    """Replace ``path`` as a whole, keeping its mode; a crash leaves the old file. CommandError if that fails."""
    target = os.path.realpath(path)
    temporary = ""
    try:
        if os.path.exists(target) and not os.path.isfile(target):  # a device, or a folder, which then fails
            with open(target, "wb") as file:
                file.write(data)
            return
        handle, temporary = tempfile.mkstemp(prefix=".nereusc-", dir=os.path.dirname(target))
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        else:
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    finally:  # also after an interrupt
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def keep_inputs(output: str, inputs: Sequence[str]) -> None:
    """CommandError where writing ``output`` would replace a file that the command reads."""
    for path in inputs:
        if path != STDIN and os.path.realpath(path) == os.path.realpath(output):
            raise CommandError(f"{output} is read by this command: write to another file")


def display_name(path: str) -> str:
    return STDIN_NAME if path == STDIN else path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
