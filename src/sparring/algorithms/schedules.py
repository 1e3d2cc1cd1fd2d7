"""How learning rates and clip ranges change over a run. Functions of progress: nothing to save or restore."""

import math


def scheduled(kind: str, progress: float) -> float:
    """What is left of a value after `progress` in [0, 1] of a run."""
    progress = min(max(progress, 0.0), 1.0)
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if kind == "constant":
        return 1.0
    raise ValueError(f"schedule '{kind}' is unknown; one of: constant, linear, cosine")


def warmup(update: int, warmup_updates: int) -> float:
    """Rises from 1/w to 1 over the first w updates (update counts from 0)."""
    return min(1.0, (update + 1) / warmup_updates) if warmup_updates else 1.0
