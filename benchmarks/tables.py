"""What the suite measured as text, as a summary and as a section of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from measure import BaselineRow, Refused, Row

from nereus.sim.baselines import BASELINES

#: (what, value, goal of every transition, goal of the median).
RATIOS: tuple[tuple[str, Callable[[Row], float], float, float | None], ...] = (
    ("transfer / bound", lambda row: row.transfer_ratio, 1.10, 1.03),
    ("bytes / bound", lambda row: row.bytes_ratio, 1.00, None),
    ("busiest NIC / flow programme", lambda row: row.nic_ratio, 1.05, None),
    ("peak / bound of its mode", lambda row: row.peak_ratio, 1.00, None),
)
#: Seconds that the Nereus paper measured on such hardware: its own, Oobleck's, Tenplex's, UCP's or MCP's (a range where
#: it gives one). Which layouts it used is not said.
PUBLISHED: tuple[tuple[str, str, str, str, str], ...] = tuple(
    (name, *figures)
    for names, figures in (
        (("double-8b-4-to-8-replica", "double-8b-split-4-to-8"), ("2.45", "10.5", "39.7", "696")),
        (("double-8b-8-to-16-replica", "double-8b-split-8-to-16"), ("5.58", "21.5", "51.7", "799")),
        (("double-8b-16-to-32-replica", "double-8b-split-16-to-32"), ("6.52", "39.1", "66.4", "837")),
        (("double-8b-32-to-64-replica", "double-8b-split-32-to-64"), ("8.48", "83.7", "89.9", "981")),
        (
            (
                "reshard-8b-8-tp4pp2-tp2pp4-replica",
                "reshard-8b-16-tp4pp2-tp8pp1-replica",
                "reshard-8b-64-tp4pp4-tp8pp1-replica",
            ),
            ("15.7-16.1", "-", "62.7-65.0", "330-487"),
        ),
    )
    for name in names
)
BEGIN, END = "<!-- suite: begin -->", "<!-- suite: end -->"
#: What a ratio may exceed its goal by and still count as reached: rounding of bytes to slices.
SLACK = 1e-6


def summary(rows: Sequence[Row]) -> dict[str, object]:
    found: dict[str, object] = {}
    for what, value, goal, median_goal in RATIOS:
        values = [value(row) for row in rows]
        if values:
            found[what] = {
                "median": statistics.median(values),
                "max": max(values),
                "goal": goal,
                "median_goal": median_goal,
                "over_goal": sum(v > goal + SLACK for v in values),
            }
    found["baselines"] = {b.name: _against(rows, b.name) for b in BASELINES}
    return found


def _against(rows: Sequence[Row], name: str) -> dict[str, object]:
    pairs = [(row, row.baselines[name]) for row in rows if name in row.baselines]
    does = [(row, other) for row, other in pairs if other.cannot is None]
    does_it = [(row, other) for row, other in does if other.altered is None]
    done = [(row, other) for row, other in does_it if other.fails is None]
    factors = {
        "stop": [other.stop_s / row.stop_s for row, other in done if other.stop_s is not None and row.stop_s > 0],
        "transfer": [
            other.transfer_s / row.transfer_s
            for row, other in done
            if other.transfer_s is not None and row.transfer_s > 1e-4
        ],
        "bytes": [
            other.moved_bytes / row.moved_bytes for row, other in does_it if other.moved_bytes and row.moved_bytes
        ],
        "peak": [
            other.peak_bytes / row.transfer_peak_bytes
            for row, other in does_it
            if other.peak_bytes and row.transfer_peak_bytes
        ],
    }
    return {
        "transitions": len(pairs),
        "altered": sum(other.altered is not None for _, other in does),
        "cannot": sum(other.cannot is not None for _, other in pairs),
        "fails": sum(other.fails is not None for _, other in does),
        "overflows": sum(other.overflows for _, other in does),
        **{
            key: {"median": statistics.median(values), "max": max(values)} if values else None
            for key, values in factors.items()
        },
    }


# -- text --------------------------------------------------------------------------------------------------------------

_COLUMNS = ("transition", "GPUs", "mode", "transfer s", "/ bound", "bytes /", "NIC /", "peak /", "stop s", "compile s")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        str(row.num_gpus),
        row.mode,
        f"{row.transfer_s:.4g}",
        f"{row.transfer_ratio:.3f}",
        f"{row.bytes_ratio:.3f}",
        f"{row.nic_ratio:.3f}",
        f"{row.peak_ratio:.3f}",
        f"{row.stop_s:.1f}",
        f"{row.compile_cpu_s:.2f}",
    )


def _baseline_cell(row: Row, other: BaselineRow) -> str:
    """``stop s; bytes x; peak x``; ``!``: memory does not hold it, ``~``: only ports added up, ``*``: altered."""
    if other.cannot is not None:
        return "cannot"
    stop = "never" if other.stop_s is None else f"{'' if other.simulated else '~'}{other.stop_s:.1f}"
    if other.fails is not None:
        stop = f"fails ({stop})" if other.stop_s is not None else "fails"
    moved = _factor(other.moved_bytes, row.moved_bytes)
    peak = _factor(other.peak_bytes, row.transfer_peak_bytes)
    return f"{stop}; {moved}; {peak}{'!' if other.overflows else ''}{'*' if other.altered else ''}"


def _factor(theirs: int | None, ours: int) -> str:
    if not theirs:
        return "0 B"
    return f"{theirs / ours:.2f}x" if ours else f"{theirs / 1e9:.3g} GB : 0"


def render_text(rows: Sequence[Row], refused: Sequence[Refused]) -> str:
    lines = _aligned([_COLUMNS, *(_cells(row) for row in rows)])
    lines += ["", *_summary_lines(rows)]
    for entry in refused:
        lines.append(f"refused: {entry.name}: {entry.reason}")
    return "\n".join(lines)


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i in (0, 2) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]


def _summary_lines(rows: Sequence[Row]) -> list[str]:
    lines = []
    for what, value, goal, median_goal in RATIOS:
        values = [value(row) for row in rows]
        if values:
            wanted = f"goal {goal:.2f}" + (f", median {median_goal:.2f}" if median_goal else "")
            over = sum(v > goal + SLACK for v in values)
            lines.append(
                f"{what}: median {statistics.median(values):.3f}, max {max(values):.3f} ({wanted}; {over} over)"
            )
    return lines


# -- document ----------------------------------------------------------------------------------------------------------


def document(rows: Sequence[Row], refused: Sequence[Refused]) -> str:
    parts = [
        f"{len(rows) + len(refused)} transitions; regenerate with `python benchmarks/suite.py --full --write`.",
        "",
        *(f"* {line}" for line in _summary_lines(rows)),
        "",
        "Bound: the flow programme over all ports for the chosen placement, and a message. NIC: seconds of the busiest "
        "NIC over that programme (below 1 where something else limits). Peak: fullest memory space over the bound of "
        "the mode. Stop: simulated, with set-up priors. Compile: CPU seconds, one core.",
        "",
        *_markdown(_COLUMNS, [_cells(row) for row in rows]),
        "",
        *_published(rows),
        "### Against baselines",
        "",
        "Each cell: simulated stop in seconds; bytes and peak of the fullest GPU during the transfer as multiples of "
        "ours. `cannot`: the system does not do such a change. `fails`: it starts and does not get through, or finds "
        "no order. `!`: some memory may not hold it. `~`: too large to simulate, only the busiest port's load. `*`: "
        "made with optimizer state that is not sharded, not counted in the medians below. Every system is charged our "
        "priors for engines, processes and groups unless it restarts by its own rules; what each does is in "
        "`nereus/sim/baselines/`. Ours builds groups beside the transfer, the others are charged for them before it, "
        "as they do: compare transfers where only routing counts.",
        "",
        *_markdown(
            ("transition", "Nereus", *(f"{b.name} ({b.system})" for b in BASELINES)),
            [
                (row.name, f"{row.stop_s:.1f}", *(_baseline_cell(row, row.baselines[b.name]) for b in BASELINES))
                for row in rows
            ],
        ),
        "",
        "Over the transitions that a baseline does: medians, largest in brackets; no transfer where it restarts.",
        "",
        *_markdown(
            ("baseline", "cannot", "altered", "fails", "memory over", "stop x", "transfer x", "bytes x", "peak x"),
            [_against_cells(rows, b.name) for b in BASELINES],
        ),
    ]
    if refused:
        parts += ["", "Refused by the compiler:", ""]
        parts += [f"* {entry.name}: {entry.reason}" for entry in refused]
    return "\n".join(parts)


def _published(rows: Sequence[Row]) -> list[str]:
    by_name = {row.name: row for row in rows}
    known = [entry for entry in PUBLISHED if entry[0] in by_name]
    if not known:
        return []
    head = ("transition", "Nereus", "paper", "Oobleck", "Tenplex", "UCP or MCP", "our primitives, Tenplex, storage")
    lines = []
    for name, *figures in known:
        row = by_name[name]
        ours = [row.baselines[b].stop_s for b in ("primitives", "first replica", "via storage")]
        modelled = ", ".join("-" if s is None else f"{s:.1f}" for s in ours)
        lines.append((name, f"{row.stop_s:.1f}", *figures, modelled))
    return [
        "### Beside published figures",
        "",
        "Ours are simulated with data-sheet rates and priors, theirs measured: seconds of stopped training, 8-GPU H200 "
        "nodes with one 25 GB/s NIC. The last column is what the models of their rules give in this simulator. At most "
        "8.7 bytes per parameter of both models can have crossed the NIC in the paper's 5.58 s; with the models "
        "colocated and their fp32 state whole, 12 have to.",
        "",
        *_markdown(head, lines),
        "",
    ]


def _against_cells(rows: Sequence[Row], name: str) -> tuple[str, ...]:
    found = _against(rows, name)

    def factor(key: str) -> str:
        value = found[key]
        return f"{value['median']:.2f} ({value['max']:.1f})" if isinstance(value, dict) else "-"

    return (
        name,
        f"{found['cannot']} of {found['transitions']}",
        str(found["altered"]),
        str(found["fails"]),
        str(found["overflows"]),
        *(factor(key) for key in ("stop", "transfer", "bytes", "peak")),
    )


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def write_document(path: Path, rows: Sequence[Row], refused: Sequence[Refused]) -> None:
    """Replace the section between the marks; other sections of the file are others'."""
    text = path.read_text() if path.exists() else "# Benchmarks\n"
    if BEGIN not in text:
        text = text.rstrip() + f"\n\n## Transitions\n\n{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    path.write_text(f"{head}{BEGIN}\n\n{document(rows, refused)}\n\n{END}{tail}")
