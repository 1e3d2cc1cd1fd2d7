"""The interface of a task: scene, start, reward, success condition and scripted expert. registry.py lists all tasks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sparring.envs.tabletop.scene import ARM_BASE, ARM_JOINTS, FINGER_TRAVEL, FINGERS, HOME, SINGLE, Mount, Scene


class Start(NamedTuple):
    arm: np.ndarray  # [R, 8] joints and fingers; [8] is accepted for one arm
    goal: np.ndarray  # [3]
    objects: np.ndarray  # [k, 7] positions and quaternions
    mechanisms: np.ndarray = np.zeros(0)  # [m] joints inside the objects, as parts of their travel


class Situation(NamedTuple):
    """The input of scores and experts, for n robots with R arms each."""

    hands: np.ndarray  # [n, R, 3] relative to the table's centre, like goal and objects
    goal: np.ndarray  # [n, 3]
    widths: np.ndarray  # [n, R] metres between the fingers
    grips: np.ndarray  # [n, R] commanded opening of each finger, metres
    objects: np.ndarray  # [n, K, 3]
    quats: np.ndarray  # [n, K, 4]
    # [n, m] joints inside the objects, e.g. the opening of a drawer: parts of their travel; parts per second
    mechanisms: np.ndarray = np.zeros((0, 0))
    mechanism_speeds: np.ndarray = np.zeros((0, 0))

    # the same for the first arm: [n, 3], [n], [n]
    @property
    def hand(self) -> np.ndarray:
        return self.hands[:, 0]

    @property
    def width(self) -> np.ndarray:
        return self.widths[:, 0]

    @property
    def grip(self) -> np.ndarray:
        return self.grips[:, 0]


class HandTarget(NamedTuple):
    """Targets of the hands: `[n, 3]` and `[n]`, with R arms `[n, R, 3]` and `[n, R]`."""

    point: np.ndarray
    yaw: np.ndarray  # radians about z, relative to the yaw that delta_ee_pos keeps
    grip: np.ndarray  # action of the fingers, from -1 (close) to 1 (open)
    speed: np.ndarray  # limit of a step, as a part of the largest step


class Task(Protocol):
    name: str
    scene: Scene
    instructions: tuple[str, ...]  # phrasings of the task
    max_episode_steps: int
    hold: int  # an episode is a success if `score` was satisfied in each of its last `hold` steps
    reports_success: bool = True  # False for a task that cannot succeed, so that a success rate is meaningless
    # a scripted expert that computes the next targets of the hands from positions alone; None: no expert
    expert: Callable[[Situation], HandTarget] | None = None

    def start(self, rng: np.random.Generator) -> Start:
        """Draw the start of one episode."""

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        """Return the dense reward `[n]` in [0, 1] and whether the task is satisfied `[n]`."""

    def describe(self) -> dict[str, str]:
        """Return a readable description of what varies between episodes."""


@dataclass(frozen=True)
class TabletopTask(Task):
    name: str
    joint_noise: float = field(kw_only=True)  # radians, each joint uniform around home
    hold: int = field(default=5, kw_only=True)


@dataclass(frozen=True)
class Sector:
    """A part of a ring around an arm's base, on the table."""

    near: float  # metres from the axis of the base
    far: float
    degrees: float  # to either side of `ahead`
    base: tuple[float, float, float] = ARM_BASE
    ahead: float = 0.0  # degrees to the left of straight ahead

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        radius = np.sqrt(rng.uniform(self.near**2, self.far**2))
        angle = np.deg2rad(self.ahead + rng.uniform(-self.degrees, self.degrees))
        return np.array([self.base[0] + radius * np.cos(angle), self.base[1] + radius * np.sin(angle)])

    def holds(self, point: np.ndarray) -> bool:
        x, y = point[0] - self.base[0], point[1] - self.base[1]
        aside = abs(np.arctan2(y, x) - np.deg2rad(self.ahead))
        return self.near <= np.hypot(x, y) <= self.far and aside <= np.deg2rad(self.degrees)

    def __str__(self) -> str:
        where = f"{self.ahead:g}" if self.ahead else ""
        return f"{self.near:.2f}..{self.far:.2f} m from the base, {where}+-{self.degrees:g} deg"


WIDE = Sector(0.16, 0.49, 90)  # within reach, on the table and clear of the arm's base


def arm_near_home(
    rng: np.random.Generator, noise: float, opening: float = FINGER_TRAVEL, mount: Mount = SINGLE[0]
) -> np.ndarray:
    """Draw `[8]`: each joint uniform within `noise` rad of home."""
    arm = np.full(ARM_JOINTS + FINGERS, opening)
    arm[:ARM_JOINTS] = (*HOME[:-1], HOME[-1] - mount.hand_yaw) + rng.uniform(-noise, noise, ARM_JOINTS)
    return arm


def standing(point: np.ndarray, z: float, yaw: float) -> np.ndarray:
    """The pose `[7]` of an object that stands upright at (x, y), its centre at height `z`, turned by `yaw` rad."""
    return np.array([*point, z, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    offset = a - b
    return np.sqrt(np.einsum("ni,ni->n", offset, offset))


def rotation_columns(quat: np.ndarray) -> np.ndarray:
    """Unit quaternions `[..., 4]` -> the first two columns of their rotation matrices `[..., 6]`."""
    w, x, y, z = np.moveaxis(quat, -1, 0)
    first = [1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)]
    second = [2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)]
    return np.stack(first + second, axis=-1)


def grasp(
    hand: np.ndarray, grip: np.ndarray, place: np.ndarray, pressed: float, over: float = 0.065
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move hands `[..., 3]` above a place `[..., 3]`, lower and close them; `grip` `[...]` is the commanded opening.
    Returns targets, finger actions `[...]`, and `[...]` bool: the hand is at the place with `grip` below `pressed`."""
    offset = hand - place
    aside, away = np.linalg.norm(offset[..., :2], axis=-1), np.linalg.norm(offset, axis=-1)
    below = offset[..., 2] < over - 0.02
    point = place.copy()
    point[..., 2] += np.where(aside < np.where(below, 0.02, 0.012), 0.0, over)
    around = away < 0.025
    closing = (away < 0.012) | (around & (grip < 0.9 * FINGER_TRAVEL))
    return point, np.where(closing, -1.0, 1.0), around & (grip < pressed)


@dataclass(frozen=True)
class Reach(TabletopTask):
    """Bring the hand to a point in the air and stay there."""

    low: tuple[float, float, float]  # opposite corners of the box of goals, metres
    high: tuple[float, float, float]
    scene: Scene = Scene()
    instructions: tuple[str, ...] = (
        "move the hand to the green ball",
        "reach for the green ball",
        "touch the green ball with the gripper",
    )
    max_episode_steps: int = 50
    radius: float = 0.03

    def start(self, rng: np.random.Generator) -> Start:
        return Start(arm_near_home(rng, self.joint_noise), rng.uniform(self.low, self.high), np.empty((0, 7)))

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        away = distance(now.hand, now.goal)
        satisfied = away < self.radius
        # the bonus makes a hand at the goal better than one that hovers near it
        return 0.7 * (1 - np.tanh(5 * away)) + 0.3 * satisfied, satisfied

    @staticmethod
    def expert(now: Situation) -> HandTarget:
        n = len(now.hand)
        return HandTarget(now.goal, np.zeros(n), np.zeros(n), np.ones(n))

    def describe(self) -> dict[str, str]:
        spans = {axis: f"{lo:+.2f}..{hi:+.2f} m" for axis, lo, hi in zip("xyz", self.low, self.high, strict=True)}
        return {"goal " + axis: span for axis, span in spans.items()} | {"joints": f"home +-{self.joint_noise:g} rad"}
