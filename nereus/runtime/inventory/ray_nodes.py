"""Machines of a Ray cluster that have GPUs, as Ray counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nereus.runtime.inventory.gpus import Host, NotThere, hardware_id

_TYPE = "accelerator_type:"


def ray_hosts(address: str = "auto") -> tuple[Host, ...]:
    """Raises NotThere."""
    try:
        import ray
    except ImportError:
        raise NotThere("Ray is not installed: pip install '.[ray]'") from None
    connected = ray.is_initialized()
    if not connected:
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise NotThere(f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}") from None
    try:
        return hosts_of(ray.nodes())
    finally:
        if not connected:
            ray.shutdown()


def hosts_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Host, ...]:
    """``nodes``: what ``ray.nodes()`` says. Those that live and have GPUs, by address."""
    found = []
    for node in nodes:
        resources = node["Resources"]
        count = int(resources.get("GPU", 0))
        if not node["Alive"] or not count:
            continue
        kinds = [name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)]
        hardware = hardware_id(kinds[0]) if len(kinds) == 1 else None
        found.append(Host(name=node["NodeManagerAddress"], hardware=(hardware,) * count))
    return tuple(sorted(found, key=lambda host: host.name))
