"""Which denoising steps of a decision are random, and scored; all others follow the ODE.

`states` of a decision are what these steps went through: x before the first of them, and after each.

Letters: B decisions, S scored steps of each, K denoising steps.
"""

import torch

Rows = slice | torch.Tensor


class WholeChain:
    """Every step: the likelihood of all that was drawn."""

    # uniform numbers that choose the steps
    choices = 0

    def __init__(self, steps: int):
        self.scored = steps
        self.first_step = 0

    def first(self, batch: int, uniform: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`[B]`: the first of the S scored steps."""
        return torch.full((batch,), self.first_step, device=device)

    def at(self, step: int, first: torch.Tensor) -> tuple[Rows, int] | None:
        """Which decisions are scored at this step, and as which of their S; None: none is."""
        return (slice(None), step - self.first_step) if step >= self.first_step else None


class LastSteps(WholeChain):
    """The last S steps, each an action of its own in a denoising MDP: later ones count more."""

    def __init__(self, steps: int, scored: int, discount: float):
        self.scored = scored
        self.first_step = steps - scored
        # gamma_d^(S - 1 - k)
        self.weights = discount ** torch.arange(scored - 1, -1, -1, dtype=torch.float64).float()


class OneStep(WholeChain):
    """One step, drawn for each decision: scoring it takes one pass of the network instead of K.

    The ratio of two such scores is not that of two policies: what is learned from must be fresh.
    """

    choices = 1

    def __init__(self, steps: int):
        self.steps, self.scored = steps, 1

    def first(self, batch: int, uniform: torch.Tensor, device: torch.device) -> torch.Tensor:
        return (uniform[:, 0] * self.steps).long().clamp_max(self.steps - 1)

    def at(self, step: int, first: torch.Tensor) -> tuple[Rows, int] | None:
        rows = (first == step).nonzero()[:, 0]
        return (rows, 0) if len(rows) else None
