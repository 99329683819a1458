"""Stage blocks -> ``Stage``: every default filled, every degree checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import Fix, Label, Span
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Replicas, Slot, Stage, Workload
from nereus.ir.units import DTYPE_BYTES
from nereus.lang import schema
from nereus.lang.degrees import DegreeChecker
from nereus.lang.merge import Entry, Merged, Section, entries_of
from nereus.lang.resolve_cluster import ClusterResolver
from nereus.lang.resolve_model import ModelResolver
from nereus.lang.sink import Sink, did_you_mean, listing, show, suggestion
from nereus.lang.syntax import At, Block, Number, Word
from nereus.lang.syntax import Sequence as Bracketed
from nereus.lang.values import Reader
from nereus.models.slots import default_slots, optimizer_names

#: Keys that a stage ``with`` another may not write: they come from the host.
_FROM_HOST = (*schema.LAYOUT_KEYS, "backend", "replicas")


class StageResolver:
    def __init__(
        self,
        merged: Merged,
        cluster: ClusterResolver,
        models: ModelResolver,
        workload: Workload | None,
        sink: Sink,
    ) -> None:
        self._sections = merged.stages
        self._broken = merged.broken
        self._cluster = cluster
        self._models = models
        self._workload = workload
        self._sink = sink
        self._reader = Reader(sink)
        self._done: dict[str, Stage | None] = {}
        guests = []
        for name, section in self._sections.items():
            if "with" in section.entries:
                guests.append(name)
            else:
                self._done[name] = self._resolve(section, None)
        for name in guests:
            self._resolve_guest(name, ())
        found = [stage for name in self._sections if (stage := self._done.get(name)) is not None]
        self.stages: tuple[Stage, ...] = tuple(found)

    # -- who runs in whose processes

    def _resolve_guest(self, name: str, users: tuple[str, ...]) -> Stage | None:
        if name in self._done:
            return self._done[name]
        section = self._sections[name]
        entry = section.entries["with"]
        self._reader.no_body(entry)
        host: Stage | None = None
        if name in users:
            circle = " with ".join([*users[users.index(name) :], name])
            self._sink.error("NRS2022", "with runs in a circle", entry.span, notes=(circle,))
            self._done[name] = None
            return None
        if not isinstance(entry.value, Word):
            self._reader.wrong_type(entry, "the name of a stage")
        elif entry.value.text not in self._sections:
            known = [n for n in self._sections if n != name]
            # What is not there may stand in text that could not be read, unless it looks like a slip.
            if not self._broken or did_you_mean(entry.value.text, known):
                more = suggestion(entry.value.text, known, entry.value.span)
                headline = f"there is no stage '{show(entry.value.text)}'"
                self._sink.error("NRS2006", headline, entry.value.span, "unknown stage", **more)
        else:
            host = self._resolve_guest(entry.value.text, (*users, name))
        if host is not None and host.service is not None:
            headline = f"{show(name)} cannot share the processes of {host.name}: it is a service outside the pool"
            self._sink.error("NRS2022", headline, entry.span)
            host = None
        if name not in self._done:
            self._done[name] = None if host is None else self._resolve(section, host)
            if host is None:
                self._check_names(section)
        return self._done[name]

    def _check_names(self, section: Section) -> None:
        """A guest without a host still has its own mistakes."""
        named = self._name(section)
        if named is not None:
            self._keys_of_kind(section, named[1])

    # -- one stage

    def _resolve(self, section: Section, host: Stage | None) -> Stage | None:
        named = self._name(section)
        if named is None:
            return None
        before = self._sink.num_errors
        model_name, kind = named
        self._keys_of_kind(section, kind)
        model = self._models.find(model_name)
        fields: dict[str, Any] = {"model": model_name, "kind": kind}
        spans = {name: entry.span for name, entry in section.entries.items()}
        spans.update({name: block.keyword.span for name, block in section.blocks.items()})
        checker = DegreeChecker(show(section.name), spans, section.head, self._sink)
        self._where(section, fields, host)
        self._settings(section, fields, kind, model, host)
        good = self._sink.num_errors == before
        if host is not None:
            good &= self._as_guest(section, fields, model, host, checker)
        elif fields.get("service") is None:
            good &= self._layout(section, fields, kind, model, checker)
        if kind == "train" and model is not None and model.frozen:
            headline = f"{show(section.name)}: a frozen model cannot train"
            where = Label(span=model.span, message="declared frozen") if model.span else None
            secondary = () if where is None else (where,)
            self._sink.error("NRS3015", headline, section.head, "trains", secondary=secondary)
        if kind == "generate" and model is not None and model.head == "value":
            headline = f"{show(section.name)}: a model with a value head cannot generate"
            self._sink.error("NRS3022", headline, section.head, "generates")
        if kind == "train" and self._workload is not None and good:
            by_tokens = fields.get("max_tokens") is not None
            micro_batch = fields.get("micro_batch", 1)
            checker.batch(self._workload, dp=fields["dp"], micro_batch=micro_batch, by_tokens=by_tokens)
        if self._sink.num_errors > before or not good or model is None:
            return None
        return Stage(**fields, span=section.head, key_spans=tuple(spans.items()))

    def _name(self, section: Section) -> tuple[str, str] | None:
        parts = section.name.split(".")
        word_span = section.head
        if len(parts) != 2:
            headline = f"'{show(section.name)}' is no stage name"
            kinds = listing(schema.KINDS, "or")
            self._sink.error("NRS2026", headline, word_span, f"expected MODEL.KIND, with KIND {kinds}")
            return None
        model, kind = parts
        start = word_span.end - len(section.name)
        source = word_span.source
        good = True
        if kind not in schema.KINDS:
            span = Span(source=source, start=start + len(model) + 1, end=word_span.end)
            more = suggestion(kind, schema.KINDS, span)
            self._sink.error("NRS2027", f"'{show(kind)}' is no kind of stage", span, "unknown kind", **more)
            good = False
        if model not in self._models.known:
            if not self._broken or did_you_mean(model, self._models.known):
                span = Span(source=source, start=start, end=start + len(model))
                more = suggestion(model, self._models.known, span)
                self._sink.error("NRS2003", f"there is no model '{show(model)}'", span, "unknown model", **more)
            good = False
        return (model, kind) if good else None

    def _keys_of_kind(self, section: Section, kind: str) -> None:
        for key in (*section.entries, *section.blocks):
            if key in schema.STAGE_KEYS[kind]:
                continue
            kinds = [k for k in schema.KINDS if key in schema.STAGE_KEYS[k]]
            span = section.entries[key].span if key in section.entries else section.blocks[key].keyword.span
            headline = f"{show(section.name)}: '{key}' is a key of {listing(kinds)} stages"
            self._sink.error("NRS2020", headline, span, f"no meaning in a {kind} stage")

    def _where(self, section: Section, fields: dict[str, Any], host: Stage | None) -> None:
        entries = section.entries
        given = [key for key in ("on", "with", "service") if key in entries]
        if len(given) > 1:
            self._exclusive(section, given)
        if not given and not section.broken:
            nodes = [node.name for node in self._cluster.cluster.nodes]
            example = f"write on = {nodes[0]}" if nodes else "write on = n0"
            headline = f"{show(section.name)} does not say on which GPUs it runs"
            help_text = f"{example}, with = OTHER.STAGE or service = URL"
            self._sink.error("NRS2019", headline, section.head, "'on' is missing", help=help_text)
        if "service" in entries:
            self._service(section, fields)
        if host is not None:
            fields["with_"] = host.name

    def _exclusive(self, section: Section, keys: Sequence[str]) -> None:
        last = max(keys, key=lambda key: (section.entries[key].level, section.entries[key].key.span.start))
        others = [key for key in keys if key != last]
        labels = tuple(Label(span=section.entries[key].span, message="also given") for key in others)
        headline = f"{show(section.name)}: {listing([f'{key!r}' for key in keys])} exclude one another"
        help_text = f"remove one of them; an inherited one is dropped by {others[0]} = default"
        self._sink.error("NRS2021", headline, section.entries[last].span, secondary=labels, help=help_text)

    def _service(self, section: Section, fields: dict[str, Any]) -> None:
        entry = section.entries["service"]
        fields["service"] = self._reader.text(entry)
        for key in (*schema.LAYOUT_KEYS, "idle", "swap", "replicas", "state", "kv_cache", "mem"):
            if key in section.entries or key in section.blocks:
                span = section.entries[key].span if key in section.entries else section.blocks[key].keyword.span
                headline = f"{show(section.name)} is a service: {key} is its own affair"
                label = Label(span=entry.span, message="outside the pool")
                self._sink.error("NRS2023", headline, span, "remove it", secondary=(label,))
        if section.name.endswith(".train"):
            headline = f"{show(section.name)}: a service cannot train, its state would lie outside the plan"
            self._sink.error("NRS2023", headline, entry.span)
        fields["devices"] = ()

    # -- settings that stand alone

    def _settings(
        self, section: Section, fields: dict[str, Any], kind: str, model: Model | None, host: Stage | None
    ) -> None:
        def enum(key: str, known: tuple[str, ...]) -> None:
            entry = section.entries.get(key)
            if entry is not None:
                fields[key] = self._reader.enum(entry, known)

        enum("backend", schema.BACKENDS)
        enum("engine", schema.ENGINES)
        enum("recompute", schema.RECOMPUTE)
        enum("idle", schema.IDLE)
        enum("inflight", schema.INFLIGHT)
        enum("optimizer", optimizer_names())
        enum("swap", schema.SWAP)
        if kind == "train":
            fields.setdefault("optimizer", "adam")
        for key in ("micro_batch", "max_tokens"):
            entry = section.entries.get(key)
            if entry is not None:
                units = schema.TOKEN_UNITS if key == "max_tokens" else None
                fields[key] = self._reader.integer(entry, units=units)
        kv_cache, mem = section.entries.get("kv_cache"), section.entries.get("mem")
        if kv_cache is not None and mem is not None:
            self._exclusive(section, ["kv_cache", "mem"])
        if kv_cache is not None:
            fields["kv_cache_bytes"] = self._reader.size(kv_cache)
        if mem is not None:
            fields["mem_fraction"] = self._reader.fraction(mem)
        if kind == "train" and fields.get("idle") == "discard":
            headline = f"{show(section.name)}: idle = discard would lose what training has learnt"
            span = section.entries["idle"].span
            self._sink.error("NRS3019", headline, span, "use resident or offload")
        swap = section.entries.get("swap")
        if swap is not None and (host is None or host.model == fields["model"]):
            headline = f"{show(section.name)}: swap is for a stage with another model's stage"
            note = "a model brought in from host memory needs the processes of another model to come into"
            self._sink.error("NRS3019", headline, swap.span, "nothing to swap with", notes=(note,))
        self._slots(section, fields, kind, model)

    def _slots(self, section: Section, fields: dict[str, Any], kind: str, model: Model | None) -> None:
        if model is None:
            return
        optimizer = fields.get("optimizer")
        if kind == "train" and optimizer is None:
            return
        slots = {
            s.name: s for s in default_slots(trains=kind == "train", precision=model.precision, optimizer=optimizer)
        }
        block = section.blocks.get("state")
        if block is not None and block.body is not None:
            entries = entries_of(block.body, None, f"state of {show(section.name)}", section.level, self._sink)
            for name, entry in entries.items():
                self._slot(name, entry, slots)
        fields["slots"] = tuple(slots.values())

    def _slot(self, name: str, entry: Entry, slots: dict[str, Slot]) -> None:
        self._reader.no_body(entry)
        value = entry.value
        word, place = (value.word, value.place) if isinstance(value, At) else (value, None)
        if not isinstance(word, Word):
            self._reader.wrong_type(entry, "a dtype such as fp32, or fp32 @host")
            return
        if place is not None and place.text != "host":
            headline = f"'@{show(place.text)}' is no place for state"
            self._sink.error("NRS2007", headline, place.span, "only @host", fix=Fix(span=place.span, text="host"))
            return
        if word.text == "none" and place is None:
            if name == "weight":
                self._sink.error("NRS2010", "a stage without weights holds nothing", entry.span, "cannot be none")
            slots.pop(name, None)
            return
        if word.text not in DTYPE_BYTES:
            more = suggestion(word.text, tuple(DTYPE_BYTES), word.span)
            self._sink.error("NRS2007", f"'{show(word.text)}' is no dtype", word.span, "unknown dtype", **more)
            return
        if "[" in name or "." in name:
            self._sink.error("NRS2026", f"'{show(name)}' cannot name a slot", entry.key.span)
            return
        slots[name] = Slot(name=name, dtype=word.text, host=place is not None)

    # -- layout

    def _layout(
        self, section: Section, fields: dict[str, Any], kind: str, model: Model | None, checker: DegreeChecker
    ) -> bool:
        before = self._sink.num_errors
        entries = section.entries
        on = entries.get("on")
        devices = None if on is None else self._cluster.devices(on)
        degrees = {key: self._degree(entries, key) for key in ("tp", "pp", "cp", "ep", "etp", "vp", "dp")}
        tp, pp, cp, vp = (degrees[key] or 1 for key in ("tp", "pp", "cp", "vp"))
        zero = self._zero(entries)
        order = self._order(section, fields)
        sp = self._sp(section, tp)
        split = None if "pp_split" not in entries else self._pp_split(entries["pp_split"])
        good = self._sink.num_errors == before
        arch = None if model is None else model.arch
        if model is not None:
            checker.tp(model, tp, None if devices is None else len(devices))
        layers = None
        if arch is not None and good:
            layers = checker.split(arch, pp, vp, split)
        moe = arch is not None and arch.moe is not None
        ep = degrees["ep"] or 1
        # Experts are cut like the rest until they are spread: then each is whole.
        etp = degrees["etp"] or (tp if moe and ep == 1 else 1)
        dp = None if devices is None else checker.count(len(devices), tp, pp, cp)
        if devices is None or dp is None:
            return False
        if degrees["dp"] is not None:
            checker.written_dp(degrees["dp"], dp, len(devices), tp, pp, cp)
        if arch is not None and good:
            checker.experts(arch, ep=ep, etp=etp, pp=pp, num_devices=len(devices))
        fsdp = self._fsdp(section, fields, kind, dp, zero, checker)
        place = self._place(entries, devices)
        if self._sink.num_errors == before and order is not None:
            ranks = devices if place is None else place
            stride = 1
            for axis in order.split("-"):
                if axis == "tp":
                    break
                stride *= {"pp": pp, "cp": cp, "dp": dp}.get(axis, 1)
            checker.tp_inside_nodes(ranks, tp, stride)
        fields.update(devices=devices, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vp=vp, dp=dp, sp=sp, pp_split=layers)
        fields.update(zero=zero, fsdp=fsdp, order=order, place=place)
        if self._sink.num_errors == before:
            self._replicas(section, fields)
        return self._sink.num_errors == before

    def _degree(self, entries: Mapping[str, Entry], key: str) -> int | None:
        entry = entries.get(key)
        return None if entry is None else self._reader.integer(entry)

    def _sp(self, section: Section, tp: int) -> bool:
        entry = section.entries.get("sp")
        if entry is None:
            return tp > 1
        sp = self._reader.boolean(entry)
        if sp and tp == 1:
            headline = f"{show(section.name)}: sp = true has no effect with tp = 1"
            self._sink.warning("NRS3024", headline, entry.span, "sequence parallelism works inside a tp group")
        return bool(sp) and tp > 1

    def _zero(self, entries: Mapping[str, Entry]) -> int:
        entry = entries.get("zero")
        if entry is None:
            return 0
        zero = self._reader.integer(entry, least=0)
        if zero is not None and zero > 3:
            headline = f"zero must be 0, 1, 2 or 3, not {zero}"
            self._sink.error("NRS2010", headline, entry.value.span, "0 to 3")
        return zero or 0

    def _order(self, section: Section, fields: dict[str, Any]) -> str | None:
        entry = section.entries.get("order")
        if entry is None:
            return ORDER_MEGATRON if fields.get("backend") == "megatron" else ORDER_REPLICA
        self._reader.no_body(entry)
        if not isinstance(entry.value, Word):
            self._reader.wrong_type(entry, "axes joined by '-', fastest first")
            return None
        text = entry.value.text
        axes = text.split("-")
        unknown = [a for a in axes if a not in schema.ORDER_AXES]
        missing = [a for a in ("tp", "cp", "pp", "dp") if a not in axes]
        if unknown or missing or len(set(axes)) != len(axes):
            if unknown:
                why = f"'{show(unknown[0])}' is no axis"
            elif missing:
                why = f"{listing(missing)} missing"
            else:
                why = "an axis stands twice"
            help_text = f"each of tp, cp, pp, dp once (ep too if you like), fastest first: {ORDER_REPLICA}"
            headline = f"'{show(text)}' is no order of ranks: {why}"
            self._sink.error("NRS3018", headline, entry.value.span, why, help=help_text)
            return None
        return text

    def _pp_split(self, entry: Entry) -> tuple[int, ...] | None:
        self._reader.no_body(entry)
        values = entry.value.items if isinstance(entry.value, Bracketed) else (entry.value,)
        if not values or not all(isinstance(v, Number) for v in values):
            self._reader.wrong_type(entry, "layers of each pipeline stage such as (17, 15)")
            return None
        counts = [self._reader.integer_value(entry, v) for v in values]
        if any(c is None for c in counts):
            return None
        return tuple(c for c in counts if c is not None)

    def _fsdp(
        self, section: Section, fields: dict[str, Any], kind: str, dp: int, zero: int, checker: DegreeChecker
    ) -> int:
        """Shard-group size; 0 = off. ``backend = fsdp`` shards fully unless the plan says otherwise."""
        entry = section.entries.get("fsdp")
        if entry is None:
            full = fields.get("backend") == "fsdp" and zero == 0
            return dp if full and dp > 1 else 0
        self._reader.no_body(entry)
        value = entry.value
        size: int | None
        if isinstance(value, Number):
            size = self._reader.integer(entry)
        elif isinstance(value, Word) and value.text in ("full", "off"):
            size = dp if value.text == "full" else 0
        else:
            word = value.text if isinstance(value, Word) else ""
            close = did_you_mean(word, ("full", "off"))
            fix = None if close is None else Fix(span=value.span, text=close)
            help_text = None if close is None else f"did you mean {close}?"
            self._reader.wrong_type(entry, "full, off or the size of the shard group", help=help_text, fix=fix)
            return 0
        if size is None or size == 0:
            return 0
        if zero:
            labels = (Label(span=section.entries["zero"].span, message="also given"),)
            headline = f"{show(section.name)}: zero and fsdp both shard over dp"
            self._sink.error("NRS3010", headline, entry.span, "use one of them", secondary=labels)
            return 0
        if dp % size:
            legal = [d for d in range(2, min(dp, 4096) + 1) if dp % d == 0]
            headline = f"fsdp = {size} does not divide dp {dp}"
            label = f"legal: {', '.join(map(str, legal[:12]))}" if legal else "dp is 1: use fsdp = off"
            checker.error("NRS3011", headline, ("fsdp",), label)
            return 0
        if size == 1 and dp > 1 and kind == "train":
            headline = f"fsdp = 1 leaves {dp} replicas that never exchange gradients"
            help_text = f"write fsdp = full (shards over {dp}), a divisor of {dp} above 1, or fsdp = off (all-reduce)"
            checker.error("NRS3016", headline, ("fsdp",), "a shard group of one", help=help_text)
        return size if size > 1 else 0

    def _place(self, entries: Mapping[str, Entry], devices: tuple[Device, ...]) -> tuple[Device, ...] | None:
        entry = entries.get("place")
        if entry is None:
            return None
        place = self._cluster.devices(entry)
        if place is None:
            return None
        missing, extra = sorted(set(devices) - set(place)), sorted(set(place) - set(devices))
        if missing or extra:
            parts = []
            if missing:
                parts.append(f"it leaves out {self._cluster.name_devices(missing)}")
            if extra:
                parts.append(f"it names {self._cluster.name_devices(extra)} besides")
            on = Label(span=entries["on"].span, message=f"{len(devices)} GPUs")
            headline = "place is no permutation of 'on': " + ", and ".join(parts)
            self._sink.error("NRS3014", headline, entry.span, f"{len(place)} GPUs", secondary=(on,))
            return None
        return place

    def _replicas(self, section: Section, fields: dict[str, Any]) -> None:
        block = section.blocks.get("replicas")
        if block is None or block.body is None:
            return
        where = f"replicas of {show(section.name)}"
        small = entries_of(block.body, schema.REPLICA_KEYS, where, section.level, self._sink)
        least = self._reader.integer(small["min"]) if "min" in small else 1
        dormant = self._reader.integer(small["dormant"], least=0) if "dormant" in small else 0
        if least is None or dormant is None:
            return
        shards = fields["fsdp"] or (fields["dp"] if fields["zero"] else 1)
        complete = fields["dp"] // shards
        if least + dormant > complete:
            headline = f"{where}: min {least} and {dormant} dormant are more than its {complete} complete replica(s)"
            note = f"dp {fields['dp']} in shard groups of {shards}"
            self._sink.error("NRS3023", headline, block.keyword.span, f"at most {complete}", notes=(note,))
        fields["replicas"] = Replicas(min=least, dormant=dormant)

    # -- guests

    def _as_guest(
        self, section: Section, fields: dict[str, Any], model: Model | None, host: Stage, checker: DegreeChecker
    ) -> bool:
        before = self._sink.num_errors
        same_model = host.model == fields["model"]
        refused = [k for k in _FROM_HOST if not (k == "pp_split" and not same_model)]
        if same_model:
            refused += ["idle"]
        for key in refused:
            if key in section.entries or key in section.blocks:
                self._from_host(section, key, host)
        host_model = self._models.find(host.model)
        for key in ("devices", "tp", "pp", "cp", "ep", "etp", "vp", "dp", "sp", "zero", "fsdp", "order", "place"):
            fields[key] = getattr(host, key)
        fields["backend"] = host.backend
        fields["pp_split"] = host.pp_split
        if same_model:
            fields["idle"] = host.idle
        if model is None or host_model is None or (same_model or model.arch == host_model.arch):
            if "pp_split" in section.entries and not same_model:
                self._from_host(section, "pp_split", host)
            return self._sink.num_errors == before
        # Another architecture in the host's processes: its own layers and experts, over the host's ranks.
        if model.arch.moe is None:
            fields["ep"] = fields["etp"] = 1
        elif host_model.arch.moe is None:
            fields["etp"] = host.tp
        checker.tp(model, host.tp, len(host.devices))
        written = self._pp_split(section.entries["pp_split"]) if "pp_split" in section.entries else None
        if self._sink.num_errors == before:
            fields["pp_split"] = checker.split(model.arch, host.pp, host.vp, written)
        if self._sink.num_errors == before:
            checker.experts(model.arch, ep=fields["ep"], etp=fields["etp"], pp=host.pp, num_devices=len(host.devices))
        return self._sink.num_errors == before

    def _from_host(self, section: Section, key: str, host: Stage) -> None:
        item: Entry | Block = section.entries[key] if key in section.entries else section.blocks[key]
        span = item.span if isinstance(item, Entry) else item.keyword.span
        label = Label(span=section.entries["with"].span, message="its host")
        headline = f"{show(section.name)} runs in the processes of {host.name}, which decides {key}"
        self._sink.error("NRS2021", headline, span, "remove it", secondary=(label,), help=f"write it in {host.name}")
