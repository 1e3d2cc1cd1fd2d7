"""The scene as MJCF text: one or two arms with two-finger grippers at a table, made of analytic shapes only.

The world's origin is the centre of the table top, z up, in metres and radians; arms look along +x. A scene is a list of
`Part`s, so another task adds a cube, or a second arm, by adding a part.
"""

import os
from dataclasses import dataclass
from typing import Protocol

from sparring.envs.tabletop.arm import SINGLE, Mount, arm_bodies, arm_motors
from sparring.errors import UserError

TIMESTEP = 0.004
SUBSTEPS = 10
CONTROL_HZ = 1 / (TIMESTEP * SUBSTEPS)

TABLE_HEIGHT = 0.72
# the geom that can show static
SCREEN = "screen"
RED, BLUE, GREEN = (0.86, 0.18, 0.16), (0.15, 0.35, 0.85), (0.16, 0.80, 0.45)

# Collision groups: a geom touches another when one's contype meets the other's conaffinity. An arm never touches
# itself, which halves the candidate pairs; table and arm do touch, and objects touch everything. See also `Mount`.
SCENERY = 'contype="1" conaffinity="2"'
_GHOST = 'contype="0" conaffinity="0"'

# Two geoms rub with the larger of their frictions: the fingers (2) grip a cube well, and a cube slides on the table. At
# 1 or more it would tip over when pushed at half its height.
SLIDES = 0.6

_WOOD, _LEG, _FLOOR = "0.82 0.68 0.52 1", "0.50 0.41 0.33 1", "0.62 0.66 0.72 1"


@dataclass(frozen=True)
class Part:
    """One thing in the scene: what it adds to the world, its motors, what it asks of the solver, and its sensors."""

    bodies: str
    actuators: str = ""
    options: str = ""
    sensors: str = ""


class Thing(Protocol):
    """A free body on the table, made of one shape or of many."""

    # also of the body and of its free joint
    name: str
    # half the lengths of a box around it, metres
    half: tuple[float, float, float]
    # names of the joints that move a part of it (a drawer, a button)
    mechanisms: tuple[str, ...]

    def part(self) -> Part:
        """What it adds to the scene."""


@dataclass(frozen=True)
class Marker:
    """Where the goal is drawn: a ball of this radius, or a flat disc. It touches nothing."""

    kind: str = "ball"
    radius: float = 0.02
    rgb: tuple[float, float, float] = GREEN


BALL = Marker()


@dataclass(frozen=True)
class Scene:
    """What stands on the table for a task, beside the arm. Tasks with equal scenes share one model."""

    objects: tuple[Thing, ...] = ()
    # None: the goal is not drawn
    marker: Marker | None = BALL
    # things that tasks, experts and observations know nothing of
    clutter: tuple[Thing, ...] = ()
    # what else stands there and never moves
    scenery: tuple[Part, ...] = ()
    # their joints come first, in this order
    arms: tuple[Mount, ...] = SINGLE

    @property
    def cameras(self) -> tuple[str, ...]:
        return ("head", *(f"{mount.prefix}wrist" for mount in self.arms))

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The joints inside the objects, by name."""
        return tuple(name for thing in self.objects for name in thing.mechanisms)

    def compile(self):
        things = [thing.part() for thing in self.objects + self.clutter]
        head = head_camera(whole_table=bool(self.objects), arms=len(self.arms))
        arms = [arm(mount) for mount in self.arms]
        touch = touch_sensors(self.arms, self.objects + self.clutter)
        return compile_scene([room(), table(), head, *arms, *things, *self.scenery, touch])


def load_mujoco():
    """Import mujoco on machines without GL libraries too; drawing here needs none.

    MUJOCO_GL is read once, at import, and only touched when the user left it unset.
    """
    unset = "MUJOCO_GL" not in os.environ
    if unset:
        os.environ["MUJOCO_GL"] = "disable"
    try:
        import mujoco
        import mujoco.rollout
    except (AttributeError, ImportError, RuntimeError) as error:
        # PyOpenGL fails with an AttributeError where its library is missing
        if unset or (isinstance(error, ModuleNotFoundError) and error.name == "mujoco"):
            raise
        raise UserError(
            f"MUJOCO_GL={os.environ['MUJOCO_GL']} does not work here ({error}); unset it (env.video_renderer=builtin "
            "needs no GL, and mujoco looks for one that works), or set MUJOCO_GL=egl where EGL is installed"
        ) from None

    if unset:
        del os.environ["MUJOCO_GL"]
    return mujoco


def compile_scene(parts: list[Part] | None = None):
    """The `mujoco.MjModel` of these parts, or of the standard scene."""
    return load_mujoco().MjModel.from_xml_string(scene_xml(standard_parts() if parts is None else parts))


def standard_parts() -> list[Part]:
    return [room(), table(), head_camera(), arm()]


def scene_xml(parts: list[Part]) -> str:
    bodies = "".join(part.bodies for part in parts)
    actuators = "".join(part.actuators for part in parts)
    sensors = "".join(part.sensors for part in parts)
    options = " ".join(dict.fromkeys(part.options for part in parts if part.options))
    return f"""
<mujoco model="tabletop">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" {options}/>
  <default>
    <joint damping="2" armature="0.05"/>
    <position forcerange="-80 80"/>
  </default>
  <worldbody>{bodies}</worldbody>
  <actuator>{actuators}</actuator>
  <sensor>{sensors}</sensor>
</mujoco>"""


def room() -> Part:
    return Part(f'<geom name="floor" type="plane" size="0 0 0.1" pos="0 0 {-TABLE_HEIGHT}" rgba="{_FLOOR}" {SCENERY}/>')


def table() -> Part:
    top = f"""
    <geom name="table" type="box" size="0.50 0.55 0.02" pos="0 0 -0.02" rgba="{_WOOD}"
      friction="{SLIDES} 0.005 0.0001" {SCENERY}/>"""
    half = (TABLE_HEIGHT - 0.04) / 2
    legs = "".join(
        f'<geom type="box" size="0.03 0.03 {half}" pos="{x} {y} {-0.04 - half}" rgba="{_LEG}" {_GHOST}/>'
        for x in (-0.44, 0.44)
        for y in (-0.49, 0.49)
    )
    return Part(top + legs)


def head_camera(whole_table: bool = False, arms: int = 1) -> Part:
    """In front of the arm, up and to one side: the hand seldom hides its goal.

    Objects may stand wherever the arm reaches; goals in the air are nearer to the middle. Two arms are seen from
    straight ahead, where neither hides the other.
    """
    position = (0.62, -0.52, 0.60)
    target, fovy = ((-0.20, -0.10, 0.05), 48) if whole_table else ((-0.13, 0.0, 0.15), 43)
    if arms > 1:
        position, target, fovy = (0.62, 0.0, 0.95), (-0.15, 0.0, 0.08), 58
    return Part(f'<camera name="head" fovy="{fovy}" {_look_at(position, target)}/>')


def arm(mount: Mount = SINGLE[0]) -> Part:
    return Part(arm_bodies(mount), arm_motors(mount))


def touch_sensors(arms: tuple[Mount, ...], things: tuple[Thing, ...]) -> Part:
    """Above 0 while any shape of the arm touches any shape of the thing. They are read, and act on nothing."""
    pairs = ((f"{mount.prefix}base", thing.name) for mount in arms for thing in things)
    sensors = (f'<contact subtree1="{one}" subtree2="{other}" num="1" data="found"/>' for one, other in pairs)
    return Part(bodies="", sensors="".join(sensors))


def _look_at(position: tuple[float, float, float], target: tuple[float, float, float]) -> str:
    """Attributes of an upright camera at `position` that looks at `target`."""
    x, y, z = (t - p for p, t in zip(position, target, strict=True))
    # right = forward x up, and up again = right x forward
    right = (y, -x, 0.0)
    above = (-x * z, -y * z, x * x + y * y)
    numbers = " ".join(f"{value:.6f}" for value in right + above)
    return f'pos="{position[0]} {position[1]} {position[2]}" xyaxes="{numbers}"'
