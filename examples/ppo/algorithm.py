"""The arithmetic of PPO and GRPO on whole batches: rewards, advantages, losses. No process and no layout in here.

Shapes: [rows, length] over response tokens; ``mask`` says which of them were emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the algorithm; what a step consists of (prompts, mini-batches, ...) is the plan's ``workload``."""

    algorithm: str = "ppo"  # or grpo
    lr: float = 3e-3
    critic_lr: float = 4e-3
    clip: float = 0.2
    value_clip: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    entropy: float = 0.02
    max_norm: float = 1.0
    kl_target: float = 3.0  # nats a token against the reference, which starts out nearly uniform
    temperature: float = 1.0
    seed: int = 1


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of ``tokens`` [rows, length] under ``logits`` [rows, length, vocab]."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def kl_penalised(
    rewards: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """Rewards of every token less ``coefficient`` x (log-prob of the policy - of the reference)."""
    return rewards - coefficient * (old - reference) * mask


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages, and returns. Nothing follows a response's last token: its next value is 0."""
    advantages = torch.zeros_like(rewards)
    following, ahead = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for at in reversed(range(rewards.shape[1])):
        delta = rewards[:, at] + gamma * following - values[:, at]
        ahead = (delta + gamma * lam * ahead) * mask[:, at]
        advantages[:, at] = ahead
        following = values[:, at] * mask[:, at]
    return advantages, (advantages + values) * mask


def group_advantages(rewards: torch.Tensor, mask: torch.Tensor, samples: int) -> torch.Tensor:
    """GRPO: a response against the others of its prompt (``samples`` rows that follow each other)."""
    totals = (rewards * mask).sum(1).view(-1, samples)
    spread = totals.std(1, keepdim=True, unbiased=False) + 1e-4
    return ((totals - totals.mean(1, keepdim=True)) / spread).view(-1, 1) * mask


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0, deviation 1 over the tokens that count."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) / (variance + 1e-8).sqrt() * mask


def policy_loss(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    settings: Settings,
    *,
    reference: torch.Tensor | None = None,
    kl: float = 0.0,
) -> torch.Tensor:
    """Clipped surrogate and entropy bonus, summed over tokens. ``reference``: GRPO has its KL in the loss."""
    every = logits.log_softmax(-1)
    new = every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = loss + settings.entropy * (every.exp() * every).sum(-1)
    if reference is not None:
        away = reference - new
        loss = loss + kl * (away.exp() - away - 1)
    return (loss * mask).sum()


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """Squared error, with the step from the old estimate clipped; summed over tokens."""
    near = old + (values - old).clamp(-settings.value_clip, settings.value_clip)
    worse = torch.maximum((values - returns).square(), (near - returns).square())
    return 0.5 * (worse * mask).sum()


def next_kl(coefficient: float, seen: float, target: float) -> float:
    """The coefficient follows the KL that was seen (nats a token), a little each step."""
    error = min(0.2, max(-0.2, seen / target - 1))
    return coefficient * (1 + 0.1 * error)
