"""Tasks without objects to move: reaching, and the playground for exploration."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.objects import TOYS, scatter
from sparring.envs.tabletop.scene import SCENERY, SCREEN, Part, Scene
from sparring.envs.tabletop.tasks.base import WIDE, Situation, Start, Task, arm_near_home, distance

# ---- Reach: the one task without an object.


@dataclass(frozen=True)
class Reach(Task):
    """Bring the hand to a point in the air and stay there."""

    name: str
    # opposite corners of the box that goals are uniform in, metres from the centre of the table top
    low: tuple[float, float, float]
    high: tuple[float, float, float]
    # radians, each joint uniform around home
    joint_noise: float
    scene: Scene = Scene()
    instructions: tuple[str, ...] = (
        "move the hand to the green ball",
        "reach for the green ball",
        "touch the green ball with the gripper",
    )
    max_episode_steps: int = 50
    hold: int = 5
    radius: float = 0.03

    def start(self, rng: np.random.Generator) -> Start:
        return Start(arm_near_home(rng, self.joint_noise), rng.uniform(self.low, self.high), np.empty((0, 7)))

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        away = distance(now.hand, now.goal)
        satisfied = away < self.radius
        # the tanh alone is flat far away and small near by: the bonus makes arriving clearly better than hovering
        return 0.7 * (1 - np.tanh(5 * away)) + 0.3 * satisfied, satisfied

    def describe(self) -> dict[str, str]:
        spans = {axis: f"{lo:+.2f}..{hi:+.2f} m" for axis, lo, hi in zip("xyz", self.low, self.high, strict=True)}
        return {"goal " + axis: span for axis, span in spans.items()} | {"joints": f"home +-{self.joint_noise:g} rad"}


# ---- Explore: things of many shapes, a screen, and nothing to be done.


# a screen at the table's back edge beside the arm, where the head camera sees it
STAND = Part(f"""
    <geom name="{SCREEN}" type="box" size="0.006 0.16 0.11" pos="-0.47 0.37 0.125" rgba="0.10 0.11 0.13 1" {SCENERY}/>
    <geom type="box" size="0.02 0.05 0.008" pos="-0.475 0.37 0.008" rgba="0.55 0.58 0.64 1" {SCENERY}/>""")


@dataclass(frozen=True)
class Explore(Task):
    """Never rewarded and never done. The screen shows noise when env.noise_screen asks for it."""

    name: str
    joint_noise: float
    scene: Scene = Scene(TOYS, marker=None, scenery=(STAND,))
    instructions: tuple[str, ...] = (
        "look around and play with the things on the table",
        "explore the table",
        "try out what the things on the table do",
        "do whatever is interesting",
    )
    max_episode_steps: int = 100
    hold: int = 5
    reports_success: bool = False

    def start(self, rng: np.random.Generator) -> Start:
        arm = arm_near_home(rng, self.joint_noise)
        return Start(arm, np.zeros(3), scatter(rng, self.scene.objects, zones=[]))

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        n = len(now.hand)
        return np.zeros(n), np.zeros(n, bool)

    def describe(self) -> dict[str, str]:
        return {f"{len(TOYS)} things": str(WIDE), "yaw": "any"}
