"""Tasks with a cube: push it, lift it."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.scene import CUBE_HALF, GREEN, RED, Cube, Marker, Scene
from sparring.envs.tabletop.task import Sector, Situation, Start, arm_near_home, distance

RED_CUBE = Cube("cube", RED)
# where a hand that points down can touch the table, with a little room to spare
REACHABLE = Sector(0.12, 0.515, 120)


@dataclass(frozen=True)
class Push:
    """Push the cube onto a disc on the table and leave it there. The gripper starts closed."""

    name: str
    cube: Sector
    goal: Sector
    # metres from the cube's start to the disc
    travel: tuple[float, float]
    # degrees to either side; a cube looks the same every 90 degrees, so 45 is any yaw
    yaw: float
    joint_noise: float
    scene: Scene = Scene((RED_CUBE,), Marker("disc", 0.05, GREEN))
    instructions: tuple[str, ...] = (
        "push the red cube onto the green disc",
        "slide the red cube to the green circle",
        "move the red block onto the green spot by pushing it",
        "shove the cube over to the green disc",
    )
    max_episode_steps: int = 60
    hold: int = 5
    radius: float = 0.04

    def start(self, rng: np.random.Generator) -> Start:
        arm = arm_near_home(rng, self.joint_noise, opening=0.0)
        cube, goal = self._draw(rng)
        return Start(arm, np.array([*goal, 0.0]), resting(cube, rng, self.yaw)[None])

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        cube = now.objects[:, 0]
        away = distance(cube[:, :2], now.goal[:, :2])
        satisfied = away < self.radius
        near = 1 - np.tanh(8 * distance(now.hand, pushing_place(cube, now.goal)))
        return (0.2 * near + 0.8 * (1 - np.tanh(8 * away)) + 0.5 * satisfied) / 1.5, satisfied

    def describe(self) -> dict[str, str]:
        low, high = self.travel
        return {"cube": str(self.cube), "yaw": _angle(self.yaw), "disc": f"{low:.2f}..{high:.2f} m from the cube"}

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Cube and goal, such that the arm also reaches the place behind the cube from where to push."""
        while True:
            cube, goal = self.cube.draw(rng), self.goal.draw(rng)
            travel = np.hypot(*(goal - cube))
            if self.travel[0] <= travel <= self.travel[1] and REACHABLE.holds(cube - 0.06 / travel * (goal - cube)):
                return cube, goal


@dataclass(frozen=True)
class Lift:
    """Grasp the cube and hold it 6 cm or more above where it stood."""

    name: str
    cube: Sector
    yaw: float
    joint_noise: float
    scene: Scene = Scene((RED_CUBE,), marker=None)
    instructions: tuple[str, ...] = (
        "lift the red cube",
        "pick up the red cube",
        "grasp the red block and raise it",
        "take the cube off the table",
    )
    max_episode_steps: int = 50
    hold: int = 5
    height: float = 0.06

    def start(self, rng: np.random.Generator) -> Start:
        arm = arm_near_home(rng, self.joint_noise)
        cube = resting(self.cube.draw(rng), rng, self.yaw)
        # a goal a little higher than asked for: being just there is enough
        return Start(arm, cube[:3] + [0.0, 0.0, self.height + 0.02], cube[None])

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        cube = now.objects[:, 0]
        risen = cube[:, 2] - CUBE_HALF
        held, satisfied = holding(now), risen > self.height
        near = 1 - np.tanh(8 * distance(now.hand, cube))
        reward = 0.3 * near + held * (0.2 + np.clip(risen / (self.height + 0.02), 0, 1) + 0.5 * satisfied)
        return reward / 2, satisfied

    def describe(self) -> dict[str, str]:
        return {"cube": str(self.cube), "yaw": _angle(self.yaw), "height": f"{self.height:.2f} m"}


def resting(point: np.ndarray, rng: np.random.Generator, yaw: float) -> np.ndarray:
    """`[7]`: a cube that stands on the table at (x, y), turned by up to `yaw` degrees."""
    half = np.deg2rad(rng.uniform(-yaw, yaw)) / 2
    return np.array([*point, CUBE_HALF, np.cos(half), 0.0, 0.0, np.sin(half)])


def holding(now: Situation) -> np.ndarray:
    """`[n]` bool: the hand is at the first object, which keeps the fingers from closing as far as they are told to.

    They stay open by the cube's side, or by up to its diagonal when it stands askew between them.
    """
    close = distance(now.hand, now.objects[:, 0]) < 0.025
    held_open = (now.width > 2 * CUBE_HALF - 0.01) & (now.width < 2 * CUBE_HALF * np.sqrt(2) + 0.004)
    return close & held_open & (2 * now.grip < now.width - 0.008)


def pushing_place(cube: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """`[n, 3]`: where the hand touches the cube from the side away from the goal."""
    towards = goal[:, :2] - cube[:, :2]
    towards = towards / np.maximum(np.linalg.norm(towards, axis=1, keepdims=True), 1e-3)
    return np.concatenate([cube[:, :2] - 0.035 * towards, np.full((len(cube), 1), 0.03)], axis=1)


def _angle(degrees: float) -> str:
    return "any" if degrees == 45 else f"+-{degrees:g} deg"
