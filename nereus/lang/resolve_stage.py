"""Stage blocks -> ``Stage``: every default filled, every degree checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import Fix, Label, Span
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Replicas, Slot, Stage, Workload
from nereus.ir.units import DTYPE_BYTES
from nereus.lang import schema
from nereus.lang.check_fp8 import check_fp8
from nereus.lang.degrees import DegreeChecker
from nereus.lang.merge import Entry, Merged, Section, entries_of
from nereus.lang.resolve_cluster import ClusterResolver
from nereus.lang.resolve_model import ModelResolver
from nereus.lang.sink import Sink, did_you_mean, listing, show, suggestion
from nereus.lang.split import Split
from nereus.lang.syntax import At, Block, Number, Word
from nereus.lang.syntax import Sequence as Bracketed
from nereus.lang.values import Reader
from nereus.models.slots import REFUSED_OPTIMIZERS, default_slots, optimizer_names

#: Keys that a stage ``with`` another may not write: they come from the host.
_FROM_HOST = (*schema.LAYOUT_KEYS, "backend", "replicas")
#: Fields that it gets from there.
_TAKEN_OVER = ("devices", *schema.DEGREES, "sp", "pp_split", "chunks", "zero", "fsdp", "order", "place", "backend")


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
        self._levels = merged.levels
        self._cluster = cluster
        self._models = models
        self._workload = workload
        self._sink = sink
        self._reader = Reader(sink)
        self._done: dict[str, Stage | None] = {}
        #: Stages whose devices and degrees are known, so that what follows from them can be judged.
        self._sound: set[str] = set()
        guests = []
        for name, section in self._sections.items():
            if "with" in section.entries:
                guests.append(name)
            else:
                self._done[name] = self._resolve(section, None)
        for name in guests:
            self._resolve_guest(name, ())
        found = [stage for name in self._sections if (stage := self._done.get(name)) is not None]
        #: After errors as far as they are known: no devices where those are not, defaults for what could not be read.
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
            self._done[name] = self._resolve(section, host)
        return self._done[name]

    # -- one stage

    def _resolve(self, section: Section, host: Stage | None) -> Stage | None:
        """``host``: None also where a guest's host is not known. A mistake hides no other one that does not follow
        from it: the stage comes back as far as it is known, None only where it has no name to go by."""
        model_name, kind = self._name(section)
        if kind in schema.KINDS:
            self._keys_of_kind(section, kind)
        model = self._models.find(model_name)
        fields: dict[str, Any] = {"model": model_name, "kind": kind}
        spans = {name: entry.span for name, entry in section.entries.items()}
        spans.update({name: block.keyword.span for name, block in section.blocks.items()})
        origin = {} if model is None or model.span is None else {"model": model.span}
        checker = DegreeChecker(show(section.name), {**origin, **spans}, section.head, self._sink, self._levels)
        self._where(section, fields, host)
        self._settings(section, fields, kind, model, host)
        sound = False
        if "with" in section.entries:
            sound = self._as_guest(section, fields, model, host, checker)
        elif fields.get("service") is None:
            sound = self._layout(section, fields, kind, model, checker)
        if kind == "train" and model is not None and model.frozen:
            headline = f"{show(section.name)}: a frozen model cannot train"
            where = Label(span=model.span, message="declared frozen") if model.span else None
            secondary = () if where is None else (where,)
            self._sink.error("NRS3015", headline, section.head, "trains", secondary=secondary)
        if kind == "generate" and model is not None and model.head == "value":
            headline = f"{show(section.name)}: a model with a value head cannot generate"
            self._sink.error("NRS3022", headline, section.head, "generates")
        if sound:
            self._sound.add(section.name)
            if model is not None:
                check_fp8(checker, model, kind, fields)
            if kind == "train":
                self._batch(section, fields, checker)
        if section.name != f"{model_name}.{kind}":
            return None
        given = {name: value for name, value in fields.items() if value is not None}
        return Stage(**{"devices": (), **given}, span=section.head, key_spans=tuple(spans.items()))

    def _batch(self, section: Section, fields: dict[str, Any], checker: DegreeChecker) -> None:
        by_tokens = fields.get("max_tokens") is not None
        if self._workload is None or _unread(section, fields, "max_tokens"):
            return
        if by_tokens or not _unread(section, fields, "micro_batch"):
            micro_batch = fields.get("micro_batch") or 1
            checker.batch(self._workload, dp=fields["dp"], micro_batch=micro_batch, by_tokens=by_tokens)

    def _name(self, section: Section) -> tuple[str, str]:
        """Model and kind as they are written, though there may be none such; both empty where there are not two."""
        parts = section.name.split(".")
        word_span = section.head
        if len(parts) != 2:
            headline = f"'{show(section.name)}' is no stage name"
            kinds = listing(schema.KINDS, "or")
            self._sink.error("NRS2026", headline, word_span, f"expected MODEL.KIND, with KIND {kinds}")
            return "", ""
        model, kind = parts
        start = word_span.end - len(section.name)
        source = word_span.source
        if kind not in schema.KINDS:
            span = Span(source=source, start=start + len(model) + 1, end=word_span.end)
            more = suggestion(kind, schema.KINDS, span)
            self._sink.error("NRS2027", f"'{show(kind)}' is no kind of stage", span, "unknown kind", **more)
        known = self._models.known
        if model not in known and (not self._broken or did_you_mean(model, known)):
            span = Span(source=source, start=start, end=start + len(model))
            more = suggestion(model, known, span)
            self._sink.error("NRS2003", f"there is no model '{show(model)}'", span, "unknown model", **more)
        return model, kind

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
        if not self._refused_optimizer(section):
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
        lonely = host is None and "with" not in section.entries
        if swap is not None and (lonely or (host is not None and host.model == fields["model"])):
            headline = f"{show(section.name)}: swap is for a stage with another model's stage"
            note = "a model brought in from host memory needs the processes of another model to come into"
            self._sink.error("NRS3019", headline, swap.span, "nothing to swap with", notes=(note,))
        self._slots(section, fields, kind, model)

    def _refused_optimizer(self, section: Section) -> bool:
        """Whether the plan names an optimizer whose state cannot be described; it is told why."""
        entry = section.entries.get("optimizer")
        if entry is None or not isinstance(entry.value, Word):
            return False
        reason = REFUSED_OPTIMIZERS.get(entry.value.text.lower())
        if reason is None:
            return False
        headline = f"the state of {entry.value.text} cannot be described: {reason}"
        help_text = f"known are {', '.join(optimizer_names())}"
        self._sink.error("NRS3028", headline, entry.value.span, "no slots of the parameters' shape", help=help_text)
        return True

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
            self._reader.wrong_type(entry, "a dtype such as fp32, fp32 @host or fp32 @host(0.5)")
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
        share = 1.0
        if isinstance(value, At) and value.share is not None:
            number = value.share.value
            if number is None or not 0 < number <= 1:
                headline = f"a share of {show(value.share.text, 24)} is not between 0 and 1"
                self._sink.error("NRS2010", headline, value.share.span, "above 0, and at most 1 for all of the slot")
                return
            share = float(number)
        slots[name] = Slot(name=name, dtype=word.text, host=place is not None, host_share=share)

    # -- layout

    def _layout(
        self, section: Section, fields: dict[str, Any], kind: str, model: Model | None, checker: DegreeChecker
    ) -> bool:
        """Whether devices and degrees are known afterwards."""
        entries = section.entries
        devices = self._cluster.devices(entries["on"]) if "on" in entries else None
        num_devices = None if devices is None else len(devices)
        degrees = {key: self._degree(entries, key) for key in ("tp", "pp", "cp", "ep", "etp", "vp", "dp")}
        unread = {key for key in degrees if _unread(section, degrees, key)}
        tp, pp, cp, vp, ep = (degrees[key] or 1 for key in ("tp", "pp", "cp", "vp", "ep"))
        zero = self._zero(entries)
        order = self._order(section, fields)
        sp = self._sp(section, tp, known="tp" not in unread)
        split = None if "pp_split" not in entries else self._pp_split(entries["pp_split"])
        # A degree that has to change anyway proves nothing about those that depend on it.
        wrong = unread & {"tp", "pp", "cp"}
        layers = None
        if model is not None:
            framework = _framework(fields)
            if "tp" not in unread and not checker.tp(model, tp, num_devices, framework):
                wrong.add("tp")
            if not unread & {"pp", "vp"} and not _unread(section, {"pp_split": split}, "pp_split"):
                layers = checker.split(model.arch, pp, vp, split)
            if pp > model.arch.num_layers:
                wrong.add("pp")
        counted = None
        if num_devices is not None:
            counted = checker.count(num_devices, *(1 if k in wrong else degrees[k] or 1 for k in ("tp", "pp", "cp")))
        dp = None if wrong else counted
        if degrees["dp"] is not None and dp is not None and num_devices is not None:
            checker.written_dp(degrees["dp"], dp, num_devices, tp, pp, cp)
        moe = model is not None and model.arch.moe is not None
        # Experts are cut like the rest until they are spread: then each is whole, but Megatron still cuts them.
        like_tp = ep == 1 or fields.get("backend") == "megatron"
        etp = degrees["etp"] or (tp if moe and like_tp and not unread & {"ep", "etp"} and "tp" not in wrong else 1)
        good = False
        if model is not None:
            spread = num_devices if dp is not None and not unread & {"ep", "etp"} else None
            good = checker.experts(model.arch, ep=ep, etp=etp, pp=pp, num_devices=spread)
        fsdp = self._fsdp(section, fields, kind, None if dp is None else dp * cp, zero, checker)
        if moe and good and dp is not None and fsdp and not unread & {"ep", "etp"}:
            checker.expert_shards(shards=fsdp, expert_dp=tp * cp * dp // (ep * etp))
        place = self._place(entries, devices)
        ranks = devices if "place" not in entries else place
        if ranks is not None and dp is not None and order is not None and not section.broken:
            stride = 1
            for axis in order.split("-"):
                if axis == "tp":
                    break
                stride *= {"pp": pp, "cp": cp, "dp": dp}.get(axis, 1)
            checker.tp_inside_nodes(ranks, tp, stride)
        fields.update(devices=devices, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vp=vp, dp=dp, sp=sp)
        fields.update(zero=zero, fsdp=fsdp, order=order, place=place)
        _split_into(fields, layers)
        self._replicas(section, fields)
        return dp is not None

    def _degree(self, entries: Mapping[str, Entry], key: str) -> int | None:
        entry = entries.get(key)
        return None if entry is None else self._reader.integer(entry)

    def _sp(self, section: Section, tp: int, *, known: bool) -> bool:
        entry = section.entries.get("sp")
        if entry is None:
            return tp > 1
        sp = self._reader.boolean(entry)
        if sp and tp == 1 and known:
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

    def _pp_split(self, entry: Entry) -> tuple[int | None, ...] | None:
        """None in it stands for ``rest``."""
        self._reader.no_body(entry)
        values = entry.value.items if isinstance(entry.value, Bracketed) else (entry.value,)
        rest = [isinstance(v, Word) and v.text == "rest" for v in values]
        if not values or all(rest) or not all(r or isinstance(v, Number) for r, v in zip(rest, values, strict=True)):
            self._reader.wrong_type(entry, "layers of each pipeline stage such as (17, 15) or (7, rest, 7)")
            return None
        counts = [None if r else self._reader.integer_value(entry, v) for r, v in zip(rest, values, strict=True)]
        if any(c is None and not r for r, c in zip(rest, counts, strict=True)):
            return None
        return tuple(counts)

    def _fsdp(
        self, section: Section, fields: dict[str, Any], kind: str, alike: int | None, zero: int, checker: DegreeChecker
    ) -> int | None:
        """Shard-group size; 0 = off; None where it is not known, as with an unknown ``alike`` (dp x cp). ``backend =
        fsdp`` shards fully unless the plan says otherwise."""
        entry = section.entries.get("fsdp")
        if entry is None:
            full = fields.get("backend") == "fsdp" and zero == 0
            return 0 if not full or alike == 1 else alike
        self._reader.no_body(entry)
        value = entry.value
        size: int | None
        if isinstance(value, Number):
            size = self._reader.integer(entry)
            if size is None:
                return None
        elif isinstance(value, Word) and value.text in ("full", "off"):
            size = alike if value.text == "full" else 0
        else:
            word = value.text if isinstance(value, Word) else ""
            close = did_you_mean(word, ("full", "off"))
            fix = None if close is None else Fix(span=value.span, text=close)
            help_text = None if close is None else f"did you mean {close}?"
            self._reader.wrong_type(entry, "full, off or the size of the shard group", help=help_text, fix=fix)
            return None
        if size == 0:
            return 0
        if zero:
            labels = (Label(span=section.entries["zero"].span, message="also given"),)
            headline = f"{show(section.name)}: zero and fsdp both shard over dp x cp"
            self._sink.error("NRS3010", headline, entry.span, "use one of them", secondary=labels)
            return None
        if alike is None or size is None:
            return None
        if alike % size:
            legal = [d for d in range(2, min(alike, 4096) + 1) if alike % d == 0]
            headline = f"fsdp = {size} does not divide dp x cp = {alike}"
            label = f"legal: {', '.join(map(str, legal[:12]))}" if legal else "dp x cp is 1: use fsdp = off"
            checker.error("NRS3011", headline, ("fsdp",), label)
            return None
        if size == 1 and alike > 1 and kind == "train":
            headline = f"fsdp = 1 leaves {alike} replicas that never exchange gradients"
            help_text = f"fsdp = full (shards over {alike}), a divisor of {alike} above 1, or fsdp = off (all-reduce)"
            checker.error("NRS3016", headline, ("fsdp",), "a shard group of one", help=help_text)
        return size if size > 1 else 0

    def _place(self, entries: Mapping[str, Entry], devices: tuple[Device, ...] | None) -> tuple[Device, ...] | None:
        entry = entries.get("place")
        if entry is None:
            return None
        place = self._cluster.devices(entry)
        if place is None or devices is None:
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
        if least is None or dormant is None or any(fields[key] is None for key in ("dp", "fsdp", "order")):
            return
        degrees = {key: fields[key] for key in ("tp", "cp", "dp", "ep", "etp", "zero", "fsdp", "order")}
        stage = Stage(model=fields["model"], kind=fields["kind"], devices=(), **degrees)
        complete = stage.num_emus
        if least + dormant > complete:
            headline = f"{where}: min {least} and {dormant} dormant are more than its {complete} complete replica(s)"
            note = f"dp {stage.dp} in replicas of {stage.unit_dp} data-parallel rank(s) each"
            self._sink.error("NRS3023", headline, block.keyword.span, f"at most {complete}", notes=(note,))
        fields["replicas"] = Replicas(min=least, dormant=dormant)

    # -- guests

    def _as_guest(
        self, section: Section, fields: dict[str, Any], model: Model | None, host: Stage | None, checker: DegreeChecker
    ) -> bool:
        """Whether devices and degrees are known afterwards. Without a known host only what no stage ``with`` another
        may write is refused."""
        same_model = host is not None and host.model == fields["model"]
        refused = [k for k in _FROM_HOST if not (k == "pp_split" and not same_model)]
        if same_model:
            refused += ["idle"]
        for key in refused:
            if key in section.entries or key in section.blocks:
                self._from_host(section, key, host)
        if host is None:
            return False
        sound = host.name in self._sound
        host_model = self._models.find(host.model)
        fields.update({key: getattr(host, key) for key in _TAKEN_OVER})
        if same_model:
            fields["idle"] = host.idle
        if model is None or host_model is None or (same_model or model.arch == host_model.arch):
            if model is not None and host_model is not None and "pp_split" in section.entries and not same_model:
                self._from_host(section, "pp_split", host)
            return sound
        # Another architecture in the host's processes: its own layers and experts, over the host's ranks.
        if model.arch.moe is None:
            fields["ep"] = fields["etp"] = 1
        elif host_model.arch.moe is None:
            fields["etp"] = host.tp
        written = self._pp_split(section.entries["pp_split"]) if "pp_split" in section.entries else None
        if sound:  # else the host has to change, and this stage with it
            num_devices = len(host.devices)
            if not _unread(section, {"pp_split": written}, "pp_split"):
                _split_into(fields, checker.split(model.arch, host.pp, host.vp, written))
            if checker.tp(model, host.tp, num_devices, _framework(fields)):
                checker.experts(model.arch, ep=fields["ep"], etp=fields["etp"], pp=host.pp, num_devices=num_devices)
        return sound

    def _from_host(self, section: Section, key: str, host: Stage | None) -> None:
        item: Entry | Block = section.entries[key] if key in section.entries else section.blocks[key]
        span = item.span if isinstance(item, Entry) else item.keyword.span
        label = Label(span=section.entries["with"].span, message="its host")
        where = "another stage" if host is None else host.name
        headline = f"{show(section.name)} runs in the processes of {where}, which decides {key}"
        help_text = None if host is None else f"write it in {host.name}"
        self._sink.error("NRS2021", headline, span, "remove it", secondary=(label,), help=help_text)


def _framework(fields: Mapping[str, Any]) -> str | None:
    """As ``Stage.framework``, of a stage that is being read."""
    backend, engine = fields.get("backend"), fields.get("engine")
    return Stage(model="", kind="", devices=(), backend=backend, engine=engine).framework


def _split_into(fields: dict[str, Any], split: Split | None) -> None:
    fields["pp_split"] = None if split is None else split.pp_split
    fields["chunks"] = None if split is None else split.chunks


def _unread(section: Section, values: Mapping[str, object], key: str) -> bool:
    """Whether ``key`` is, or may be, written without being understood: its value is then not the default."""
    return values.get(key) is None and (key in section.entries or section.broken)
