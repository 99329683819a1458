"""``nereusc inventory``: the GPUs of this machine, or the nodes of a Ray cluster, and the cluster block for a plan.

Never fails for want of GPUs: that there are none is a result.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING

from nereus.cli.errors import CommandError
from nereus.cli.exit_codes import ExitCode
from nereus.cli.options import add_json
from nereus.cli.output import Output, table
from nereus.ir.units import format_gb

if TYPE_CHECKING:
    from nereus.runtime.inventory.gpus import Gpu, Host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="nodes of the Ray cluster there (default: the one of this machine), as Ray counts them",
    )
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.runtime.inventory.block import cluster_block

    gpus, missing = ((), ()) if args.ray is not None else _gpus()
    hosts = _ray(args.ray) if args.ray is not None else _this(gpus)
    if out.json:
        content = {
            "gpus": [_gpu_json(gpu) for gpu in gpus],
            "hosts": [{"name": host.name, "hardware": list(host.hardware)} for host in hosts],
            "missing": list(missing),
            "cluster": cluster_block(hosts) if hosts else None,
        }
        out.document("inventory", content)
        return ExitCode.OK
    if gpus:
        rows = [_row(gpu) for gpu in gpus]
        out.print("\n".join(table(("", "GPU", "used GB", "of", "MHz", "C", ""), rows, right=(0, 2, 3, 4, 5))))
        out.print()
    if not hosts:
        out.print(f"no GPUs: {'; '.join(missing) if missing else 'Ray has no node with one'}")
        return ExitCode.OK
    out.print(cluster_block(hosts).rstrip())
    return ExitCode.OK


def _gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Those of this machine, and why some cannot be told."""
    from nereus.runtime.inventory.gpus import NotThere
    from nereus.runtime.inventory.nvml import nvidia_gpus
    from nereus.runtime.inventory.rocm import amd_gpus

    found: tuple[Gpu, ...] = ()
    missing = []
    for gpus in (nvidia_gpus, amd_gpus):
        try:
            found += gpus()
        except NotThere as why:
            missing.append(f"{why} (pip install '.[{why.extra}]')" if why.extra else str(why))
    return found, tuple(missing)


def _this(gpus: tuple[Gpu, ...]) -> tuple[Host, ...]:
    from nereus.runtime.inventory.gpus import Host

    if not gpus:
        return ()
    mem_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (Host(name=socket.gethostname(), hardware=tuple(gpu.hardware for gpu in gpus), mem_bytes=mem_bytes),)


def _ray(address: str) -> tuple[Host, ...]:
    from nereus.runtime.inventory.gpus import NotThere
    from nereus.runtime.inventory.ray_nodes import ray_hosts

    try:
        return ray_hosts(address)
    except NotThere as why:
        raise CommandError(str(why)) from None


def _row(gpu: Gpu) -> tuple[str, ...]:
    clock = "" if gpu.clock_mhz is None else f"{gpu.clock_mhz} of {gpu.max_clock_mhz}"
    return (
        str(gpu.index),
        gpu.name,
        format_gb(gpu.used_bytes),
        format_gb(gpu.total_bytes),
        clock,
        "" if gpu.celsius is None else str(gpu.celsius),
        "; ".join(gpu.problems),
    )


def _gpu_json(gpu: Gpu) -> dict[str, object]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "hardware": gpu.hardware,
        "total_bytes": gpu.total_bytes,
        "used_bytes": gpu.used_bytes,
        "clock_mhz": gpu.clock_mhz,
        "max_clock_mhz": gpu.max_clock_mhz,
        "celsius": gpu.celsius,
        "uncorrected_errors": gpu.uncorrected,
        "problems": list(gpu.problems),
    }
