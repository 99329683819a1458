"""Rollouts under way while their engine's weights change: asynchronous mode, one engine.

    rollouts = Rollouts(engine, of_plan(stage.inflight), slots=stage.max_running)
    rollouts.add("17", prompt, limit=512)
    while training:
        for done in rollouts.step():  # one step of the engine
            hand_over(done.tokens, done.logprobs, done.versions)
        if job.sync_waits("actor.train", "actor.generate"):
            with rollouts.update(job.version):
                job.sync("actor.train", "actor.generate")

What becomes of those that run is a choice of each engine:

    drain     nothing new starts, and those that run end first: all tokens of a rollout are one policy's
    requeue   they begin anew with the new weights; their tokens are thrown away: one policy's too, and the freshest
    prefill   they go on with the new weights, on keys and values that these compute from all tokens so far
    keep      they go on with the new weights, on the keys and values that the old ones left

Every token keeps the version of the policy that chose it, and its log-probability under that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

DRAIN, REQUEUE, PREFILL, KEEP = MODES = ("drain", "requeue", "prefill", "keep")


def of_plan(inflight: str, *, keep: bool = False) -> str:
    """The mode that a stage's ``inflight`` says (drain, drop, resume). ``keep``: to resume on old keys and values."""
    return {"drain": DRAIN, "drop": REQUEUE, "resume": KEEP if keep else PREFILL}[inflight]


@dataclass(slots=True)
class Rollout:
    """``versions``: of the policy that chose each token. ``restarts``: how often its tokens were thrown away."""

    name: str
    prompt: tuple[int, ...]
    limit: int  # most tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    restarts: int = 0

    @property
    def oldest(self) -> int:
        """The stalest policy that had a part in it. ValueError before its first token."""
        return min(self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What a step of an engine gave to a rollout. ``ended``: no more will come."""

    name: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


class Engine(Protocol):
    """Between two steps it is at rest: nothing of it runs."""

    def add(self, name: str, prompt: Sequence[int], limit: int) -> None:
        """``prompt`` may end with tokens that were generated before; at most ``limit`` more are wanted."""
        ...

    def step(self) -> Sequence[Emitted]:
        """One token for whichever rollouts it runs, or as many as one step gives."""
        ...

    def abort(self, names: Sequence[str]) -> None: ...

    def renew(self, version: int, *, running: bool) -> None:
        """Its weights are those of ``version`` now. No rollout that is added from here on may use what was computed
        with others; with ``running``, those that run may not either, and have it computed anew from their tokens."""
        ...


class Rollouts:
    """Of one engine, which runs at most ``slots`` at a time; the others wait here, first come, first served.
    ``version``: of the weights that it has."""

    def __init__(self, engine: Engine, mode: str, *, slots: int, version: int = 0) -> None:
        if mode not in MODES:
            raise ValueError(f"{mode} is none of {', '.join(MODES)}")
        self.engine, self.mode, self.slots, self.version = engine, mode, slots, version
        self._waiting: deque[Rollout] = deque()
        self._running: dict[str, Rollout] = {}
        self._done: list[Rollout] = []
        self._names: set[str] = set()
        self._broken = False

    def __len__(self) -> int:
        """Rollouts that nobody was given back, those that ended in an update included."""
        return len(self._waiting) + len(self._running) + len(self._done)

    def add(self, name: str, prompt: Sequence[int], limit: int) -> None:
        """ValueError where a rollout of that name has not ended."""
        self.take_up(Rollout(name=name, prompt=tuple(prompt), limit=limit))

    def take_up(self, rollout: Rollout) -> None:
        """One that another engine began (``release``): it goes on from its tokens, on keys and values made here."""
        if rollout.name in self._names:
            raise ValueError(f"rollout {rollout.name} is there already")
        self._names.add(rollout.name)
        self._waiting.append(rollout)

    def step(self) -> list[Rollout]:
        """Those that ended. Raises RuntimeError after an update that failed, until one succeeds; whatever the engine
        says of a rollout that it does not take, which is then none of these any more."""
        if self._broken:
            raise RuntimeError("the last update of this engine's weights failed: it must not serve before another one")
        while self._waiting and len(self._running) < self.slots:
            rollout = self._waiting.popleft()
            so_far = (*rollout.prompt, *rollout.tokens)
            try:
                self.engine.add(rollout.name, so_far, rollout.limit - len(rollout.tokens))
            except BaseException:
                self._names.discard(rollout.name)
                raise
            self._running[rollout.name] = rollout
        self._advance()
        return self.ended()

    def ended(self) -> list[Rollout]:
        """Those that ended and that nobody was given: in an update that let them."""
        done, self._done = self._done, []
        return done

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Around what writes the engine's weights. Where that fails the engine serves no more until it succeeds;
        rollouts that ran stay, and are treated then as this engine's mode says."""
        if self.mode == DRAIN:
            while self._running and not self._broken:
                self._advance()
        if self.mode == REQUEUE:
            self._requeue()
        self._broken = True
        yield
        self.engine.renew(version, running=self.mode == PREFILL)
        self.version = version
        self._broken = False

    def release(self) -> tuple[Rollout, ...]:
        """All that have not ended, for another engine (whose layout is another, say): none is here any more."""
        self.engine.abort(list(self._running))
        found = (*self._running.values(), *self._waiting)
        self._running.clear()
        self._waiting.clear()
        self._names.clear()
        return found

    def _requeue(self) -> None:
        self.engine.abort(list(self._running))
        for rollout in reversed(self._running.values()):  # those that came first start first
            rollout.restarts += bool(rollout.tokens)
            for values in (rollout.tokens, rollout.logprobs, rollout.versions):
                values.clear()
            self._waiting.appendleft(rollout)
        self._running.clear()

    def _advance(self) -> None:
        if not self._running:
            return
        for emitted in self.engine.step():
            rollout = self._running[emitted.name]
            rollout.tokens.extend(emitted.tokens)
            rollout.logprobs.extend(emitted.logprobs)
            rollout.versions.extend([self.version] * len(emitted.tokens))
            if emitted.ended:
                del self._running[emitted.name]
                self._names.discard(emitted.name)
                self._done.append(rollout)
