"""The names that verl, NeMo-RL and OpenRLHF give to what they measure, and what those measure.

Taken from their sources (verl ``metric_utils.py`` and ``ray_trainer.py``, NeMo-RL ``algorithms/grpo.py``, OpenRLHF
``trainer/ppo_trainer.py``). Older versions had fewer; what is missing is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

#: Whose seconds: generation, log-probabilities of the policy and of the reference, the critic's values, rewards, and
#: the updates of actor and critic.
ROLES = ("generate", "logprob", "ref", "value", "reward", "actor", "critic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """``steps``: columns that number the steps, best first; ``total``: seconds of the whole step. ``lengths``,
    ``longest``: of a step's responses. ``parts``: seconds that belong to these roles together. ``peaks``: GiB that an
    allocator handed out at most."""

    name: str
    steps: tuple[str, ...]
    total: tuple[str, ...]
    lengths: tuple[str, ...]
    prompts: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    longest: tuple[str, ...] = ()
    peaks: tuple[str, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        return frozenset((*self.total, *self.lengths, *self.longest, *self.prompts, *self.parts, *self.peaks))


VERL = Framework(
    name="verl",
    steps=("training/global_step",),
    total=("timing_s/step", "perf/time_per_step"),
    lengths=("response_length/mean",),
    longest=("response_length/max",),
    prompts=("prompt_length/mean",),
    parts={
        "timing_s/gen": ("generate",),
        "timing_s/old_log_prob": ("logprob",),
        "timing_s/ref": ("ref",),
        "timing_s/values": ("value",),
        "timing_s/reward": ("reward",),
        "timing_s/update_actor": ("actor",),
        "timing_s/update_critic": ("critic",),
    },
    peaks=("perf/max_memory_allocated_gb",),
)

NEMO_RL = Framework(
    name="NeMo-RL",
    steps=(),
    total=("timing/train/total_step_time",),
    lengths=("train/mean_gen_tokens_per_sample",),
    prompts=("train/mean_prompt_length",),
    parts={
        "timing/train/generation": ("generate",),
        "timing/train/policy_and_reference_logprobs": ("logprob", "ref"),
        "timing/train/value_inference": ("value",),
        "timing/train/reward_calculation": ("reward",),
        "timing/train/policy_training": ("actor",),
        "timing/train/value_training": ("critic",),
    },
)

OPENRLHF = Framework(
    name="OpenRLHF",
    steps=("train/global_step",),
    total=("train/timing/step_total",),
    lengths=("train/rollout/response_length_mean", "train/response_length"),
    prompts=(),
    parts={
        "train/timing/generation": ("generate",),
        "train/timing/make_experience": ("logprob", "ref", "value", "reward"),
        "train/timing/ppo_train": ("actor", "critic"),
    },
)

FRAMEWORKS = (VERL, NEMO_RL, OPENRLHF)


def framework_of(names: Collection[str]) -> Framework | None:
    """The one that uses most of these names; None where none uses any."""
    found = {framework.name: len(framework.known.intersection(names)) for framework in FRAMEWORKS}
    best = max(FRAMEWORKS, key=lambda framework: found[framework.name])
    return best if found[best.name] else None
