"""Random numbers: noise keyed by (seed, env, decision), and the global generators.

A policy gets uniform numbers and turns them into a sample of its own distribution. So a result does not depend on
timing, on how envs are batched, or on the order of drawing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

# env workers import this module and must not import torch
if TYPE_CHECKING:
    import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 23  # the middle of each of 2^23 cells of (0, 1) is exact in float32, and never 0 or 1


def keyed_uniform(seed: int, envs: np.ndarray, decisions: np.ndarray, size: int) -> np.ndarray:
    """`[T, N, size]` float32 in (0, 1) for T decisions of N envs."""
    with np.errstate(over="ignore"):  # wrapping around is what a hash does
        # [1, 1, 1], then [1, N, 1], [T, N, 1], [T, N, size]
        key = _mix(np.full((1, 1, 1), seed, np.uint64) + _GOLDEN)
        key = _mix(key ^ (np.asarray(envs, np.uint64)[None, :, None] * _GOLDEN))
        key = _mix(key ^ (np.asarray(decisions, np.uint64)[:, None, None] * _GOLDEN))
        key = _mix(key + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN)
    return ((key >> np.uint64(64 - _BITS)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-_BITS)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_everything(seed: int) -> None:
    """The global generators, from which fresh weights and the envs and models of users are drawn."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict:
    """In tensors and plain values, so that reading it back never runs code."""
    import torch

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict, device: torch.device) -> None:
    import torch

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
