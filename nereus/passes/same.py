"""Models that hold equal weights now, because the job says so.

A plan carries no version: that a new reference model starts as the actor, at version 0, cannot follow from two plans.
Where the job states it, copies of both models are copies of one: each is a source of the other's weights. Only weights
are stated to be equal, so one of the two has nothing else (a frozen model).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nereus.ir.diagnostic import Diagnostic, Severity
from nereus.ir.holdings import Holdings
from nereus.ir.plan import Model, Plan

#: (model, model that holds the same weights now)
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Same:
    """``pairs``: (the model whose name stands for both, the other)."""

    pairs: tuple[Pair, ...] = ()

    @property
    def name_of(self) -> Mapping[str, str]:
        return {other: name for name, other in self.pairs}

    def united(self, holdings: Holdings) -> Holdings:
        """Both models' copies under one name."""
        names = self.name_of
        if not names:
            return holdings
        return replace(holdings, sets=tuple(replace(s, model=names.get(s.model, s.model)) for s in holdings.sets))


def stated_same(
    old: Plan, new: Plan, old_holdings: Holdings, new_holdings: Holdings, pairs: Iterable[Pair]
) -> tuple[Same, list[Diagnostic]]:
    """What the job states, in order, and why it cannot be (NRS5010)."""
    found: list[Pair] = []
    errors: list[Diagnostic] = []
    for one, other in dict.fromkeys(pairs):
        reason = _wrong(old, new, (one, other))
        if reason is None:
            more = {m: _more_than_weights(m, old_holdings, new_holdings) for m in (one, other)}
            held = {m: bool(old_holdings.of_model(m)) for m in (one, other)}
            others = {pair[1] for pair in found}
            if more[one] and more[other]:
                reason = f"both keep more than weights: {more[one]}; {more[other]}"
            elif not (held[one] or held[other]):
                reason = "the old plan holds neither, so there is nothing to take the weights from"
            else:
                # The name of the one that keeps more: masters and moments are its own.
                swap = more[other] or (held[other] and not held[one] and not more[one])
                name, same = (other, one) if swap else (one, other)
                if name in others or same in others | {pair[0] for pair in found}:
                    reason = "one of them is already said to be the same as a third: state each beside the same model"
                else:
                    found.append((name, same))
        if reason is not None:
            errors.append(
                Diagnostic(
                    code="NRS5010",
                    severity=Severity.ERROR,
                    headline=f"{one} and {other} cannot hold the same weights: {reason}",
                    notes=("the job states that both are equal now; only weights of one shape and dtype can be",),
                    help="Name two models of one shape and precision, one of them frozen, that are equal now.",
                )
            )
    return Same(tuple(found)), errors


def _wrong(old: Plan, new: Plan, pair: Pair) -> str | None:
    if pair[0] == pair[1]:
        return "they are one model"
    models: list[Model] = []
    for name in pair:
        model = next((m for plan in (new, old) for m in plan.models if m.name == name), None)
        if model is None:
            return f"neither plan has a model {name}"
        models.append(model)
    kinds = [(m.arch, m.head, m.lora) for m in models]
    if kinds[0] != kinds[1]:
        return "they have other tensors"
    if models[0].precision != models[1].precision:
        return f"{pair[0]} is {models[0].precision} and {pair[1]} is {models[1].precision}"
    return None


def _more_than_weights(model: str, *sides: Holdings) -> str:
    """A state set that keeps more, in words."""
    for side in sides:
        for state_set in side.of_model(model):
            more = [slot.name for slot in state_set.slots if slot.name != "weight"]
            if more:
                return f"{state_set.stage} has {', '.join(more)}"
    return ""
