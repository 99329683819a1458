"""Parallel degrees of one stage against its devices and its model: what does not fit, and what would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nereus.ir.arch import Arch
from nereus.ir.cluster import Device
from nereus.ir.diagnostic import Fix, Label, Span
from nereus.ir.plan import Model, Workload
from nereus.lang.sink import Sink, listing
from nereus.lang.split import Split, SplitError, even_split, spread
from nereus.models.batch import accumulation, legal_dp, legal_micro_batches
from nereus.models.legality import etp_refusals, legal_ep, legal_etp, legal_tp, tp_refusals


class DegreeChecker:
    """Messages name the stage; carets go to the key that would have to change.

    ``spans``: of the stage's keys, and of its model as ``model``. ``levels``: number of each file, base first. Where a
    variant changes one of the keys that do not fit together, the caret goes there: the base was right before."""

    def __init__(
        self,
        stage: str,
        spans: Mapping[str, Span],
        head: Span,
        sink: Sink,
        levels: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._stage = stage
        self._spans = spans
        self._head = head
        self._sink = sink
        self._levels = levels

    def key_at(self, *keys: str) -> str | None:
        """The one of ``keys`` that the last file writes; the first of several."""
        written = [key for key in keys if key in self._spans]
        return max(written, key=lambda key: self._level(self._spans[key]), default=None)

    def at(self, *keys: str) -> Span:
        key = self.key_at(*keys)
        return self._head if key is None else self._spans[key]

    def _level(self, span: Span) -> int:
        return self._levels.get(span.source.path, 0)

    def _fix(self, key: str, text: str, *others: str) -> Fix | None:
        """None where ``key`` stands in an older file than the caret at one of ``key`` and ``others``."""
        if key not in self._spans or self.key_at(key, *others) != key:
            return None
        return Fix(span=self._spans[key], text=text)

    def error(self, code: str, headline: str, keys: Sequence[str], label: str = "", **more: object) -> None:
        self._sink.error(code, f"{self._stage}: {headline}", self.at(*keys), label, **more)

    def tp(self, model: Model, tp: int, num_devices: int | None, framework: str | None) -> bool:
        """``framework``: whose rules cut the model (``Stage.framework``)."""

        def refusals(degree: int) -> tuple[str, ...]:
            return tp_refusals(model.arch, degree, head=model.head, backend=framework)

        reasons = refusals(tp)
        if not reasons:
            return True
        legal = legal_tp(model.arch, head=model.head, backend=framework)
        others: list[str] = []
        for d in range(2, 65):
            asked_for = model.arch.num_heads % d == 0 or (num_devices is not None and num_devices % d == 0)
            if d != tp and d not in legal and asked_for and len(others) < 8:
                others.append(f"tp = {d}: {'; '.join(refusals(d))}")
        notes = (*reasons, f"legal tp: {', '.join(map(str, legal))}", *others)
        best = max((d for d in legal if d <= tp), default=1)
        fix = self._fix("tp", f"tp = {best}", "model")
        headline = f"tp = {tp} cannot cut {model.source or model.name}"
        label = f"legal: {', '.join(map(str, legal))}"
        self.error("NRS3005", headline, ("tp", "with", "model"), label, notes=notes, help=f"write tp = {best}", fix=fix)
        return False

    def count(self, num_devices: int, tp: int, pp: int, cp: int) -> int | None:
        """dp, or None after an error."""
        unit = tp * pp * cp
        if num_devices % unit == 0:
            return num_devices // unit
        product = " x ".join(f"{name} {value}" for name, value in (("tp", tp), ("pp", pp), ("cp", cp)) if value > 1)
        below, above = num_devices // unit * unit, (num_devices // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        headline = f"{num_devices} GPUs do not divide by {product}" + (f" = {unit}" if " x " in product else "")
        help_text = f"the nearest counts that do are {near}" if below else f"it needs at least {above} GPUs"
        data = (("num_devices", num_devices), ("unit", unit))
        keys = ("on", *(name for name, value in (("tp", tp), ("pp", pp), ("cp", cp)) if value > 1))
        key = self.key_at(*keys)
        gpus = f"{num_devices} GPUs"
        label = gpus
        secondary: tuple[Label, ...] = ()
        if key not in (None, "on"):  # a variant that changes a degree
            label = f"makes {unit} GPUs a replica"
            secondary = (Label(span=self._spans["on"], message=gpus),) if "on" in self._spans else ()
        self.error("NRS3003", headline, keys, label, help=help_text, data=data, secondary=secondary)
        return None

    def written_dp(self, written: int, dp: int, num_devices: int, tp: int, pp: int, cp: int) -> bool:
        if written == dp:
            return True
        note = f"dp = {num_devices} GPUs / (tp {tp} x pp {pp} x cp {cp}) = {dp}"
        fix = Fix(span=self._spans["dp"], text=f"dp = {dp}")
        headline = f"dp = {written} disagrees with its devices, which make dp {dp}"
        self.error("NRS3004", headline, ("dp",), f"should be {dp}", notes=(note,), help="leave dp out", fix=fix)
        return False

    def split(self, arch: Arch, pp: int, vp: int, written: Sequence[int | None] | None) -> Split | None:
        """Which layers lie where, or None after an error. ``written``: ``pp_split``, None in it = ``rest``."""
        layers = arch.num_layers
        if pp > layers:
            headline = f"pp = {pp} is more than the {layers} layers of its model"
            self.error("NRS3008", headline, ("pp", "with", "model"), f"at most {layers}")
            return None
        if vp > 1 and pp == 1:
            self.error("NRS3017", f"vp = {vp} needs a pipeline, and pp is 1", ("vp",), "remove it")
            return None
        # What would come out, by stages where there is no room for chunks.
        parts = pp * vp if pp * vp <= layers else pp
        example = ", ".join(map(str, even_split(layers, parts)))
        if written is None:
            if layers % pp:
                legal = [d for d in range(1, min(layers, 128) + 1) if layers % d == 0]
                headline = f"pp = {pp} would lose layers: {layers} layers do not divide by {pp}"
                notes = (f"pp that divide: {', '.join(map(str, legal))}",)
                fix = self._fix("pp", f"pp = {pp}  pp_split = ({example})", "model")
                help_text = f"say how they are split, stage {self._stage} {{ pp_split = ({example}) }}"
                help_text += ", or write a pp that divides"
                keys = ("pp", "with", "model")
                label = f"{layers} layers / {pp}"
                self.error("NRS3008", headline, keys, label, notes=notes, help=help_text, fix=fix)
                return None
            found: tuple[int, ...] = (layers // pp,) * pp
        else:
            try:
                found = spread(written, layers, pp, vp)
            except SplitError as error:
                help_text = f"for instance pp_split = ({example}), or pp_split = default"
                at = ("pp_split", "pp", "vp", "model")
                self.error("NRS3009", f"pp_split has {error}", at, str(error), help=help_text)
                return None
        if len(found) == pp * vp:
            return Split.of_chunks(found, pp, vp)
        uneven = next((n for n in found if n % vp), None)
        if uneven is not None:
            legal = [d for d in range(1, 65) if all(n % d == 0 for n in found)]
            headline = f"vp = {vp} does not divide a pipeline stage of {uneven} layers"
            notes = (f"legal vp: {', '.join(map(str, legal))}",)
            chunks = f"say the layers of every chunk: pp_split = ({example})" if parts > pp else None
            self.error("NRS3017", headline, ("vp", "pp_split"), "does not come out", notes=notes, help=chunks)
            return None
        return Split.of_chunks(tuple(n // vp for _ in range(vp) for n in found), pp, vp)

    def experts(self, arch: Arch, *, ep: int, etp: int, pp: int, num_devices: int | None) -> bool:
        """``num_devices``: None where they or a degree are not known; then only what the model says is checked."""
        moe = arch.moe
        if moe is None:
            for key, value in (("ep", ep), ("etp", etp)):
                if value > 1:
                    self.error("NRS3012", f"{key} = {value}, but its model has no experts", (key,), "remove it")
            return ep == 1 and etp == 1
        good = True
        if ep not in legal_ep(arch, limit=max(ep, 256)):
            headline = f"ep = {ep} does not divide {moe.num_experts} experts"
            self.error("NRS3013", headline, ("ep",), f"legal: {', '.join(map(str, legal_ep(arch)))}")
            good = False
        if etp_refusals(arch, etp):
            headline = f"etp = {etp} does not divide the expert width {moe.expert_ffn}"
            legal = legal_etp(arch)
            self.error("NRS3013", headline, ("etp", "tp"), f"legal: {', '.join(map(str, legal))}")
            good = False
        group = 0 if num_devices is None else num_devices // pp
        if good and num_devices is not None and num_devices % pp == 0 and group % (ep * etp):
            legal = tuple(d for d in legal_ep(arch) if group % (d * etp) == 0)
            headline = f"ep {ep} x etp {etp} does not divide the {group} GPUs of a pipeline stage (tp x cp x dp)"
            help_text = f"legal ep with etp {etp}: {', '.join(map(str, legal)) or 'none'}"
            self.error("NRS3013", headline, ("ep", "etp", "tp"), "does not come out", help=help_text)
            good = False
        return good

    def expert_shards(self, *, shards: int, expert_dp: int) -> bool:
        """FSDP groups of experts lie inside expert dp, and each must be complete."""
        size = min(shards, expert_dp)
        if not size or expert_dp % size == 0:
            return True
        legal = [d for d in range(2, expert_dp + 1) if expert_dp % d == 0]
        headline = f"fsdp = {shards} does not divide expert dp {expert_dp}"
        label = f"legal: {', '.join(map(str, legal[:12]))}"
        self.error("NRS3011", headline, ("fsdp", "ep"), label, notes=("expert dp = GPUs / (pp x ep x etp)",))
        return False

    def batch(self, workload: Workload, *, dp: int, micro_batch: int, by_tokens: bool) -> bool:
        """mini_batch = dp x micro_batch x accumulation."""
        mini_batch, per = workload.mini_batch, 1 if by_tokens else micro_batch
        if accumulation(mini_batch, dp, per) is not None:
            return True
        notes, fix, help_text = [], None, None
        if not by_tokens and (legal := legal_micro_batches(mini_batch, dp)):
            notes.append(f"legal micro_batch at dp {dp}: {', '.join(map(str, legal))}")
            best = max(d for d in legal if d <= micro_batch)
            help_text = f"micro_batch = {best}, {mini_batch // (dp * best)} times, is the same update in no more memory"
            fix = self._fix("micro_batch", f"micro_batch = {best}", "on", "with")
        if near := legal_dp(mini_batch, dp, per):
            suffix = "" if by_tokens else f" at micro_batch {micro_batch}"
            notes.append(f"nearest legal dp{suffix}: {listing(sorted(near), 'or')}")
        what = f"dp {dp}" if by_tokens else f"dp {dp} x micro_batch {micro_batch} = {dp * micro_batch}"
        headline = f"mini_batch {mini_batch} does not come out: it is no multiple of {what}"
        more: dict[str, object] = {"notes": tuple(notes), "help": help_text, "fix": fix}
        self.error("NRS3007", headline, ("micro_batch", "on", "with"), "does not divide mini_batch", **more)
        return False

    def tp_inside_nodes(self, ranks: Sequence[Device], tp: int, stride: int) -> None:
        """Warns where ranks of one tp group lie on several nodes. ``stride``: distance of neighbours in a group."""
        if tp == 1:
            return
        block = tp * stride
        crossing: list[int] = []
        for base in range(0, len(ranks), block):
            for first in range(base, min(base + stride, len(ranks))):
                node = ranks[first].node
                if any(ranks[first + i * stride].node != node for i in range(1, tp)):
                    crossing.append(first)
        if not crossing:
            return
        nodes = list(dict.fromkeys(ranks[crossing[0] + i * stride].node for i in range(tp)))
        shown = listing(nodes if len(nodes) <= 4 else [*nodes[:3], f"{len(nodes) - 3} more"])
        headline = f"{self._stage}: tp = {tp} crosses nodes in {len(crossing)} of {len(ranks) // tp} groups"
        notes = (f"the first such group lies on {shown}",)
        help_text = "tensor parallelism exchanges activations in every layer: keep it within the GPUs of a node"
        self._sink.warning("NRS3006", headline, self.at("tp", "order", "on"), "slow links", notes=notes, help=help_text)
