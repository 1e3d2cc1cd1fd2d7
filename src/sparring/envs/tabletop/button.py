"""Button: press it down and keep it down."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.blocks import OBJECT, free_body
from sparring.envs.tabletop.manipulate import resting, yaw_range
from sparring.envs.tabletop.scene import Part, Scene
from sparring.envs.tabletop.task import Sector, Situation, Start, Task, arm_near_home, distance

TRAVEL = 0.012
_CAP_RADIUS, _CAP_HALF = 0.022, 0.012
_DARK, _RIM, _YELLOW = "0.17 0.18 0.22 1", "0.38 0.40 0.46 1", "0.98 0.78 0.12 1"


@dataclass(frozen=True)
class PushButton:
    """A heavy box with a round cap on a spring; its joint is how far the cap is pressed, 12 mm at most."""

    name: str = "button"
    half: tuple[float, float, float] = (0.045, 0.045, 0.02)
    mechanisms: tuple[str, ...] = ("button_press",)

    @property
    def top(self) -> float:
        """Metres from the middle of the box up to the top of the cap when nothing presses it."""
        return self.half[2] + TRAVEL + 0.008

    def part(self) -> Part:
        x, y, z = self.half
        # the cap weighs nothing to its spring, and rests at the spring's end rather than against a stop, where every
        # substep would pay for solving a constraint
        cap = f"""
      <body name="button_cap" pos="0 0 {self.top - _CAP_HALF}" gravcomp="1">
        <joint name="button_press" type="slide" axis="0 0 -1" range="-0.001 {TRAVEL}" stiffness="350" damping="8"
          armature="0.02"/>
        <geom name="button_cap" type="cylinder" size="{_CAP_RADIUS} {_CAP_HALF}" mass="0.03" rgba="{_YELLOW}"
          condim="4" {OBJECT}/>
      </body>"""
        box = f"""
      <geom name="{self.name}" type="box" size="{x} {y} {z}" mass="2" rgba="{_DARK}" friction="1 0.02 0.001" condim="4"
        {OBJECT}/>
      <geom type="cylinder" size="{_CAP_RADIUS + 0.006} 0.003" pos="0 0 {z}" mass="0" rgba="{_RIM}" contype="0"
        conaffinity="0"/>"""
        return free_body(self, box + cap)


BUTTON = PushButton()


@dataclass(frozen=True)
class Button(Task):
    """Press the cap down by 8 mm or more and hold it there. The gripper starts closed."""

    name: str
    place: Sector
    # degrees to either side; the box looks the same every 90 degrees, so 45 is any yaw
    yaw: float
    joint_noise: float
    scene: Scene = Scene((BUTTON,), marker=None)
    instructions: tuple[str, ...] = (
        "press the yellow button",
        "push the button down and hold it",
        "hold the yellow button down with the gripper",
        "put the closed hand on the button and press",
    )
    max_episode_steps: int = 50
    hold: int = 5
    depth: float = 0.008

    def start(self, rng: np.random.Generator) -> Start:
        arm = arm_near_home(rng, self.joint_noise, opening=0.0)
        box = resting(BUTTON, self.place.draw(rng), rng, self.yaw)
        # the middle of the cap's top once it is pressed far enough
        goal = box[:3] + [0.0, 0.0, BUTTON.top - self.depth]
        return Start(arm, goal, box[None], np.zeros(1))

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        pressed = np.clip(now.mechanisms[:, 0] * TRAVEL / self.depth, 0, 1)
        satisfied = pressed >= 1
        near = 1 - np.tanh(8 * distance(now.hand, cap_top(now)))
        return np.where(satisfied, 1.0, 0.4 * near + 0.4 * pressed), satisfied

    def describe(self) -> dict[str, str]:
        depth = f"{1000 * self.depth:.0f} mm"
        return {"button": str(self.place), "yaw": yaw_range(self.yaw), "depth": depth}


def cap_top(now: Situation) -> np.ndarray:
    """`[n, 3]`: the middle of the cap's top, as far as it is pressed now; the box stands level."""
    top = now.objects[:, 0].copy()
    top[:, 2] += BUTTON.top - TRAVEL * now.mechanisms[:, 0]
    return top
