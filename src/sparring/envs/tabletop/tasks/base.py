"""What a task is: a scene, a start, a reward, and when it counts as done.

The backend knows no task by name: it calls these members. The tasks themselves are in reach.py, manipulate.py,
drawer.py, button.py, dual.py and explore.py, their names in tasks.py.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sparring.envs.tabletop.arm import ARM_BASE, ARM_JOINTS, FINGER_TRAVEL, FINGERS, SINGLE, Mount
from sparring.envs.tabletop.scene import Scene


class Start(NamedTuple):
    """How one episode begins."""

    # [R, 8] joints and fingers ([8] will do for one arm), [3], [k, 7] positions and quaternions
    arm: np.ndarray
    goal: np.ndarray
    objects: np.ndarray
    # [m] joints inside the objects, each as a part of its travel
    mechanisms: np.ndarray = np.zeros(0)


class Situation(NamedTuple):
    """What tasks judge by and experts act on, of n robots with R arms each."""

    # [n, R, 3], [n, 3], from the table's centre
    hands: np.ndarray
    goal: np.ndarray
    # [n, R] metres between the fingers, and metres that each is commanded to be open
    widths: np.ndarray
    grips: np.ndarray
    # [n, K, 3], [n, K, 4]
    objects: np.ndarray
    quats: np.ndarray
    # [n, m] joints inside the objects (how far a drawer is open): parts of their travel, and of it per second
    mechanisms: np.ndarray = np.zeros((0, 0))
    mechanism_speeds: np.ndarray = np.zeros((0, 0))

    # of the first arm: [n, 3], [n], [n]
    @property
    def hand(self) -> np.ndarray:
        return self.hands[:, 0]

    @property
    def width(self) -> np.ndarray:
        return self.widths[:, 0]

    @property
    def grip(self) -> np.ndarray:
        return self.grips[:, 0]


class Task(Protocol):
    name: str
    scene: Scene
    # ways to say what to do
    instructions: tuple[str, ...]
    max_episode_steps: int
    # an episode is a success when `score` was satisfied in each of its last `hold` steps
    hold: int
    # False where nothing is to be done, so that a success rate would say nothing
    reports_success: bool = True

    def start(self, rng: np.random.Generator) -> Start:
        """Draw the start of one episode."""

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        """Dense reward `[n]` in [0, 1] and whether the task is satisfied `[n]`."""

    def describe(self) -> dict[str, str]:
        """What varies between episodes, for a person to read."""


@dataclass(frozen=True)
class Sector:
    """A part of a ring around an arm's base, on the table: where the arm reaches is such a ring."""

    # metres from the axis of the base, and degrees to either side of `ahead`, which is to the left of straight ahead
    near: float
    far: float
    degrees: float
    base: tuple[float, float, float] = ARM_BASE
    ahead: float = 0.0

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """A point (x, y), uniform over the area."""
        radius = np.sqrt(rng.uniform(self.near**2, self.far**2))
        angle = np.deg2rad(self.ahead + rng.uniform(-self.degrees, self.degrees))
        return np.array([self.base[0] + radius * np.cos(angle), self.base[1] + radius * np.sin(angle)])

    def holds(self, point: np.ndarray) -> bool:
        x, y = point[0] - self.base[0], point[1] - self.base[1]
        return self.near <= np.hypot(x, y) <= self.far and abs(np.arctan2(y, x) - np.deg2rad(self.ahead)) <= np.deg2rad(
            self.degrees
        )

    def __str__(self) -> str:
        where = f"{self.ahead:g}" if self.ahead else ""
        return f"{self.near:.2f}..{self.far:.2f} m from the base, {where}+-{self.degrees:g} deg"


# in reach, and neither off the table nor in the arm's base
WIDE = Sector(0.16, 0.49, 90)


def arm_near_home(
    rng: np.random.Generator, noise: float, opening: float = FINGER_TRAVEL, mount: Mount = SINGLE[0]
) -> np.ndarray:
    """`[8]`: each joint uniform within `noise` rad of home."""
    arm = np.full(ARM_JOINTS + FINGERS, opening)
    arm[:ARM_JOINTS] = mount.home + rng.uniform(-noise, noise, ARM_JOINTS)
    return arm


def standing(point: np.ndarray, z: float, yaw: float) -> np.ndarray:
    """`[7]`: a thing that stands upright at (x, y), its centre at height `z`, turned by `yaw` rad."""
    return np.array([*point, z, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`[n, d]`, `[n, d]` -> `[n]`"""
    offset = a - b
    return np.sqrt(np.einsum("ni,ni->n", offset, offset))
