"""A memory that needs no learning: running means of what was seen in an episode, over short and long spans.

What a policy remembers is read only by later decisions, and a decision is scored from its own row: gradients could not
reach whatever wrote the memory. So how it is written is fixed, and policies learn how to read it.

Letters: B decisions, M numbers of memory, D numbers of what is seen.
"""

import numpy as np
import torch
from torch import nn

# decisions over which the longest trace averages; the shortest is the last decision alone
LONGEST = 100


class Traces(nn.Module):
    """Number 0 is a clock, t / (t + 1) at decision t; each other one follows what was seen in a direction of its own.

    A trace is the mean of all that was seen until that is more than its span, and an exponential average from then on:
    what was seen once counts as much as what is seen now, where one that starts from zeros would hardly show it.
    """

    def __init__(self, inputs: int, size: int):
        super().__init__()
        # [M - 1, D] of length 1, always the same: weights that have learned to read them load anywhere
        directions = np.random.default_rng(0).standard_normal((size - 1, inputs))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        self.register_buffer("directions", torch.from_numpy(directions).float(), persistent=False)
        rates = 1 / np.geomspace(LONGEST, 1, size - 1)
        self.register_buffer("rates", torch.from_numpy(rates).float(), persistent=False)

    @torch.no_grad()
    def forward(self, memory: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """As it entered a decision [B, M], and what was seen there [B, D] -> as it enters the next one [B, M]."""
        clock, traces = memory[:, :1], memory[:, 1:]
        # 1 / (t + 1): the share of the newest in a mean
        rates = torch.maximum(1 - clock, self.rates)
        return torch.cat([1 / (2 - clock), traces.lerp(seen @ self.directions.T, rates)], 1)
