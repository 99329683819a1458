"""Cluster block -> ``Cluster``, and words such as ``n[0-1].gpu[4-7]`` -> devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nereus.ir.cluster import Cluster, Device, GpuType, Node, Pool
from nereus.ir.diagnostic import Label, Span
from nereus.ir.units import TIB
from nereus.lang import schema
from nereus.lang.merge import Entry, Merged, Section
from nereus.lang.ranges import MAX_NAMES, RangeError, compress_names, expand, indices
from nereus.lang.sink import Sink, listing, show, suggestion
from nereus.lang.syntax import Number, Repeat, Text, Value, Word
from nereus.lang.syntax import Sequence as Bracketed
from nereus.lang.values import Reader
from nereus.models.hardware import gpu_ids, gpu_type

DEFAULT_HOST_MEM_BYTES = TIB
MAX_GPUS_PER_NODE = 1024

_GPU_PART = re.compile(r"gpu(?:(\d{1,9})|\[([^\[\]]*)\])")


class ClusterResolver:
    """``cluster`` is what could be resolved; ``complete`` is False where part of the text was not understood."""

    def __init__(self, merged: Merged, sink: Sink) -> None:
        self._sink = sink
        self._reader = Reader(sink)
        self._nodes: dict[str, Node] = {}
        self._lost: dict[str, Span | None] = {}
        self.complete = not merged.broken and not merged.nodes_broken
        if merged.cluster is None:
            if not merged.broken:
                help_text = 'write cluster { node n[0-1] { gpus = 8 x "h100-sxm-80gb" } }'
                sink.error("NRS2019", "the plan has no cluster block", None, help=help_text)
            self.complete = False
        self._resolve_nodes(merged)
        self._resolve_lost(merged)
        nodes = tuple(node for name, node in self._nodes.items() if name not in self._lost)
        if merged.cluster is not None and not self._nodes and self.complete:
            help_text = 'write node n[0-1] { gpus = 8 x "h100-sxm-80gb" }'
            sink.error("NRS2019", "the cluster has no nodes", merged.cluster.head, help=help_text)
            self.complete = False
        pool = None if merged.pool is None else self._pool(merged.pool)
        self.cluster = Cluster(nodes=nodes, lost=tuple(self._lost), pool=pool)

    # -- nodes

    def _resolve_nodes(self, merged: Merged) -> None:
        read: dict[int, tuple[int, GpuType, int, float, int] | None] = {}
        for name, section in merged.nodes.items():
            if id(section) not in read:
                read[id(section)] = self._node(section)
            facts = read[id(section)]
            if facts is None:
                self.complete = False
                continue
            num_gpus, gpu, host_mem_bytes, nic, rails = facts
            self._nodes[name] = Node(
                name=name, gpu=gpu, num_gpus=num_gpus, host_mem_bytes=host_mem_bytes, nic_bytes_per_s=nic, rails=rails
            )
        total = sum(node.num_gpus for node in self._nodes.values())
        if total > MAX_NAMES:
            headline = f"the cluster has {total:,} GPUs; a plan has at most {MAX_NAMES:,}"
            self._sink.error("NRS2028", headline, None if merged.cluster is None else merged.cluster.head)
            self._nodes.clear()
            self.complete = False

    def _node(self, section: Section) -> tuple[int, GpuType, int, float, int] | None:
        gpus = section.entries.get("gpus")
        counted = None if gpus is None else self._gpus(gpus)
        if gpus is None and not section.broken:
            help_text = 'write gpus = 8 x "h100-sxm-80gb"'
            self._sink.error("NRS2019", f"node {section.name} says no gpus", section.head, help=help_text)
        host, nic = section.entries.get("host_mem"), section.entries.get("nic")
        host_mem_bytes = DEFAULT_HOST_MEM_BYTES if host is None else self._reader.size(host)
        rate = None if nic is None else self._reader.rate(nic, schema.RATE_UNITS)
        if counted is None:
            return None
        num_gpus, gpu = counted
        if host_mem_bytes is None:  # said already; the GPUs are known all the same
            host_mem_bytes = DEFAULT_HOST_MEM_BYTES
        if rate is None:
            rate = num_gpus * gpu.default_nic_bytes_per_s
        return num_gpus, gpu, host_mem_bytes, rate, self._rails(section.entries.get("rails"), num_gpus)

    def _rails(self, entry: Entry | None, num_gpus: int) -> int:
        """1 after an error: the node is known all the same."""
        rails = None if entry is None else self._reader.integer(entry)
        if entry is None or rails is None:
            return 1
        if num_gpus % rails:
            headline = f"{rails} rails for {num_gpus} GPUs: each serves equally many GPUs"
            self._sink.error("NRS2010", headline, entry.span, f"must divide {num_gpus}")
            return 1
        return rails

    def _gpus(self, entry: Entry) -> tuple[int, GpuType] | None:
        self._reader.no_body(entry)
        value = entry.value
        if not isinstance(value, Repeat):
            example = 'a count and a data sheet such as 8 x "h100-sxm-80gb"'
            known = value.value if isinstance(value, Text) else ""
            help_text = f'write gpus = 8 x "{known}"' if known in gpu_ids() else None
            self._reader.wrong_type(entry, example, help=help_text)
            return None
        count = self._reader.integer_value(entry, value.count)
        if count is not None and count > MAX_GPUS_PER_NODE:
            headline = f"{count:,} GPUs in one node; a node has at most {MAX_GPUS_PER_NODE:,}"
            self._sink.error("NRS2010", headline, value.count.span)
            count = None
        id_ = value.of.value if isinstance(value.of, Text) else value.of.text
        if id_ not in gpu_ids():
            more = suggestion(id_, gpu_ids(), value.of.span, quote=True)
            headline = f'there is no data sheet for GPU "{show(id_)}"'
            self._sink.error("NRS2005", headline, value.of.span, "unknown GPU", **more)
            return None
        return None if count is None else (count, gpu_type(id_))

    def _resolve_lost(self, merged: Merged) -> None:
        if merged.cluster is None:
            return
        for key in ("remove", "lost"):
            entry = merged.cluster.entries.get(key)
            if entry is None:
                continue
            self._reader.no_body(entry)
            for word in self._words(entry):
                try:
                    names = expand(word.text)
                except RangeError as error:
                    self._sink.error("NRS2013", str(error), word.span, "this range")
                    continue
                for name in names:
                    # ``lost`` is how a placed plan keeps the names of nodes that it no longer describes.
                    if key == "remove" and name not in merged.nodes:
                        self._unknown_node(name, word.span, "NRS2025")
                        break
                    self._lost.setdefault(name, word.span)

    def _pool(self, section: Section) -> Pool:
        def gpus(key: str, least: int) -> int | None:
            entry = section.entries.get(key)
            return None if entry is None else self._reader.integer(entry, least=least, units=schema.GPU_UNITS)

        low, high, standby = gpus("min", 0), gpus("max", 1), gpus("standby", 0)
        notice = section.entries.get("notice")
        notice_s = None if notice is None else self._reader.duration(notice, schema.TIME_UNITS)
        if low is not None and high is not None and low > high:
            entry = section.entries["min"]
            self._sink.error("NRS2010", f"pool: min {low} is above max {high}", entry.span, "above max")
        return Pool(min_gpus=low, max_gpus=high, standby_gpus=standby or 0, notice_s=notice_s)

    # -- devices

    def devices(self, entry: Entry) -> tuple[Device, ...] | None:
        """Devices that ``on`` or ``place`` names, in its order; None after an error."""
        self._reader.no_body(entry)
        found: list[Device] = []
        seen: set[Device] = set()
        good = True
        for word in self._words(entry):
            more = self._devices_of(word)
            if more is None:
                good = False
                continue
            doubles = [d for d in more if d in seen]
            if not doubles and len(set(more)) < len(more):
                doubles = [d for i, d in enumerate(more) if d in more[:i]]
            if doubles:
                what = self.name_devices(doubles)
                self._sink.error("NRS3001", f"{entry.name} lists {what} twice", word.span, "listed before")
                good = False
            seen.update(more)
            found.extend(more)
        if not found and good and isinstance(entry.value, Bracketed):
            self._reader.wrong_type(entry, "devices such as n0 or n0.gpu[0-3]")
            good = False
        return tuple(found) if good and found else None

    def name_devices(self, devices: Sequence[Device]) -> str:
        from nereus.lang.ranges import compress_devices

        words = compress_devices(devices, self.num_gpus)
        return listing(words if len(words) <= 6 else [*words[:5], f"{len(words) - 5} more"])

    @property
    def num_gpus(self) -> dict[str, int]:
        return {name: node.num_gpus for name, node in self._nodes.items()}

    def _words(self, entry: Entry) -> list[Word]:
        values: tuple[Value, ...] = entry.value.items if isinstance(entry.value, Bracketed) else (entry.value,)
        words = []
        for value in values:
            if isinstance(value, Word):
                words.append(value)
            else:
                wanted = "a list of GPU names" if isinstance(value, Number) else "names of nodes or GPUs"
                self._reader.wrong_type(entry, wanted, value)
        return words

    def _devices_of(self, word: Word) -> tuple[Device, ...] | None:
        text = word.text
        dot = text.find(".")
        node_text, gpu_text = (text, None) if dot < 0 else (text[:dot], text[dot + 1 :])
        gpu_span = Span(source=word.span.source, start=word.span.start + dot + 1, end=word.span.end)
        try:
            names = expand(node_text)
            picked = None if gpu_text is None else self._gpu_indices(gpu_text)
        except RangeError as error:
            self._sink.error("NRS2014" if "gpu" in str(error) else "NRS2028", str(error), word.span, "this range")
            return None
        lost = [n for n in names if n in self._lost]
        if lost:
            where = self._lost[lost[0]]
            label = () if where is None else (Label(span=where, message="removed here"),)
            headline = f"{listing(compress_names(lost))} was removed and can hold nothing"
            help_text = "name other devices here, or remove the stage"
            self._sink.error("NRS2015", headline, word.span, "still named", secondary=label, help=help_text)
            return None
        for name in names:
            if name not in self._nodes:
                if self.complete:
                    self._unknown_node(name, word.span, "NRS2013")
                return None
        devices: list[Device] = []
        for name in names:
            node = self._nodes[name]
            wrong = None if picked is None else next((i for i in picked if i >= node.num_gpus), None)
            if wrong is not None:
                headline = f"{name} has no gpu{wrong}: it has {node.num_gpus} GPUs, gpu0 to gpu{node.num_gpus - 1}"
                self._sink.error("NRS2014", headline, gpu_span, f"must be below {node.num_gpus}")
                return None
            devices.extend(Device(name, i) for i in (range(node.num_gpus) if picked is None else picked))
            if len(devices) > MAX_NAMES:
                self._sink.error("NRS2028", f"more than {MAX_NAMES:,} devices in one word", word.span)
                return None
        return tuple(devices)

    def _gpu_indices(self, text: str) -> tuple[int, ...]:
        match = _GPU_PART.fullmatch(text)
        if match is None:
            raise RangeError(f"'{show(text)}' is no gpu of a node: write n0.gpu3 or n0.gpu[0-3]")
        return (int(match[1]),) if match[1] is not None else tuple(int(i) for i in indices(match[2]))

    def _unknown_node(self, name: str, span: Span, code: str) -> None:
        known = list(self._nodes)
        more = suggestion(name, known, None) if len(known) <= 4096 else {}
        shown = compress_names(known)
        if known and len(shown) <= 8:
            more["notes"] = (f"the cluster has {listing(shown)}",)
            if not str(more.get("help", "")).startswith("did you mean"):
                more["help"] = None
        self._sink.error(code, f"there is no node '{show(name)}'", span, "unknown node", **more)
