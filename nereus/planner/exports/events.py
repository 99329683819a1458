"""Scalars of TensorBoard's event files, by TensorBoard's own loader (``pip install '.[tensorboard]'``)."""

from __future__ import annotations

from pathlib import Path

from nereus.planner.exports.tables import NotRead, Steps, number_of


def event_files(path: Path) -> list[Path]:
    """``path`` itself, or all below it, oldest first (their names have the time)."""
    return sorted(path.rglob("*tfevents*")) if path.is_dir() else [path]


def read_events(path: Path) -> Steps:
    """Up to where the file is cut or damaged, as one that is still written is. Raises NotRead, or OSError."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise NotRead("event files need TensorBoard: pip install '.[tensorboard]'") from None
    path.stat()  # whose error says more than the loader's
    found: Steps = {}
    try:
        # The loader makes tensors of all scalars, however they were written.
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                # A scalar is one number; texts and histograms are none.
                array = make_ndarray(value.tensor) if value.HasField("tensor") else None
                number = number_of(array.item()) if array is not None and array.size == 1 else None
                if number is not None:
                    found.setdefault(event.step, {})[value.tag] = number
    except (DecodeError, TypeError, ValueError) as error:
        raise NotRead(f"it is no event file, or a damaged one: {error}") from None
    return found
