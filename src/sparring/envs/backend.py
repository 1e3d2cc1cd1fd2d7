"""The numpy interface of every simulator: N robots stepped together. `Env` (env.py) converts the arrays to TensorDicts.
Backends do not import torch, which keeps worker processes small. Letters: N robots, C steps of a chunk, A action dims,
K ended episodes."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Protocol

import numpy as np

from sparring.contract import EnvSpec

Arrays = dict[str, np.ndarray]
# a [H, W, 3] uint8 video frame, or a function that draws it: most recorded frames are never shown
Picture = np.ndarray | Callable[[], np.ndarray]
SEAM = 2  # half the width of the line between the images of two cameras in a frame, pixels


def drawn(picture: Picture) -> np.ndarray:
    return picture() if callable(picture) else picture


@dataclass
class Step:
    """The result of one `Backend.step`. Its arrays are new: the backend keeps no reference to them."""

    observation: Arrays  # [N, ...] each; if an episode ended, the first observation of the next one
    reward: np.ndarray  # [N, C] one per executed step, 0 after the episode's end
    executed: np.ndarray  # [N] int64: steps of the chunk that were executed, >= 1
    # [N] bool
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    ended: np.ndarray  # [K] int64 ascending: robots whose episode ended here (terminated | truncated), already reset
    final: Arrays  # [K, ...] each: the true last observation of those episodes
    # robot -> one frame per executed step, for the robots given to `record`
    frames: dict[int, list[Picture]] = field(default_factory=dict)
    # [N] bool: the robot touched an object in an executed step; all False if the simulator does not detect contacts
    contact: np.ndarray | None = None

    def __post_init__(self):
        if self.contact is None:
            self.contact = np.zeros(len(self.executed), bool)


@dataclass(frozen=True)
class EpisodeSeeds:
    """Computes the seed of each episode from (seed, split, number) only. Episode e of robot i has the number `first_env
    + i + e * total_envs`, so M evaluation episodes are the same for any number of robots. The top bit is the split.
    Robots of a group (`group_size`) share their start states; episodes are counted from `first_episode`."""

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
        seed, is_eval, *others = numbers.tolist()
        return cls(seed, "eval" if is_eval else "train", *others)


def _hash(number: int) -> int:
    """SplitMix64: 64 well-mixed bits."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


class Backend(Protocol):
    """N robots stepped together, with auto-reset. Constructed as `Class(config, num_envs, max_episode_steps)`."""

    num_envs: int
    spec: EnvSpec

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        """Start episode 0 of every robot and return observations `[N, ...]`."""

    def step(self, action: np.ndarray) -> Step:
        """Execute chunks `[N, C, A]`, clipped to [-1, 1], and observe after the last step. A robot whose episode ends
        skips the rest of its chunk and is reset at once: its k-th episode starts from `seeds(i, k)`."""

    def record(self, envs: list[int]) -> None:
        """Put a frame of every further executed step of these robots into `Step.frames`; [] stops recording."""

    def render(self, env: int) -> np.ndarray | None:
        """Draw the current state of robot `env` as a `[H, W, 3]` uint8 frame; None if it cannot be drawn."""

    def no_picture(self, env: int) -> str | None:
        """Optional: return why `render` returns None, and how to fix it. None: the reason is unknown."""

    def sketch(self, env: int) -> Callable[[], np.ndarray] | None:
        """Optional: return a function that draws the current state of robot `env` later, in any thread; None if this is
        impossible. If it is possible, `Step.frames` holds such functions too."""

    def state(self) -> Arrays | None:
        """Return the complete state of the simulation, or None if the simulator does not provide it."""

    def set_state(self, state: Arrays) -> None:
        """Restore a `state()`; the next `step` then returns bit-identical results."""

    def close(self) -> None: ...
