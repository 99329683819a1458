"""When to change the plan of a running job, to what, and whether it pays: one decision at every safe boundary.

    advisor = Advisor(plan, calibration)
    decision = advisor.observe(step=7, response_len=1810, step_s=61.0)
    if decision.plan is not None:
        job.request(decision.plan)

A plan is looked for when responses have drifted from what they were at the last look, when the pool has changed, and
when the plan would not fit at the lengths of the next step or on the nodes that stay: then it goes at once. A change
that is not forced is made by rent or buy (``admission``): the time that the present plan has lost against the better
one is added up, and the forecast of what the change will save (``outlook``) says how much of the stop that must reach.

Predictions are used as ratios: what a framework adds to every step is in both. What the first steps under a plan show
of it is remembered. If they miss the prediction by more than a margin, and the plan before was faster, the job goes
back.

Rules in part after the Nereus paper (docs/cost-model.md); every decision is data, and replaying the observations
repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median

from nereus.ir.plan import Plan, Workload
from nereus.passes.coarse import coarse
from nereus.planner.admission import RentOrBuy
from nereus.planner.calibration import Calibration
from nereus.planner.contingency import Contingency, contingencies
from nereus.planner.limits import Limits, Serves
from nereus.planner.outlook import Outlook
from nereus.planner.pools import nodes_of, on_most_nodes, survives
from nereus.planner.rl_step import step_time
from nereus.planner.search import Found, search
from nereus.planner.targets import Target

#: Tokens; no response is as long.
_LONGEST = 1e12
STAY, GO, BACK, CHECKPOINT = "stay", "go", "back", "checkpoint"

_Keys = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``drift``: share by which the mean length moves before a plan is looked for. ``share``: of what the forecast
    promises that is believed. ``trust``: in its verdict (``admission``). ``margin``: by which a measured step may miss.
    ``missed_steps``: first ones of a plan, whose median is judged. ``headroom``: by which lengths may grow before a new
    plan would not fit; one with less than half of it left is taken not to fit. ``num_targets``: plans that are
    watched."""

    drift: float = 0.1
    share: float = 0.5
    trust: float = 0.5
    margin: float = 0.1
    missed_steps: int = 3
    headroom: float = 0.3
    num_targets: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``trigger``: drift, memory, pool, lost, missed, regret or empty. ``action``: ``checkpoint`` where nodes leave
    before a change could end, or held what nothing else holds: save, or use what was saved, and start ``plan`` from it.
    ``plan``: what to go to; None to stay. ``considered``: (keys to write into the first plan, seconds a step, stop,
    steps until it pays), best first. ``horizon_steps``: for which the forecast is made. ``regret_s``: what staying has
    cost so far."""

    step: int
    response_len: float
    step_s: float | None
    trigger: str
    action: str
    reason: str
    horizon_steps: float
    considered: tuple[tuple[str, float, float, float], ...] = ()
    plan: Plan | None = None
    regret_s: float = 0.0
    notice_s: float | None = None


class Advisor:
    """``pool``: nodes of the plan's cluster that are there; None where it never changes. ``num_steps``: that the job
    will run, where it is known. ``observe_only``: decide and log, and change nothing. ``pinned``: stages whose layout
    stays as it is. ``serves``: whether the job's program can serve a stage in a layout. ``calibration`` may be replaced
    between two boundaries, but not while a change is ``trying``."""

    def __init__(
        self,
        plan: Plan,
        calibration: Calibration,
        *,
        settings: Settings = Settings(),
        pinned: Collection[str] = (),
        serves: Serves | None = None,
        observe_only: bool = False,
        pool: Collection[str] | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.plan = plan
        self.calibration = calibration
        self.settings = settings
        self.limits = Limits(pinned=frozenset(pinned), serves=serves)
        self.observe_only = observe_only
        self.log: list[Decision] = []
        self._home = plan
        self._pool = nodes_of(plan) if pool is None else frozenset(pool)
        self._reference = float(plan.workload.response_len)
        self._outlook = Outlook(num_steps)
        self._regrets = RentOrBuy(settings.trust)
        self._look: _Look | None = None
        self._measured: list[tuple[float, float]] = []  # (response length, seconds) under the present plan
        self._trial: _Trial | None = None
        self._learned = calibration  # that what follows was measured against
        self._effects: dict[_Keys, float] = {}  # logarithm of measured over predicted, against the first plan's
        self._missed: list[tuple[_Keys, float]] = []  # (a plan, lengths at which it missed)
        self._prepared: dict[str, Contingency] = {}
        self._prepared_for: tuple[_Keys, float] | None = None
        self.refuse(response_len=self._reference, pool=pool)

    def observe(
        self,
        *,
        step: int,
        response_len: float,
        step_s: float | None = None,
        plan: Plan | None = None,
        pool: Collection[str] | None = None,
        notice_s: float | None = None,
    ) -> Decision:
        """At a boundary after ``step``: mean response length of the last batch, seconds of the last step. ``plan``:
        what the job serves now; without it, what was advised last, which a change that was given up is not. ``pool``:
        nodes that are there from now on; None: as before. ``notice_s``: seconds until those leave that are not among
        them; None: they are gone. Raises ValueError for what cannot be (``refuse``); nothing has changed then."""
        self.refuse(response_len=response_len, step_s=step_s, pool=pool, notice_s=notice_s)
        if plan is not None and _keys(plan) != _keys(self.plan):
            self._run(plan)
        if step_s is not None:
            self._measured.append((response_len, step_s))
        self._outlook.observe(response_len)
        decision = self._decide(_Now(step, response_len, step_s, notice_s), self._pool if pool is None else pool)
        self.log.append(decision)
        if decision.plan is None:
            return decision
        self._regrets.moved()
        if self.observe_only:
            return replace(decision, plan=None)
        trial = self._trial
        self._run(decision.plan)
        self._trial = trial
        return decision

    def refuse(
        self,
        *,
        response_len: float,
        step_s: float | None = None,
        pool: Collection[str] | None = None,
        notice_s: float | None = None,
    ) -> None:
        """Raises ValueError for what nobody can have observed."""
        if not 0 < response_len < _LONGEST or (step_s is not None and not 0 < step_s < math.inf):
            raise ValueError(f"response_len {response_len} and step_s {step_s} must be positive and finite")
        if notice_s is not None and not notice_s >= 0:
            raise ValueError(f"notice_s {notice_s} must not be negative")
        if isinstance(pool, str):
            raise ValueError(f"pool '{pool}' must be a collection of names of nodes")
        if unknown := set(pool or ()) - {node.name for node in self._home.cluster.nodes}:
            raise ValueError(f"pool: the cluster of the job's first plan has no node {', '.join(sorted(unknown))}")

    def prepare(self, response_len: float) -> tuple[Contingency, ...]:
        """Where to go when a node fails, for each that the plan uses; a loss at about these lengths then needs no
        search."""
        self.refuse(response_len=response_len)
        now = _at_length(self.plan, response_len)
        found = contingencies(now, self.calibration, home=self._home, pool=self._pool)
        self._prepared = {each.node: each for each in found}
        self._prepared_for = _keys(now), response_len
        return found

    @property
    def trying(self) -> bool:
        """Whether the first steps of a change are still to be judged against what was expected of them."""
        return self._trial is not None

    @property
    def horizon_steps(self) -> float:
        """As long as things have been as they are."""
        return float(max(1, self._outlook.horizon_steps))

    def _run(self, plan: Plan) -> None:
        self.plan, self._measured, self._trial, self._look = plan, [], None, None
        self._regrets.moved()

    def _decide(self, now: _Now, pool: Collection[str]) -> Decision:
        changed = frozenset(pool) != self._pool
        if changed:
            self._pool = frozenset(pool)
            self._outlook.restart()
        leaving = nodes_of(self.plan) - self._pool
        if self.calibration is not self._learned:  # which knows by itself what its plans took
            self._learned, self._effects = self.calibration, {}
            self._look = self._predicted_anew(self._look)
        settled = self._settled(now.response_len)
        if settled is not None and settled.back is not None and not leaving:
            return self._stay(now, "missed", settled.reason, action=BACK, plan=settled.back)
        # What fits now and not in the next step is too late to be found out then.
        ahead = min(max(now.response_len, self._outlook.length(1)), now.response_len * (1 + self.settings.drift))
        fits = self.calibration.fits(_at_length(self.plan, ahead * (1 + self.settings.headroom / 2)))
        drifted = abs(now.response_len / self._reference - 1) > self.settings.drift
        trigger = "lost" if leaving else "memory" if not fits else "pool" if changed else "drift" if drifted else ""
        if trigger or settled is not None:
            self._reference = now.response_len  # whatever comes of it
            self._look = self._search(_at_length(self.plan, now.response_len), ahead, leaving, now.notice_s)
        look = self._look
        if look is None:
            return self._stay(now, trigger, "lengths are about what they were")
        if leaving or not fits:
            return self._forced(now, trigger, look, leaving)
        scale = now.step_s / look.present_s if now.step_s is not None else 1.0
        self._regrets.step({_keys(t.found.plan): scale * self._gain_s(look, t) for t in look.best})
        for target in look.best:
            key, gain_s = _keys(target.found.plan), scale * self._gain_s(look, target)
            if key == _keys(self.plan) or gain_s <= 0 or self._missed_before(target.found, now.response_len):
                continue
            if self._regrets.regret_s(key) < self.settings.trust * target.stop_s:
                continue
            forecast_s = self.settings.share * scale * self._forecast_s(look, target)
            if self._regrets.due(key, stop_s=target.stop_s, forecast_s=forecast_s):
                reason = f"a stop of {target.stop_s:.1f} s; staying has cost {self._regrets.regret_s(key):.1f} s"
                return self._go(now, trigger or "regret", f"{reason}, {forecast_s:.1f} s are ahead", look, target)
        reason = "no change pays yet" if trigger else "lengths are about what they were"
        return self._stay(now, trigger, reason, considered=look.best if trigger else ())

    # Looking -------------------------------------------------------------------------------------------------------

    def _search(self, present: Plan, ahead: float, leaving: frozenset[str], notice_s: float | None) -> _Look:
        """On the whole pool, and where the plan is if that is less. Searches start from the job's first plan: from one
        that is the best already they would have to look at every other to find a second."""
        found: list[Target] = []
        # Without a notice the nodes are gone, and nothing on them can be read.
        lost = leaving if notice_s is None else ()
        pools = [self._pool] if leaving else list(dict.fromkeys((nodes_of(present), self._pool)))
        length = present.workload.response_len
        roomy = _at_length(self._home, ahead * (1 + self.settings.headroom)).workload
        present_s = step_time(present, self.calibration).seconds
        for pool in pools:
            placed = on_most_nodes(replace(self._home, workload=roomy), pool, lost=lost)
            if placed is not None and (nodes_of(placed) == pool or pool == self._pool):
                best = search(placed, self.calibration, count=self.settings.num_targets, limits=self.limits).best
                found += [self._target(present, present_s, each) for each in best if self.calibration.fits(each.plan)]
        if nodes_of(present) != self._pool:  # the same degrees on other nodes often stop the job for less
            found += self._as_it_is(present, present_s, placed, roomy)
        look = _Look(best=(), present_s=present_s, length=float(length))
        ranked = sorted(found, key=lambda t: t.stop_s - self.horizon_steps * self._gain_s(look, t))
        return replace(look, best=tuple(ranked[: self.settings.num_targets]))

    def _as_it_is(self, present: Plan, present_s: float, there: Plan | None, roomy: Workload) -> list[Target]:
        if there is None:
            return []
        placed = on_most_nodes(replace(self._home, stages=present.stages, workload=roomy), self._pool)
        if placed is None or not self.calibration.fits(placed):
            return []
        plan = replace(placed, cluster=there.cluster)
        found = Found(seconds=present_s, cost=present_s, plan=plan, changes={}, stage_seconds={})
        return [self._target(present, present_s, found)]

    def _target(self, present: Plan, present_s: float, found: Found) -> Target:
        """``found`` at the lengths of ``present``, which are those of now."""
        plan = replace(found.plan, workload=present.workload)
        found = replace(found, plan=plan, seconds=step_time(plan, self.calibration).seconds)
        if _keys(found.plan) == _keys(present):
            return Target(found=found, stop_s=0.0, total_s=self.horizon_steps * found.seconds, payback_steps=0.0)
        stop_s = self.calibration.stops.stop_s(coarse(present, found.plan))
        gain_s = present_s - found.seconds
        payback = stop_s / gain_s if gain_s > 0 else math.inf
        total_s = self.horizon_steps * found.seconds + stop_s
        return Target(found=found, stop_s=stop_s, total_s=total_s, payback_steps=payback)

    def _predicted_anew(self, look: _Look | None) -> _Look | None:
        if look is None:
            return None
        present = _at_length(self.plan, look.length)
        present_s = step_time(present, self.calibration).seconds
        best = tuple(self._target(present, present_s, target.found) for target in look.best)
        return replace(look, present_s=present_s, best=best)

    def _gain_s(self, look: _Look, target: Target) -> float:
        """Seconds a step, as predicted, and as what is known of both plans says."""
        effect = self._effects.get(_keys(target.found.plan), 0.0) - self._effects.get(_keys(self.plan), 0.0)
        return look.present_s - target.found.seconds * math.exp(effect)

    def _forecast_s(self, look: _Look, target: Target) -> float:
        """What the change saves over the horizon, until the lengths make it slower or too large."""
        steps, saved_s = self.horizon_steps, 0.0
        for share in (0.25, 0.75):
            length = self._outlook.length(share * steps)
            gain_s = self._gain_s(look, target)
            if abs(length / look.length - 1) > self.settings.drift:
                before, after = _at_length(self.plan, length), _at_length(target.found.plan, length)
                if not self.calibration.fits(after):
                    break
                there = step_time(before, self.calibration).seconds
                found = replace(target.found, seconds=step_time(after, self.calibration).seconds)
                gain_s = self._gain_s(replace(look, present_s=there), replace(target, found=found))
            if gain_s <= 0:
                break
            saved_s += steps / 2 * gain_s
        return saved_s

    # Deciding ------------------------------------------------------------------------------------------------------

    def _forced(self, now: _Now, trigger: str, look: _Look, leaving: frozenset[str]) -> Decision:
        ready = self._contingency(leaving, now) if now.notice_s is None else None
        if ready is not None and ready.plan is not None:
            plan = _at_length(ready.plan, now.response_len)
            action = GO if ready.survives else CHECKPOINT
            return self._stay(now, trigger, f"{ready.node} failed; the plan was ready", action=action, plan=plan)
        best = [target for target in look.best if not self._missed_before(target.found, now.response_len)]
        best = [target for target in best or look.best if _keys(target.found.plan) != _keys(self.plan)]
        if not best:
            reason = "no layout fits at these lengths: fewer samples, recomputation or a checkpoint remain"
            if leaving:
                reason = (
                    f"no layout fits on {', '.join(sorted(self._pool)) or 'no node'}: more nodes or a checkpoint remain"
                )
            return self._stay(now, trigger, reason)
        if not leaving:
            return self._go(now, trigger, "the plan would not fit", look, best[0])
        where = ", ".join(sorted(leaving))
        if now.notice_s is None:
            alive = survives(self.plan, best[0].found.plan)
            reason = f"{where} failed" + ("" if alive else ", with the only copy of some state")
            return self._go(now, trigger, reason, look, best[0], action=GO if alive else CHECKPOINT)
        in_time = next((target for target in best if target.stop_s <= now.notice_s), None)
        if in_time is None:
            reason = f"{where} leave in {now.notice_s:.0f} s, the least stop is {min(t.stop_s for t in best):.0f} s"
            return self._go(now, trigger, reason, look, best[0], action=CHECKPOINT)
        return self._go(now, trigger, f"{where} leave in {now.notice_s:.0f} s", look, in_time)

    def _contingency(self, leaving: frozenset[str], now: _Now) -> Contingency | None:
        if self._prepared_for is None or len(leaving) != 1:
            return None
        keys, length = self._prepared_for
        near = abs(now.response_len / length - 1) <= self.settings.drift
        return self._prepared.get(next(iter(leaving))) if near and keys == _keys(self.plan) else None

    def _go(self, now: _Now, trigger: str, reason: str, look: _Look, target: Target, *, action: str = GO) -> Decision:
        if not self.observe_only and action == GO and self._measured:  # else nothing is tried
            expected = math.log(target.found.seconds / look.present_s)
            self._trial = _Trial(before=self.plan, ratio=self._ratio(self.plan, last=True), gain=expected)
        return self._stay(now, trigger, reason, action=action, plan=target.found.plan, considered=look.best)

    def _stay(
        self,
        now: _Now,
        trigger: str,
        reason: str,
        *,
        action: str = STAY,
        plan: Plan | None = None,
        considered: Sequence[Target] = (),
    ) -> Decision:
        regret_s = max((self._regrets.regret_s(_keys(t.found.plan)) for t in considered), default=0.0)
        return Decision(
            step=now.step, response_len=now.response_len, step_s=now.step_s, trigger=trigger, action=action,
            reason=reason, horizon_steps=self.horizon_steps, considered=self._rows(considered), plan=plan,
            regret_s=regret_s, notice_s=now.notice_s,
        )  # fmt: skip

    def _rows(self, found: Sequence[Target]) -> tuple[tuple[str, float, float, float], ...]:
        here = _keys(self.plan)
        texts = ("as it is" if _keys(t.found.plan) == here else _text(t.found) for t in found)
        return tuple((text, t.found.seconds, t.stop_s, t.payback_steps) for text, t in zip(texts, found, strict=True))

    # Learning ------------------------------------------------------------------------------------------------------

    def _settled(self, response_len: float) -> _Settled | None:
        """What the first steps under a plan say of it; once."""
        trial = self._trial
        if trial is None or len(self._measured) < self.settings.missed_steps:
            return None
        self._trial = None
        seen = math.log(self._ratio(self.plan) / trial.ratio)  # against what the plan before takes, both as predicted
        key, before_key = _keys(self.plan), _keys(trial.before)
        effect = self._effects.get(before_key, 0.0) + seen
        self._effects[key] = (self._effects[key] + effect) / 2 if key in self._effects else effect
        before = _at_length(trial.before, response_len)
        missed = seen > math.log1p(self.settings.margin) and seen + trial.gain > 0
        if not missed or nodes_of(before) - self._pool or not self.calibration.fits(before):
            return _Settled(back=None, reason="")
        self._missed.append((key, response_len))
        took_s = median(seconds for _, seconds in self._measured)
        reason = f"steps take {took_s:.1f} s, {took_s / math.exp(seen):.1f} were expected"
        return _Settled(back=before, reason=f"{reason}; before it would be {took_s / math.exp(seen + trial.gain):.1f}")

    def _ratio(self, plan: Plan, *, last: bool = False) -> float:
        """Measured over predicted, of the first steps under a plan or the last."""
        number = self.settings.missed_steps
        steps = self._measured[-number:] if last else self._measured[:number]
        return median(s / step_time(_at_length(plan, length), self.calibration).seconds for length, s in steps)

    def _missed_before(self, found: Found, response_len: float) -> bool:
        keys = _keys(found.plan)
        return any(
            keys == missed and abs(response_len / at - 1) <= 3 * self.settings.drift for missed, at in self._missed
        )


@dataclass(frozen=True, slots=True)
class _Now:
    step: int
    response_len: float
    step_s: float | None
    notice_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Targets, best first; what the present plan is predicted to take, and at which length."""

    best: tuple[Target, ...]
    present_s: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A change whose first steps are still to be judged. ``ratio``: measured over predicted, of the plan before.
    ``gain``: logarithm of what a step was to take over what it took."""

    before: Plan
    ratio: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    back: Plan | None
    reason: str


def _at_length(plan: Plan, response_len: float) -> Plan:
    return replace(plan, workload=replace(plan.workload, response_len=max(1, math.ceil(response_len))))


def _keys(plan: Plan) -> _Keys:
    return tuple(
        (s.name, s.tp, s.pp, s.dp, s.cp, s.ep, s.micro_batch, s.recompute, s.zero, s.fsdp, s.pp_split, s.devices)
        for s in plan.stages
    )


def _text(found: Found) -> str:
    return "; ".join(f"{stage} {{ {keys} }}" for stage, keys in found.changes.items() if keys) or "as at first"
