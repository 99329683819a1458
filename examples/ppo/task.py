"""What the policy learns: to count in steps. A verifier checks every number, so no reward model is needed.

A prompt says by how much and from where (``<by 3> 7``); the answer is 0 3 6 9 2 ... (modulo 10), ``goal`` numbers long.
The verifier ends a response at its first mistake. So responses are short as long as the policy knows little, and grow
as it learns, up to what the job allows: that is why the layout of a job that was right at its start is wrong later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

VOCAB = 16  # 0..9 are the digits, 10.. say the step
PROMPT_LEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """``goal``: numbers of a full answer. Prompts are numbered; the number decides step and start."""

    goal: int = 24
    num_steps: int = 3

    @property
    def num_prompts(self) -> int:
        return 10 * self.num_steps

    def prompts(self, numbers: Sequence[int]) -> torch.Tensor:
        """[len(numbers), PROMPT_LEN]"""
        rows = [(10 + number % self.num_steps, number // self.num_steps % 10) for number in numbers]
        return torch.tensor(rows, dtype=torch.int64)

    def answers(self, prompts: torch.Tensor, length: int) -> torch.Tensor:
        """The right tokens, [rows, length]."""
        by, start = prompts[:, :1] - 9, prompts[:, 1:]
        return (start + by * torch.arange(1, length + 1)) % 10

    def rewards(self, prompts: torch.Tensor, responses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of every token, [rows, length]: 1 / goal for a right one. A row's sum lies in 0..1."""
        right = responses == self.answers(prompts, responses.shape[1])
        return right.float() * mask / self.goal
