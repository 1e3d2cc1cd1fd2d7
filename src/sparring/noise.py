"""Noise keyed by (seed, robot, decision).

A policy transforms these uniform numbers into a sample of its distribution. So a result does not depend on timing, on
how robots are batched, or on the order of drawing.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 23  # the middle of each of 2^23 cells of (0, 1) is exact in float32, and never 0 or 1


def keyed_uniform(seed: int, envs: np.ndarray, decisions: np.ndarray, size: int) -> np.ndarray:
    """`[T, N, size]` float32 in (0, 1) for T decisions of N robots."""
    with np.errstate(over="ignore"):  # a hash relies on wrap-around
        # [1, 1, 1], then [1, N, 1], [T, N, 1], [T, N, size]
        key = _mix(np.full((1, 1, 1), seed, np.uint64) + _GOLDEN)
        key = _mix(key ^ (np.asarray(envs, np.uint64)[None, :, None] * _GOLDEN))
        key = _mix(key ^ (np.asarray(decisions, np.uint64)[:, None, None] * _GOLDEN))
        key = _mix(key + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN)
    return ((key >> np.uint64(64 - _BITS)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-_BITS)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
