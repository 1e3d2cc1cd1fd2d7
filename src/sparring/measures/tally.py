"""Sums that become means at the end."""

from collections import defaultdict

import torch


class Tally:
    """`add` numbers under a name, some at a time; `mean` of all of them."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, values: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """`where`: which of the values count; None: all."""
        values = values if where is None else values[where]
        self.sums[name] += float(values.double().sum())
        self.counts[name] += values.numel()

    def mean(self, name: str) -> float | None:
        """None where there was nothing."""
        return self.sums[name] / self.counts[name] if self.counts[name] else None

    def ratio(self, name: str, other: str) -> float | None:
        """Of two means; None where either is missing, or the other is 0."""
        below = self.mean(other)
        return self.mean(name) / below if below and self.counts[name] else None
