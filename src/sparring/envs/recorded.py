"""env.name=dataset: the observations and actions of recorded demonstrations, without a simulator. No torch."""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds, Step
from sparring.envs.configs import DatasetConfig
from sparring.errors import UserError


class Recorded:
    """Has a spec, as imitation needs it; nothing can act in it."""

    num_envs = 1

    def __init__(
        self,
        config: DatasetConfig,
        num_envs: int = 1,
        max_episode_steps: int | None = None,
        spec: EnvSpec | None = None,
    ):
        """`spec`: None if an env is needed in which a policy can act."""
        if spec is None:
            self._refuse()
        self.spec = spec

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self._refuse()

    def step(self, action: np.ndarray) -> Step:
        self._refuse()

    def record(self, envs: list[int]) -> None:
        """There is nothing to record."""

    def render(self, env: int) -> np.ndarray | None:
        return None

    def no_picture(self, env: int) -> str | None:
        return "env.name=dataset has no simulator"

    def sketch(self, env: int) -> Callable[[], np.ndarray] | None:
        return None

    def state(self) -> Arrays | None:
        return None

    def set_state(self, state: Arrays) -> None:
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""

    def _refuse(self) -> NoReturn:
        allowed = "it can be imitated (sparring train imitate) and its action error measured (sparring eval)"
        other = "set env.name to an env with the same observations and actions"
        raise UserError(f"env.name=dataset has no simulator, so no policy can act in it: {allowed}; {other}")
