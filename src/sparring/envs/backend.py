"""The numpy interface of every simulator: N robots stepped together. `Env` (env.py) turns the arrays into TensorDicts.
No backend imports torch: worker processes stay small. Letters: N robots, C steps of a chunk, A action dims, K ended
episodes."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Protocol

import numpy as np

from sparring.contract import EnvSpec

Arrays = dict[str, np.ndarray]
# [H, W, 3] uint8 for people, or what draws it when called: most of what could be looked at never is
Picture = np.ndarray | Callable[[], np.ndarray]
SEAM = 2  # half the width of the line between two cameras' pictures, pixels


def drawn(picture: Picture) -> np.ndarray:
    return picture() if callable(picture) else picture


@dataclass
class Step:
    """What one call of `Backend.step` did. Arrays are fresh: the backend keeps no reference to them."""

    observation: Arrays  # [N, ...] each; of the new episode where one ended
    reward: np.ndarray  # [N, C] one per executed step, 0 after the episode's end
    executed: np.ndarray  # [N] int64: steps of the chunk that were executed, >= 1
    # [N] bool
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    ended: np.ndarray  # [K] int64 ascending: robots whose episode ended here (terminated | truncated), already reset
    final: Arrays  # [K, ...] each: the true last observation of those episodes
    # robot -> one picture per executed step, for the robots given to `record`
    frames: dict[int, list[Picture]] = field(default_factory=dict)
    # [N] bool: did the robot touch an object in any executed step? All False where the simulator does not tell
    contact: np.ndarray | None = None

    def __post_init__(self):
        if self.contact is None:
            self.contact = np.zeros(len(self.executed), bool)


@dataclass(frozen=True)
class EpisodeSeeds:
    """The seed of each episode, a function of (seed, split, episode) only. Episode e of robot i is number `first_env +
    i + e * total_envs`, so M evaluation episodes are the same for any number of robots. The top bit is the split.
    Robots of a group (`group_size`) share their starts; `first_episode` were played before."""

    seed: int
    split: str = "train"
    first_env: int = 0
    total_envs: int = 1
    group_size: int = 1
    first_episode: int = 0

    def __call__(self, env: int, episode: int) -> int:
        number = self.first_env + env + (self.first_episode + episode) * self.total_envs
        number //= self.group_size
        low = _hash(_hash(self.seed) ^ number) & 0x7FFFFFFF
        return low | (0x80000000 if self.split == "eval" else 0)

    def to_array(self) -> np.ndarray:
        return np.array([self.seed, self.split == "eval", *astuple(self)[2:]], np.int64)

    @classmethod
    def from_array(cls, numbers: np.ndarray) -> "EpisodeSeeds":
        seed, is_eval, *placed = numbers.tolist()
        return cls(seed, "eval" if is_eval else "train", *placed)


def _hash(number: int) -> int:
    """64 well-mixed bits (SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


class Backend(Protocol):
    """N robots stepped together, with auto-reset. Constructed as `Class(config, num_envs, max_episode_steps)`."""

    num_envs: int
    spec: EnvSpec

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        """Start episode 0 of every robot; `[N, ...]` observations."""

    def step(self, action: np.ndarray) -> Step:
        """Execute chunks `[N, C, A]`, clipped to [-1, 1]; observe at their end. A robot whose episode ends skips the
        rest of its chunk and is reset at once: its k-th episode starts from `seeds(i, k)`."""

    def record(self, envs: list[int]) -> None:
        """From now on `Step.frames` carries a picture of every executed step of these robots ([] stops it)."""

    def render(self, env: int) -> np.ndarray | None:
        """A `[H, W, 3]` uint8 picture of robot `env` as it is now; None where there is nothing to draw."""

    def no_picture(self, env: int) -> str | None:
        """Why `render` gives None, and what to do about it; None, or no such method: that is not known."""

    def sketch(self, env: int) -> Callable[[], np.ndarray] | None:
        """A function that draws robot `env` as it is now, later and in any thread; None or no such method: it cannot.
        Where there is one, `Step.frames` holds such functions too."""

    def state(self) -> Arrays | None:
        """All that the future depends on, or None where the simulator cannot tell."""

    def set_state(self, state: Arrays) -> None:
        """Go back to a `state()`; the next `step` then gives bit-identical results."""

    def close(self) -> None: ...
