"""``nereusc run``: a change between plans, carried out on real tensors on this machine and checked by element."""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import STDIN, STDIN_NAME, read_text
from nereus.cli.options import add_json, add_output_format
from nereus.cli.output import Output
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, has_errors
from nereus.ir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from nereus.ir.plan import Plan
    from nereus.runtime.report import RunReport, StepReport

#: Seconds between two signs of life while a phase lasts.
HEARTBEAT_S = 10.0

_OVER = {"tcp": "TCP", "gloo": "gloo"}
_DRILLS = ("corrupt", "allocation", "raise", "exit", "hang")
#: In the order in which they come; ``load`` in this process only, ``start`` with several.
_PHASES = {
    "compile": "compiling",
    "load": "loading torch",
    "start": "starting processes",
    "fill": "building tensors",
    "execute": "moving",
    "check": "checking every element",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="plan to start from; - is stdin")
    parser.add_argument("new", nargs="+", metavar="NEW", help="plan to go to; with several, one after the other")
    parser.add_argument(
        "--procs",
        type=int,
        default=1,
        metavar="N",
        help="worker processes; the plan's devices are dealt to them (default: 1, this process)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "inprocess", "tcp", "gloo"),
        default="auto",
        help="how messages travel: tcp over connections of its own, gloo over torch.distributed (default: tcp between "
        "processes)",
    )
    parser.add_argument(
        "--scale",
        default="auto",
        metavar="SCALE",
        help="models of the same structure in small: auto, none, or WIDTH[,LAYERS[,VOCAB]] (default: auto)",
    )
    parser.add_argument(
        "--mode",
        choices=("auto", "reversible", "tight"),
        default="auto",
        help="keep the old plan whole until the end, or release as it goes (default: auto, what the plans allow)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest wait for another process (default: 60)",
    )
    parser.add_argument(
        "--drill",
        choices=_DRILLS,
        default=None,
        help="break something on purpose in the last process, to see it handled",
    )
    add_output_format(parser)
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.passes.manager import Pipeline
    from nereus.runtime.faults import Drill
    from nereus.runtime.run import run_pair
    from nereus.runtime.scale import parse_scale

    procs = _processes(args)
    try:
        scale = parse_scale(args.scale)
    except ValueError as error:
        raise UsageError(f"--scale: {error}") from None
    plans, diagnostics = _load([args.old, *args.new])
    out.diagnostics(diagnostics)
    report: RunReport | None = None
    if not has_errors(diagnostics):
        try:
            with _Progress(out, len(plans) - 1) as progress:
                report = run_pair(
                    plans[0],
                    plans[1],
                    chain=plans[2:],
                    procs=procs,
                    scale=scale,
                    pipeline=Pipeline(mode=args.mode),
                    deadline_s=args.deadline,
                    drill=None if args.drill is None else Drill(kind=args.drill, process=procs - 1),
                    on_event=progress,
                    transport="gloo" if args.transport == "gloo" else "tcp",
                )
        except DiagnosticError as error:
            found = error.diagnostics
        else:
            found = report.diagnostics
        out.diagnostics(found)
        diagnostics += found
    code = for_diagnostics(diagnostics)
    if out.json:
        out.document("run", _document(report, diagnostics, code))
    elif report is not None:
        out.print(_text(report, out))
    return code


def _processes(args: argparse.Namespace) -> int:
    if args.procs < 0:
        raise UsageError(f"--procs: a number of processes, not {args.procs}")
    if not 0 < args.deadline <= 86400:
        raise UsageError("--deadline: seconds, more than 0 and at most a day")
    procs: int = max(1, args.procs)
    if args.transport in ("tcp", "gloo") and procs == 1:
        raise UsageError(f"--transport {args.transport} works between processes: give --procs 2 or more")
    if args.transport == "inprocess" and procs > 1:
        raise UsageError(f"--transport inprocess works in one process, not in --procs {procs}")
    if args.drill in ("exit", "hang") and procs == 1:
        raise UsageError(f"--drill {args.drill} takes a process of its own: give --procs 2 or more")
    return procs


def _load(paths: list[str]) -> tuple[list[Plan], tuple[Diagnostic, ...]]:
    """Each file once, though a chain may go back to it."""
    from nereus.lang.api import load_plan, resolve_text

    if paths.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read once only")
    loaded: dict[str, Plan] = {}
    diagnostics: tuple[Diagnostic, ...] = ()
    for path in dict.fromkeys(paths):
        result = resolve_text(read_text(STDIN), path=STDIN_NAME, base_dir=".") if path == STDIN else load_plan(path)
        # What is wrong matters here; what was assumed is for `check` to say.
        diagnostics += tuple(d for d in result.diagnostics if has_errors([d]))
        if result.plan is not None:
            loaded[path] = result.plan
    return [loaded[path] for path in paths if path in loaded], diagnostics


class _Progress:
    """Lines on stderr: a new phase at once, and a sign of life while one lasts."""

    def __init__(self, out: Output, num_steps: int) -> None:
        self.out = out
        self.num_steps = num_steps
        self.begin = self.spoke = time.monotonic()
        self.now: tuple[int, str] = (0, "")
        self.bytes: dict[int, int] = {}
        self.waves = ""
        self.over = threading.Event()
        self.pulse = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> _Progress:
        self.pulse.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.over.set()
        self.pulse.join()

    def _beat(self) -> None:
        while not self.over.wait(0.5):
            if time.monotonic() - self.spoke > HEARTBEAT_S:
                moved = sum(dict(self.bytes).values())
                detail = f", {format_bytes(moved)} received{self.waves}" if moved else ""
                self._say(f"still {_PHASES.get(self.now[1], 'starting')}{detail}")

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "phase":
            self._phase(event["step"], event["phase"])
        elif kind == "progress":
            self.bytes[event["process"]] = event["bytes"]
            self.waves = f", wave {event['wave']} of {event['num_waves']}"
        elif kind == "ended" and event["code"]:
            self._say(f"process {event['process']} stopped")
        elif kind == "killed":
            self._say(f"process {event['process']} did not stop and was ended")

    def _phase(self, step: int, phase: str) -> None:
        """The first process that enters a phase announces it for all."""
        order = list(_PHASES)
        if (step, order.index(phase)) <= (self.now[0], order.index(self.now[1]) if self.now[1] else -1):
            return
        self.now = (step, phase)
        if phase == "execute":
            self.bytes, self.waves = {}, ""
        change = f"change {step + 1} of {self.num_steps}: " if self.num_steps > 1 and phase != "compile" else ""
        self._say(f"{change}{_PHASES[phase]}")

    def _say(self, text: str) -> None:
        self.spoke = time.monotonic()
        self.out.message(f"[{self.spoke - self.begin:5.1f} s] {text}")


def _text(report: RunReport, out: Output) -> str:
    parts = []
    if report.models:
        parts.append("models\n" + "\n".join(f"  {line}" for line in report.models))
    parts += [_step_text(step, report, out) for step in report.steps]
    if report.ok:
        parts.append(_verdict(report, out))
    else:
        whole = "the old state is whole" if report.old_whole else "the old state was not shown to be whole"
        parts.append(f"{out.style('failed', 'red', 'bold')}: {whole} ({_total(report)})")
    return "\n\n".join(parts)


def _verdict(report: RunReport, out: Output) -> str:
    """``right`` only where something moved, was repacked or derived, and was compared."""
    shards = sum(s.num_shards for s in report.steps)
    elements = sum(s.num_elements for s in report.steps)
    counted = f"{elements:,} elements of {shards:,} shards"
    if not elements:
        text = "no state of the old plans counts in the new ones"
        return f"{out.style('nothing compared', 'yellow', 'bold')}: {text} ({_total(report)})"
    if not any(s.moved_bytes or s.copied_bytes for s in report.steps):
        fresh = ", or newly initialised" if any(s.num_fresh for s in report.steps) else ""
        text = f"{counted} lie where they lay and are as they were{fresh}"
        if report.scale != "none":
            text += "; this says nothing of a move, and at another --scale something may move"
        return f"{out.style('nothing moved', 'yellow', 'bold')}: {text} ({_total(report)})"
    return f"{out.style('right', 'green', 'bold')}: {counted}, each in its place ({_total(report)})"


def _total(report: RunReport) -> str:
    rss = "" if report.peak_rss_bytes is None else f", at most {format_bytes(report.peak_rss_bytes)} a process"
    return f"{format_seconds(report.total_s)} in all{rss}"


def _step_text(step: StepReport, report: RunReport, out: Output) -> str:
    name = f"{os.path.basename(step.old) or 'old'} -> {os.path.basename(step.new) or 'new'}"
    where = (
        f"{report.num_processes} processes over {_OVER[report.transport]}"
        if report.num_processes > 1
        else "this process"
    )
    same = step.moved_bytes == step.predicted_moved_bytes
    predicted = "as predicted" if same else f"{format_bytes(step.predicted_moved_bytes)} predicted"
    links = ", ".join(f"{format_bytes(size)} {link}" for link, size in step.bytes_by_link)
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step.phases_s if seconds >= 0.005)
    fresh = f"; {step.num_fresh} new kinds of state initialised" if step.num_fresh else ""
    lines = [
        f"{out.style(name, 'bold')}   {step.num_devices} devices in {where}, {step.mode}",
        f"  moved    {format_bytes(step.moved_bytes)}, {predicted}{' (' + links + ')' if links else ''}, "
        f"in {step.num_messages} messages; {format_bytes(step.copied_bytes)} repacked or derived locally",
        f"  seconds  {step.seconds:.2f}{' (' + phases + ')' if phases else ''}",
        f"  memory   at most {format_bytes(step.peak_bytes)} on {step.peak_device}, "
        f"bound {format_bytes(step.predicted_peak_bytes)} (state and staging)",
        f"  checked  {step.num_elements:,} elements of {step.num_shards:,} shards, "
        f"{format_bytes(step.num_bytes)}{fresh}",
    ]
    return "\n".join(lines)


def _document(report: RunReport | None, diagnostics: tuple[Diagnostic, ...], code: ExitCode) -> dict[str, Any]:
    from nereus.lang.render import to_json

    document: dict[str, Any] = {"ok": code is ExitCode.OK, "run": None}
    if report is not None:
        document["run"] = {
            "transport": report.transport,
            "num_processes": report.num_processes,
            "scale": report.scale,
            "models": list(report.models),
            "steps": [_step_json(step) for step in report.steps],
            "compile_s": report.compile_s,
            "fill_s": report.fill_s,
            "total_s": report.total_s,
            "peak_rss_bytes": report.peak_rss_bytes,
            "old_whole": report.old_whole,
        }
    return {**document, "diagnostics": [to_json(d) for d in diagnostics]}


def _step_json(step: StepReport) -> dict[str, Any]:
    names = (
        "old new mode num_devices num_waves num_messages moved_bytes predicted_moved_bytes copied_bytes seconds "
        "peak_bytes predicted_peak_bytes peak_device num_shards num_elements num_bytes num_fresh check_s"
    )
    content: dict[str, Any] = {name: getattr(step, name) for name in names.split()}
    return {**content, "bytes_by_link": dict(step.bytes_by_link), "phases_s": dict(step.phases_s)}
