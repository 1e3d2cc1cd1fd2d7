"""The log-probability of a denoising chain, term by term.

Letters: B decisions, C executed steps of a chunk, S scored denoising steps, A action dims.
"""

from dataclasses import dataclass

import torch

from sparring.policies.heads import LOG_SQRT_2PI


@dataclass
class Terms:
    """How likely the states of a decision are: one number per position and scored step, summed over dims; [B, C, S]."""

    # float64: a sum of thousands of terms in float32 is off by more than what a ratio may be off
    log_prob: torch.Tensor
    entropy: torch.Tensor
    squares: torch.Tensor
    action_dim: int

    @classmethod
    def of(cls, mean: torch.Tensor, std: torch.Tensor, state: torch.Tensor) -> "Terms":
        """All [B, C, S, A]; a std may be smaller."""
        squares = ((state - mean) / std).square().sum(-1, dtype=torch.float64)
        volume = (std.log() + LOG_SQRT_2PI).expand_as(mean).sum(-1, dtype=torch.float64)
        return cls(-0.5 * squares - volume, volume + 0.5 * mean.shape[-1], squares, mean.shape[-1])

    def positions(self, reduction: str) -> torch.Tensor:
        # [B, C]
        return self.log_prob.mean(-1) / self.action_dim if reduction == "mean" else self.log_prob.sum(-1)

    @property
    def z2(self) -> torch.Tensor:
        return self.squares.sum(-1).float()

    @property
    def dims(self) -> torch.Tensor:
        """How many numbers of each position were scored, [B, C]."""
        return torch.full(
            self.log_prob.shape[:2], float(self.action_dim * self.log_prob.shape[2]), device=self.log_prob.device
        )
