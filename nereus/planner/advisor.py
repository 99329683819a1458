"""When to change the plan of a running job, to what, and whether it pays: one decision at every safe boundary.

    advisor = Advisor(plan, calibration)
    decision = advisor.observe(step=7, response_len=1810, step_s=61.0)
    if decision.plan is not None:
        job.request(decision.plan)

A plan is looked for when responses have drifted from what they were at the last look, when the pool has changed, and
when the plan would not fit at the lengths of the next step or on the nodes that stay: then it goes at once. Where none
fits on them, the job is saved and waits for nodes. A change that is not forced is made by rent or buy (``admission``):
the time that the present plan has lost against the better one is added up, and the forecast of what the change will
save (``outlook``) says how much of the stop that must reach.

Nodes with problems (``health``) are not counted on. One with a fault is left at once where a plan fits on the others.
One that is slow costs time, which is weighed as any other: steps elsewhere are expected to take what they took before
it was slow.

Predictions are used as ratios: what a framework adds to every step is in both. What the first steps under a plan show
of it is remembered. If they miss the prediction by more than a margin, and the plan before was faster, the job goes
back.

Rules in part after the Nereus paper (docs/cost-model.md); every decision is data, and replaying the observations
repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.planner.admission import RentOrBuy
from nereus.planner.calibration import Calibration
from nereus.planner.contingency import Contingency, contingencies
from nereus.planner.decisions import BACK, CHECKPOINT, GO, STAY, USUAL, Decision, Settings
from nereus.planner.health import Health, Problem
from nereus.planner.limits import Limits, Serves
from nereus.planner.looking import Keys, Looking, at_length, keys_of
from nereus.planner.outlook import Outlook
from nereus.planner.pools import nodes_of, survives, worth_trying
from nereus.planner.rl_step import step_time
from nereus.planner.search import Found
from nereus.planner.targets import Target

#: Tokens; no response is as long.
_LONGEST = 1e12


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
        settings: Settings = USUAL,
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
        self._there = nodes_of(plan) if pool is None else frozenset(pool)
        self._pool = self._there  # those that may be counted on
        self._health = Health(sick=settings.sick, well=settings.well)
        self._waits = False  # saved, for nodes
        self._num_sound = 0  # of the measured steps: the first ones, with no slow node
        self._slow: frozenset[str] = frozenset()
        self._slowdown = 1.0  # by the slow nodes
        self._reference = float(plan.workload.response_len)
        self._outlook = Outlook(num_steps)
        self._regrets = RentOrBuy(settings.trust)
        self._look: _Look | None = None
        self._measured: list[tuple[float, float]] = []  # (response length, seconds) under the present plan
        self._trial: _Trial | None = None
        self._learned = calibration  # that what follows was measured against
        self._effects: dict[Keys, float] = {}  # logarithm of measured over predicted, against the first plan's
        self._missed: list[tuple[Keys, float]] = []  # (a plan, lengths at which it missed)
        self._prepared: dict[str, Contingency] = {}
        self._prepared_for: tuple[Keys, float] | None = None
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
        problems: Mapping[str, Collection[Problem]] | None = None,
    ) -> Decision:
        """At a boundary after ``step``: mean response length of the last batch, seconds of the last step. ``plan``:
        what the job serves now; without it, what was advised last, which a change that was given up is not. ``pool``:
        nodes that are there from now on; None: as before. ``notice_s``: seconds until those leave that are not among
        them; None: they are gone. ``problems``: of GPUs, by node; None: nobody asked. Raises ValueError for what cannot
        be (``refuse``); nothing has changed then."""
        self.refuse(response_len=response_len, step_s=step_s, pool=pool, notice_s=notice_s, problems=problems)
        if plan is not None and keys_of(plan) != keys_of(self.plan):
            self._run(plan)
        if step_s is not None:
            self._measured.append((response_len, step_s))
            self._waits = False
        if problems is not None:
            self._health.observe(problems)
        self._outlook.observe(response_len)
        decision = self._decide(_Now(step, response_len, step_s, notice_s), self._there if pool is None else pool)
        self.log.append(decision)
        self._waits = decision.action == CHECKPOINT and decision.plan is None and not self.observe_only
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
        problems: Mapping[str, Collection[Problem]] | None = None,
    ) -> None:
        """Raises ValueError for what nobody can have observed."""
        if not 0 < response_len < _LONGEST or (step_s is not None and not 0 < step_s < math.inf):
            raise ValueError(f"response_len {response_len} and step_s {step_s} must be positive and finite")
        if notice_s is not None and not notice_s >= 0:
            raise ValueError(f"notice_s {notice_s} must not be negative")
        if isinstance(pool, str):
            raise ValueError(f"pool '{pool}' must be a collection of names of nodes")
        for what, names in (("pool", pool), ("problems", problems)):
            if unknown := set(names or ()) - {node.name for node in self._home.cluster.nodes}:
                raise ValueError(
                    f"{what}: the cluster of the job's first plan has no node {', '.join(sorted(unknown))}"
                )

    def replan(self, plan: Plan, lost: Collection[Device]) -> Plan:
        """What a session asks after a loss (``nereus.attach(replan=advisor.replan)``): the decision, logged as any, at
        the lengths of the last boundary, without the nodes of ``lost``. ValueError: no layout fits without them."""
        before = self.log[-1] if self.log else None
        decision = self.observe(
            step=0 if before is None else before.step,
            response_len=self._reference if before is None else before.response_len,
            plan=plan,
            pool=self._there - {device.node for device in lost},
        )
        if decision.plan is None:
            raise ValueError(decision.reason)
        return decision.plan

    def prepare(self, response_len: float, *, compiled: bool = False) -> tuple[Contingency, ...]:
        """Where to go when a node fails, for each that the plan uses; a loss at about these lengths then needs no
        search. ``compiled``: with its transition, and so the stop that this would take."""
        self.refuse(response_len=response_len)
        now = at_length(self.plan, response_len)
        found = contingencies(
            now, self.calibration, home=self._home, pool=self._pool, limits=self.limits, compiled=compiled
        )
        self._prepared = {each.node: each for each in found}
        self._prepared_for = keys_of(now), response_len
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
        self._num_sound, self._waits = 0, False
        self._regrets.moved()

    def _decide(self, now: _Now, there: Collection[str]) -> Decision:
        pool = frozenset(there).difference(self._health.unfit)
        changed = "" if pool == self._pool else "pool" if frozenset(there) != self._there else "health"
        self._there, self._pool = frozenset(there), pool
        if changed:
            self._outlook.restart()
        used = nodes_of(self.plan)
        leaving = used if self._waits else used - self._there
        faulty = used.intersection(self._health.faulty)
        if self.calibration is not self._learned:  # which knows by itself what its plans took
            self._learned, self._effects = self.calibration, {}
            self._look = self._predicted_anew(self._look)
        self._notice_slow(used)
        settled = self._settled(now.response_len)
        if settled is not None and settled.back is not None and not leaving:
            return self._stay(now, "missed", settled.reason, action=BACK, plan=settled.back)
        # What fits now and not in the next step is too late to be found out then.
        ahead = min(max(now.response_len, self._outlook.length(1)), now.response_len * (1 + self.settings.drift))
        fits = self.calibration.fits(at_length(self.plan, ahead * (1 + self.settings.headroom / 2)))
        trigger = "lost" if leaving else "memory" if not fits else changed
        if not trigger and faulty and self._look is None:
            trigger = "health"
        if not trigger and abs(now.response_len / self._reference - 1) > self.settings.drift:
            trigger = "drift"
        if trigger or settled is not None:
            self._reference = now.response_len  # whatever comes of it
            self._look = self._search(now, ahead, leaving, faulty)
        look = self._look
        if look is None:
            return self._stay(now, trigger, "lengths are about what they were")
        if leaving or not fits:
            return self._forced(now, trigger, look, leaving)
        if faulty:
            where = _told({node: self._health.faulty[node] for node in faulty})
            sound = [target for target in self._others(look, now) if not nodes_of(target.found.plan) & faulty]
            if sound:
                return self._go(now, trigger or "health", where, look, sound[0])
            if trigger:
                return self._stay(now, trigger, f"{where}; no layout fits without", considered=look.best)
        return self._weigh(now, trigger, look)

    def _weigh(self, now: _Now, trigger: str, look: _Look) -> Decision:
        """Rent or buy."""
        scale = now.step_s / look.present_s if now.step_s is not None else 1.0
        self._regrets.step({keys_of(t.found.plan): scale * self._gain_s(look, t) for t in look.best})
        for target in look.best:
            key, gain_s = keys_of(target.found.plan), scale * self._gain_s(look, target)
            if key == keys_of(self.plan) or gain_s <= 0 or self._missed_before(target.found, now.response_len):
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

    def _search(self, now: _Now, ahead: float, leaving: frozenset[str], faulty: frozenset[str]) -> _Look:
        """On the whole pool, and where the plan is if that is less; where nodes have to be left, on the others, and on
        unfit ones only if nothing fits on the fit ones."""
        present = at_length(self.plan, now.response_len)
        used = nodes_of(present)
        # Without a notice the nodes are gone, and nothing on them can be read; of what was saved everything can.
        lost = leaving if now.notice_s is None and not self._waits else frozenset[str]()
        fit, there = worth_trying(self._home, self._pool), worth_trying(self._home, self._there)
        ways = (fit, there if leaving else (used,)) if leaving or faulty else ((used, *fit),)
        look = _Look(
            best=(), present_s=step_time(present, self.calibration).seconds, length=float(present.workload.response_len)
        )
        for pools in dict.fromkeys(ways):
            found = self._looking().found(present, tuple(dict.fromkeys(pools)), ahead=ahead, lost=lost)
            if found:
                ranked = sorted(found, key=lambda t: t.stop_s - self.horizon_steps * self._gain_s(look, t))
                return replace(look, best=tuple(ranked[: self.settings.num_targets]))
        return look

    def _looking(self) -> Looking:
        return Looking(
            home=self._home,
            calibration=self.calibration,
            limits=self.limits,
            headroom=self.settings.headroom,
            count=self.settings.num_targets,
            steps=self.horizon_steps,
        )

    def _predicted_anew(self, look: _Look | None) -> _Look | None:
        if look is None:
            return None
        present = at_length(self.plan, look.length)
        present_s = step_time(present, self.calibration).seconds
        best = tuple(self._looking().target(present, target.found) for target in look.best)
        return replace(look, present_s=present_s, best=best)

    def _gain_s(self, look: _Look, target: Target) -> float:
        """Seconds a step, as predicted, and as what is known of both plans says."""
        effect = self._effects.get(keys_of(target.found.plan), 0.0) - self._effects.get(keys_of(self.plan), 0.0)
        return look.present_s - target.found.seconds * math.exp(effect) / self._faster(target.found.plan)

    def _notice_slow(self, used: frozenset[str]) -> None:
        """How much longer steps take than before some node was slow."""
        self._slow, self._slowdown = used.intersection(self._health.slow), 1.0
        if not used & self._health.ill:
            self._num_sound = len(self._measured)
        elif self._slow and self._num_sound:
            number = self.settings.missed_steps
            sound = self._ratio(self.plan, self._measured[max(0, self._num_sound - number) : self._num_sound])
            self._slowdown = max(1.0, self._ratio(self.plan, self._measured[-1:]) / sound)

    def _faster(self, plan: Plan) -> float:
        """By which factor ``plan`` is faster than predicted from the last step: it leaves the slow nodes."""
        return 1.0 if nodes_of(plan) & self._slow else self._slowdown

    def _forecast_s(self, look: _Look, target: Target) -> float:
        """What the change saves over the horizon, until the lengths make it slower or too large."""
        steps, saved_s = self.horizon_steps, 0.0
        for share in (0.25, 0.75):
            length = self._outlook.length(share * steps)
            gain_s = self._gain_s(look, target)
            if abs(length / look.length - 1) > self.settings.drift:
                before, after = at_length(self.plan, length), at_length(target.found.plan, length)
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
        ready = self._contingency(leaving, now) if now.notice_s is None and not self._waits else None
        if ready is not None and ready.plan is not None:
            plan = at_length(ready.plan, now.response_len)
            action = GO if ready.survives else CHECKPOINT
            reason = f"{ready.node} failed; the plan was ready"
            reason += f", a stop of {ready.stop_s:.1f} s" if ready.survives else ", but not all state survives"
            return self._stay(now, trigger, reason, action=action, plan=plan)
        if self._waits and look.best:
            reason = (
                f"a layout fits on {', '.join(sorted(nodes_of(look.best[0].found.plan)))}: go on from what was saved"
            )
            return self._go(now, trigger, reason, look, look.best[0], action=CHECKPOINT)
        best = self._others(look, now)
        if not best and leaving:
            return self._wait(now, trigger, leaving)
        if not best:
            reason = "no layout fits at these lengths: fewer samples, recomputation or a checkpoint remain"
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

    def _others(self, look: _Look, now: _Now) -> list[Target]:
        """Than the present plan; those that missed before only if there are no others."""
        others = [target for target in look.best if keys_of(target.found.plan) != keys_of(self.plan)]
        return [target for target in others if not self._missed_before(target.found, now.response_len)] or others

    def _wait(self, now: _Now, trigger: str, leaving: frozenset[str]) -> Decision:
        needed = self._looking().nodes_needed(now.response_len, self._there)
        num_gpus = sum(node.num_gpus for node in self._home.cluster.nodes if node.name in self._there)
        short = f"no layout fits on {', '.join(sorted(self._there)) or 'no node'} ({num_gpus} GPUs)"
        until = (
            f"{needed} nodes are needed"
            if needed is not None
            else "nor on the whole cluster: fewer samples or recomputation remain"
        )
        where = ", ".join(sorted(leaving))
        if self._waits:
            reason = f"saved; {short}: {until}"
        elif now.notice_s is None:
            reason = f"{where} failed; {short}: {until} to go on from what was saved"
        else:
            reason = f"{where} leave in {now.notice_s:.0f} s; {short}: save now; {until} to go on"
        return self._stay(now, trigger, reason, action=CHECKPOINT, nodes_needed=needed)

    def _contingency(self, leaving: frozenset[str], now: _Now) -> Contingency | None:
        if self._prepared_for is None or len(leaving) != 1:
            return None
        keys, length = self._prepared_for
        near = abs(now.response_len / length - 1) <= self.settings.drift
        return self._prepared.get(next(iter(leaving))) if near and keys == keys_of(self.plan) else None

    def _go(self, now: _Now, trigger: str, reason: str, look: _Look, target: Target, *, action: str = GO) -> Decision:
        if not self.observe_only and action == GO and self._measured:  # else nothing is tried
            expected = math.log(target.found.seconds / look.present_s)
            ratio = self._ratio(self.plan, self._measured[-self.settings.missed_steps :])
            self._trial = _Trial(before=self.plan, ratio=ratio / self._faster(target.found.plan), gain=expected)
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
        nodes_needed: int | None = None,
    ) -> Decision:
        regret_s = max((self._regrets.regret_s(keys_of(t.found.plan)) for t in considered), default=0.0)
        return Decision(
            step=now.step, response_len=now.response_len, step_s=now.step_s, trigger=trigger, action=action,
            reason=reason, horizon_steps=self.horizon_steps, considered=self._rows(considered), plan=plan,
            regret_s=regret_s, notice_s=now.notice_s, nodes_needed=nodes_needed,
            unfit=tuple(sorted(self._health.unfit.items())),
        )  # fmt: skip

    def _rows(self, found: Sequence[Target]) -> tuple[tuple[str, float, float, float], ...]:
        here = keys_of(self.plan)
        texts = ("as it is" if keys_of(t.found.plan) == here else _text(t.found) for t in found)
        return tuple((text, t.found.seconds, t.stop_s, t.payback_steps) for text, t in zip(texts, found, strict=True))

    # Learning ------------------------------------------------------------------------------------------------------

    def _settled(self, response_len: float) -> _Settled | None:
        """What the first steps under a plan say of it; once."""
        trial = self._trial
        if trial is None or len(self._measured) < self.settings.missed_steps:
            return None
        self._trial = None
        first = self._measured[: self.settings.missed_steps]
        seen = math.log(
            self._ratio(self.plan, first) / trial.ratio
        )  # against what the plan before takes, both as predicted
        key, before_key = keys_of(self.plan), keys_of(trial.before)
        effect = self._effects.get(before_key, 0.0) + seen
        self._effects[key] = (self._effects[key] + effect) / 2 if key in self._effects else effect
        before = at_length(trial.before, response_len)
        missed = seen > math.log1p(self.settings.margin) and seen + trial.gain > 0
        if not missed or nodes_of(before) - self._pool or not self.calibration.fits(before):
            return _Settled(back=None, reason="")
        self._missed.append((key, response_len))
        took_s = median(seconds for _, seconds in self._measured)
        reason = f"steps take {took_s:.1f} s, {took_s / math.exp(seen):.1f} were expected"
        return _Settled(back=before, reason=f"{reason}; before it would be {took_s / math.exp(seen + trial.gain):.1f}")

    def _ratio(self, plan: Plan, steps: Sequence[tuple[float, float]]) -> float:
        """Measured over predicted: the median over (response length, seconds)."""
        return median(s / step_time(at_length(plan, length), self.calibration).seconds for length, s in steps)

    def _missed_before(self, found: Found, response_len: float) -> bool:
        keys = keys_of(found.plan)
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


def _told(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{node}: {why}" for node, why in sorted(reasons.items()))


def _text(found: Found) -> str:
    return "; ".join(f"{stage} {{ {keys} }}" for stage, keys in found.changes.items() if keys) or "as at first"
