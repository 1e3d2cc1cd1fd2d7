"""Drawer: pull it open by its knob and leave it open."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.arm import ARM_BASE
from sparring.envs.tabletop.blocks import OBJECT, free_body, spaced
from sparring.envs.tabletop.manipulate import REACHABLE
from sparring.envs.tabletop.scene import Part, Scene
from sparring.envs.tabletop.task import Sector, Situation, Start, Task, arm_near_home, distance, standing

TRAVEL = 0.10
# where the hand grips the knob, from the middle of the cabinet with the drawer closed. The knob stands up, and the
# fingertips stay above the cabinet: a hand of any yaw grips it without touching anything else
KNOB = (0.107, 0.0, 0.0555)
_KNOB_RADIUS = 0.012
_WALL = 0.004
_BLUE, _IVORY, _RED, _INSIDE = "0.27 0.42 0.58 1", "0.93 0.92 0.88 1", "0.86 0.18 0.16 1", "0.95 0.75 0.25 1"


@dataclass(frozen=True)
class Cabinet:
    """A heavy box, open to its own +x, with a drawer in it; its joint is how far the drawer is open, 10 cm at most."""

    name: str = "cabinet"
    half: tuple[float, float, float] = (0.07, 0.06, 0.0375)
    mechanisms: tuple[str, ...] = ("drawer",)

    def part(self) -> Part:
        x, y, z = self.half
        side, lid = y - _WALL, z - _WALL
        # only the bottom touches the table: the others end a little above it
        carcass = (
            _panel(_BLUE, (0, 0, -lid), (x, y, _WALL), mass=3.0)
            + _panel(_BLUE, (0, 0, lid), (x, y, _WALL))
            + _panel(_BLUE, (0, side, 0), (x, _WALL, lid - _WALL))
            + _panel(_BLUE, (0, -side, 0), (x, _WALL, lid - _WALL))
            + _panel(_BLUE, (_WALL - x, 0, 0), (_WALL, side - _WALL, lid - _WALL))
        )
        return free_body(self, carcass + self._drawer())

    def _drawer(self) -> str:
        x, y, z = self.half
        wide, low, long = y - 0.010, z - 0.010, x - 0.006
        box = (
            _panel(_INSIDE, (0, 0, -low), (long, wide, 0.001))
            + _panel(_IVORY, (0, wide, -0.006), (long, 0.002, low - 0.006))
            + _panel(_IVORY, (0, -wide, -0.006), (long, 0.002, low - 0.006))
            + _panel(_IVORY, (-long, 0, -0.006), (0.002, wide, low - 0.006))
            + _panel(_IVORY, (x + 0.004, 0, 0.001), (_WALL, y - 0.001, z - 0.003))
        )
        # the knob reaches 22 mm above where it is gripped
        bottom, top = -0.01, KNOB[2] + 0.022 - _KNOB_RADIUS
        knob = f"""
        <geom type="box" size="0.018 0.006 0.006" pos="{KNOB[0] - 0.016} 0 {bottom}" mass="0.01" rgba="{_RED}"
          {OBJECT}/>
        <geom name="knob" type="capsule" size="{_KNOB_RADIUS}" fromto="{KNOB[0]} 0 {bottom} {KNOB[0]} 0 {top}"
          mass="0.05" rgba="{_RED}" condim="4" {OBJECT}/>"""
        # it rests a little before its stop, where every substep would pay for solving a constraint
        return f"""
      <body name="drawer">
        <joint name="drawer" type="slide" axis="1 0 0" range="-0.001 {TRAVEL}" damping="6" frictionloss="0.8"
          armature="0.02"/>{box}{knob}
      </body>"""


def _panel(rgba: str, pos: tuple, half: tuple, mass: float = 0.05) -> str:
    return f"""
      <geom type="box" pos="{spaced(pos)}" size="{spaced(half)}" mass="{mass}" rgba="{rgba}"
        friction="1 0.02 0.001" condim="4" {OBJECT}/>"""


CABINET = Cabinet()


@dataclass(frozen=True)
class Drawer(Task):
    """Open it by 7 cm or more."""

    name: str
    # where the middle of the knob's path is
    knob: Sector
    # degrees: where the front looks (0 away from the robot, -90 to its right), and up to how far to either side of that
    front: float
    spread: float
    joint_noise: float
    scene: Scene = Scene((CABINET,), marker=None)
    instructions: tuple[str, ...] = (
        "open the drawer",
        "pull the drawer open by its red knob",
        "grasp the red knob and slide the drawer out",
        "open the small blue cabinet",
    )
    max_episode_steps: int = 70
    hold: int = 5
    opening: float = 0.07

    def start(self, rng: np.random.Generator) -> Start:
        arm = arm_near_home(rng, self.joint_noise)
        while True:
            middle = self.knob.draw(rng)
            yaw = np.deg2rad(self.front + rng.uniform(-self.spread, self.spread))
            front = np.array([np.cos(yaw), np.sin(yaw)])
            centre = middle - (KNOB[0] + TRAVEL / 2) * front
            if _fits(centre, front):
                break
        cabinet = standing(centre, CABINET.half[2], yaw)
        # the knob a little further out than asked for: being just there is enough
        return Start(arm, knobs(cabinet[None], np.array([self.opening + 0.015]))[0], cabinet[None], np.zeros(1))

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        opened = np.clip(now.mechanisms[:, 0] * TRAVEL / self.opening, 0, 1)
        satisfied = opened >= 1
        near = 1 - np.tanh(8 * distance(now.hand, knob_now(now)))
        return np.where(satisfied, 1.0, 0.3 * near + 0.5 * opened), satisfied

    def describe(self) -> dict[str, str]:
        front = "any" if self.spread == 180 else f"{self.front:g} +-{self.spread:g} deg"
        return {"knob": str(self.knob), "front": front, "opening": f"{self.opening:.2f} m"}


def knob_now(now: Situation) -> np.ndarray:
    """`[n, 3]`: where the hand grips the knob, as far as the drawer is open now."""
    cabinet = np.concatenate([now.objects[:, 0], now.quats[:, 0]], axis=1)
    return knobs(cabinet, TRAVEL * now.mechanisms[:, 0])


def knobs(cabinet: np.ndarray, opening: np.ndarray) -> np.ndarray:
    """`[n, 3]`: where the knobs of cabinets at poses `[n, 7]`, which stand level, are at openings `[n]`."""
    yaw = 2 * np.arctan2(cabinet[:, 6], cabinet[:, 3])
    out = KNOB[0] + opening
    return cabinet[:, :3] + np.stack([out * np.cos(yaw), out * np.sin(yaw), np.full(len(yaw), KNOB[2])], axis=1)


def _fits(centre: np.ndarray, front: np.ndarray) -> bool:
    """A cabinet so placed stands on the table and leaves room for the arm's base; the knob's whole path is in reach.

    Of all places and yaws with the path in reach, 64 % fit.
    """
    x, y, _ = CABINET.half
    aside = np.array([-front[1], front[0]])
    path = [centre + (KNOB[0] + opening) * front for opening in np.linspace(0, TRAVEL, 11)]
    corners = [centre + a * front + b * aside for a in (-x, x) for b in (-y, y)]
    # from the nearest point of the cabinet and its open drawer
    base = np.array(ARM_BASE[:2]) - centre
    along, across = base @ front, base @ aside
    gap = np.hypot(along - np.clip(along, -x, x + TRAVEL), across - np.clip(across, -y, y))
    on_table = all(abs(corner[0]) < 0.49 and abs(corner[1]) < 0.54 for corner in corners)
    return gap > 0.10 and on_table and all(REACHABLE.holds(point) for point in path)
