"""Explore: things of many shapes, a screen, and nothing to be done."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.scene import SCENERY, SCREEN, Part, Scene
from sparring.envs.tabletop.task import WIDE, Situation, Start, Task, arm_near_home
from sparring.envs.tabletop.things import TOYS, scatter

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
