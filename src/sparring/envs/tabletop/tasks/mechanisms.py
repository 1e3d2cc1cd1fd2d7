"""Tasks with mechanisms: a button and a drawer."""

from dataclasses import dataclass

import numpy as np

from sparring.envs.tabletop.scene import ARM_BASE, OBJECT, Part, Scene, spaced
from sparring.envs.tabletop.tasks import base
from sparring.envs.tabletop.tasks.manipulate import REACHABLE, resting, yaw_range

_BUTTON_TRAVEL = 0.012
_CAP_RADIUS, _CAP_HALF = 0.022, 0.012
_DARK, _RIM, _YELLOW = "0.17 0.18 0.22 1", "0.38 0.40 0.46 1", "0.98 0.78 0.12 1"


@dataclass(frozen=True)
class _PushButton:
    """A heavy box with a round cap on a spring; its joint is the depth to which the cap is pressed, 12 mm at most."""

    name: str = "button"
    half: tuple[float, float, float] = (0.045, 0.045, 0.02)
    mechanisms: tuple[str, ...] = ("button_press",)

    @property
    def top(self) -> float:
        """Metres from the middle of the box up to the top of the released cap."""
        return self.half[2] + _BUTTON_TRAVEL + 0.008

    def part(self) -> Part:
        x, y, z = self.half
        # gravity is compensated and the cap rests before the end of its range: a stop would cost solver time
        cap = f"""
      <body name="button_cap" pos="0 0 {self.top - _CAP_HALF}" gravcomp="1">
        <joint name="button_press" type="slide" axis="0 0 -1" range="-0.001 {_BUTTON_TRAVEL}" stiffness="350"
          damping="8" armature="0.02"/>
        <geom name="button_cap" type="cylinder" size="{_CAP_RADIUS} {_CAP_HALF}" mass="0.03" rgba="{_YELLOW}"
          condim="4" {OBJECT}/>
      </body>"""
        box = f"""
      <geom name="{self.name}" type="box" size="{x} {y} {z}" mass="2" rgba="{_DARK}" friction="1 0.02 0.001" condim="4"
        {OBJECT}/>
      <geom type="cylinder" size="{_CAP_RADIUS + 0.006} 0.003" pos="0 0 {z}" mass="0" rgba="{_RIM}" contype="0"
        conaffinity="0"/>"""
        return Part.free_body(self, box + cap)


_BUTTON = _PushButton()


@dataclass(frozen=True)
class Button(base.TabletopTask):
    """Press the cap down by 8 mm or more and hold it there. The gripper starts closed."""

    place: base.Sector
    yaw: float  # degrees to either side; the box looks the same every 90 degrees, so 45 is any yaw
    scene: Scene = Scene((_BUTTON,), marker=None)
    instructions: tuple[str, ...] = (
        "press the yellow button",
        "push the button down and hold it",
        "hold the yellow button down with the gripper",
        "put the closed hand on the button and press",
    )
    max_episode_steps: int = 50
    depth: float = 0.008

    def start(self, rng: np.random.Generator) -> base.Start:
        arm = base.arm_near_home(rng, self.joint_noise, opening=0.0)
        box = resting(_BUTTON, self.place.draw(rng), rng, self.yaw)
        goal = box[:3] + [0.0, 0.0, _BUTTON.top - self.depth]
        return base.Start(arm, goal, box[None], np.zeros(1))

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        pressed = np.clip(now.mechanisms[:, 0] * _BUTTON_TRAVEL / self.depth, 0, 1)
        satisfied = pressed >= 1
        near = 1 - np.tanh(8 * base.distance(now.hand, _cap_top(now)))
        return np.where(satisfied, 1.0, 0.4 * near + 0.4 * pressed), satisfied

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        n, cap = len(now.hand), _cap_top(now)
        over = base.distance(now.hand[:, :2], cap[:, :2]) < 0.012
        point = cap.copy()
        point[:, 2] = np.where(over, now.goal[:, 2], cap[:, 2] + 0.04)
        return base.HandTarget(point, np.zeros(n), -np.ones(n), np.ones(n))

    def describe(self) -> dict[str, str]:
        return {"button": str(self.place), "yaw": yaw_range(self.yaw), "depth": f"{1000 * self.depth:.0f} mm"}


def _cap_top(now: base.Situation) -> np.ndarray:
    top = now.objects[:, 0].copy()
    top[:, 2] += _BUTTON.top - _BUTTON_TRAVEL * now.mechanisms[:, 0]
    return top


_DRAWER_TRAVEL = 0.10
# grasp point of the knob relative to the middle of the closed cabinet: a hand of any yaw touches nothing else
_KNOB = (0.107, 0.0, 0.0555)
_KNOB_RADIUS = 0.012
_WALL = 0.004
_BLUE, _IVORY, _RED, _INSIDE = "0.27 0.42 0.58 1", "0.93 0.92 0.88 1", "0.86 0.18 0.16 1", "0.95 0.75 0.25 1"


@dataclass(frozen=True)
class _Cabinet:
    """A heavy box, open at its +x side, with a drawer in it; its joint is the opening of the drawer, 10 cm at most."""

    name: str = "cabinet"
    half: tuple[float, float, float] = (0.07, 0.06, 0.0375)
    mechanisms: tuple[str, ...] = ("drawer",)

    def part(self) -> Part:
        x, y, z = self.half
        side, lid = y - _WALL, z - _WALL
        carcass = (  # only the bottom touches the table: the other panels end slightly above it
            _panel(_BLUE, (0, 0, -lid), (x, y, _WALL), mass=3.0)
            + _panel(_BLUE, (0, 0, lid), (x, y, _WALL))
            + _panel(_BLUE, (0, side, 0), (x, _WALL, lid - _WALL))
            + _panel(_BLUE, (0, -side, 0), (x, _WALL, lid - _WALL))
            + _panel(_BLUE, (_WALL - x, 0, 0), (_WALL, side - _WALL, lid - _WALL))
        )
        return Part.free_body(self, carcass + self._drawer())

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
        bottom, top = -0.01, _KNOB[2] + 0.022 - _KNOB_RADIUS  # the knob ends 22 mm above its grasp point
        knob = f"""
        <geom type="box" size="0.018 0.006 0.006" pos="{_KNOB[0] - 0.016} 0 {bottom}" mass="0.01" rgba="{_RED}"
          {OBJECT}/>
        <geom name="knob" type="capsule" size="{_KNOB_RADIUS}" fromto="{_KNOB[0]} 0 {bottom} {_KNOB[0]} 0 {top}"
          mass="0.05" rgba="{_RED}" condim="4" {OBJECT}/>"""
        return f"""
      <body name="drawer">
        <joint name="drawer" type="slide" axis="1 0 0" range="-0.001 {_DRAWER_TRAVEL}" damping="6" frictionloss="0.8"
          armature="0.02"/>{box}{knob}
      </body>"""


def _panel(rgba: str, pos: tuple, half: tuple, mass: float = 0.05) -> str:
    return f"""
      <geom type="box" pos="{spaced(pos)}" size="{spaced(half)}" mass="{mass}" rgba="{rgba}"
        friction="1 0.02 0.001" condim="4" {OBJECT}/>"""


_CABINET = _Cabinet()


@dataclass(frozen=True)
class Drawer(base.TabletopTask):
    """Open the drawer by 7 cm or more."""

    knob: base.Sector  # where the middle of the knob's path is
    # degrees: direction of the front (0: away from the robot, -90: to its right), and deviation to either side
    front: float
    spread: float
    scene: Scene = Scene((_CABINET,), marker=None)
    instructions: tuple[str, ...] = (
        "open the drawer",
        "pull the drawer open by its red knob",
        "grasp the red knob and slide the drawer out",
        "open the small blue cabinet",
    )
    max_episode_steps: int = 70
    opening: float = 0.07

    def start(self, rng: np.random.Generator) -> base.Start:
        arm = base.arm_near_home(rng, self.joint_noise)
        while True:
            middle = self.knob.draw(rng)
            yaw = np.deg2rad(self.front + rng.uniform(-self.spread, self.spread))
            front = np.array([np.cos(yaw), np.sin(yaw)])
            centre = middle - (_KNOB[0] + _DRAWER_TRAVEL / 2) * front
            if _fits(centre, front):
                break
        cabinet = base.standing(centre, _CABINET.half[2], yaw)
        return base.Start(arm, _knobs(cabinet[None], np.array([self.opening + 0.015]))[0], cabinet[None], np.zeros(1))

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        opened = np.clip(now.mechanisms[:, 0] * _DRAWER_TRAVEL / self.opening, 0, 1)
        satisfied = opened >= 1
        near = 1 - np.tanh(8 * base.distance(now.hand, _knob_now(now)))
        return np.where(satisfied, 1.0, 0.3 * near + 0.5 * opened), satisfied

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        knob = _knob_now(now)
        point, grip, held = base.grasp(now.hand, now.grip, knob, pressed=0.010, over=0.055)
        point = np.where(held[:, None], now.goal, point)
        return base.HandTarget(point, np.zeros(len(knob)), grip, np.where(held, 0.6, 1.0))

    def describe(self) -> dict[str, str]:
        front = "any" if self.spread == 180 else f"{self.front:g} +-{self.spread:g} deg"
        return {"knob": str(self.knob), "front": front, "opening": f"{self.opening:.2f} m"}


def _knob_now(now: base.Situation) -> np.ndarray:
    cabinet = np.concatenate([now.objects[:, 0], now.quats[:, 0]], axis=1)
    return _knobs(cabinet, _DRAWER_TRAVEL * now.mechanisms[:, 0])


def _knobs(cabinet: np.ndarray, opening: np.ndarray) -> np.ndarray:
    """Positions `[n, 3]` of the knobs of upright cabinets at poses `[n, 7]` with openings `[n]`."""
    yaw = 2 * np.arctan2(cabinet[:, 6], cabinet[:, 3])
    out = _KNOB[0] + opening
    return cabinet[:, :3] + np.stack([out * np.cos(yaw), out * np.sin(yaw), np.full(len(yaw), _KNOB[2])], axis=1)


def _fits(centre: np.ndarray, front: np.ndarray) -> bool:
    """Whether the cabinet stands on the table, clear of the arm's base, with the knob's whole path within reach."""
    x, y, _ = _CABINET.half
    aside = np.array([-front[1], front[0]])
    path = [centre + (_KNOB[0] + opening) * front for opening in np.linspace(0, _DRAWER_TRAVEL, 11)]
    corners = [centre + a * front + b * aside for a in (-x, x) for b in (-y, y)]
    foot = np.array(ARM_BASE[:2]) - centre  # from the nearest point of the cabinet and its open drawer
    along, across = foot @ front, foot @ aside
    gap = np.hypot(along - np.clip(along, -x, x + _DRAWER_TRAVEL), across - np.clip(across, -y, y))
    on_table = all(abs(corner[0]) < 0.49 and abs(corner[1]) < 0.54 for corner in corners)
    return gap > 0.10 and on_table and all(REACHABLE.holds(point) for point in path)
