"""Envs whose state is the seed and the actions of the current episode.

Simulators on PhysX do not give out the whole state of their solver (contacts, for example), but they repeat a
simulation exactly. A saved state is therefore restored by playing the episode again. This takes as long as the episode
took until then, and it needs no memory of the simulator's objects."""

from abc import abstractmethod
from typing import Any

import gymnasium
import numpy as np


class ReplayedEnv(gymnasium.Env):
    """Subclasses define `begin` and `advance`. Both must depend on nothing but the seed and the actions."""

    render_mode = "rgb_array"
    _seed = 0

    def __init__(self) -> None:
        self._actions: list[np.ndarray] = []  # [A] each, of the current episode

    @abstractmethod
    def begin(self, seed: int) -> dict[str, Any]:
        """Start the episode of this seed; return its first observation."""

    @abstractmethod
    def advance(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """`step` of gymnasium."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        return self._begin(int(self.np_random.integers(2**31))), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._actions.append(np.array(action, np.float32))
        return self.advance(self._actions[-1])

    def get_state(self) -> dict[str, Any]:
        # [T, A], also for T = 0
        actions = np.array(self._actions, np.float32).reshape(len(self._actions), -1 if self._actions else 0)
        return {"seed": self._seed, "actions": actions}

    def set_state(self, saved: dict[str, Any]) -> None:
        self._begin(saved["seed"])
        for action in saved["actions"]:
            self.step(action)

    def _begin(self, seed: int) -> dict[str, Any]:
        self._seed, self._actions = seed, []
        return self.begin(seed)


def pose_from_extrinsics(extrinsics: np.ndarray) -> np.ndarray:
    """`[3, 4]` or `[4, 4]`, world to camera -> `[4, 4]`, camera to world."""
    matrix = np.eye(4)
    matrix[:3] = extrinsics[:3]
    return np.linalg.inv(matrix)
