"""Reach: the one task without an object."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.scene import Scene
from sparring.envs.tabletop.task import Situation, Start, Task, arm_near_home, distance


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
