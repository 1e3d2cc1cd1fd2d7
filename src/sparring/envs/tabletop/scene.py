"""The scene as MJCF text: an arm with a two-finger gripper on a table, made of analytic shapes only.

The world's origin is the centre of the table top, z up, in metres and radians; the arm looks along +x. A scene is a
list of `Part`s, so another task adds a cube, or a second arm, by adding a part.
"""

import os
from dataclasses import dataclass
from typing import Protocol

TIMESTEP = 0.004
SUBSTEPS = 10
CONTROL_HZ = 1 / (TIMESTEP * SUBSTEPS)

ARM_JOINTS = 6
FINGERS = 2
FINGER_TRAVEL = 0.04
ARM_BASE = (-0.38, 0.0, 0.0)
# shoulder, elbow and wrist add up to pi: the hand points straight down
HOME = (0.0, 0.12028, 1.77534, 1.24597, 0.0, 0.0)
# names that the rest of the package looks up
HAND_SITE = "hand"
CAMERAS = ("head", "wrist")

TABLE_HEIGHT = 0.72
CUBE_HALF = 0.022
RED, BLUE, GREEN = (0.86, 0.18, 0.16), (0.15, 0.35, 0.85), (0.16, 0.80, 0.45)

# Two collision groups: a geom touches another when one's contype meets the other's conaffinity. The arm never touches
# itself, which halves the candidate pairs; table and arm do touch, and objects touch everything.
SCENERY = 'contype="1" conaffinity="2"'
_ROBOT = 'contype="2" conaffinity="1"'
OBJECT = 'contype="3" conaffinity="3"'
_GHOST = 'contype="0" conaffinity="0"'

# Two geoms rub with the larger of their frictions: the fingers (2) grip a cube well, and a cube slides on the table. At
# 1 or more it would tip over when pushed at half its height.
_SLIDES = 0.6

_WHITE, _ORANGE, _DARK, _STEEL = "0.93 0.93 0.95 1", "0.96 0.52 0.16 1", "0.20 0.22 0.27 1", "0.55 0.58 0.64 1"
_WOOD, _LEG, _FLOOR = "0.82 0.68 0.52 1", "0.50 0.41 0.33 1", "0.62 0.66 0.72 1"


@dataclass(frozen=True)
class Part:
    """One thing in the scene: what it adds to the world, the motors that drive it, what it asks of the solver."""

    bodies: str
    actuators: str = ""
    options: str = ""


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
class Block:
    """A free solid to be pushed, grasped or put upon; a cube unless it says otherwise."""

    name: str
    rgb: tuple[float, float, float]
    # half lengths, metres
    half: tuple[float, float, float] = (CUBE_HALF, CUBE_HALF, CUBE_HALF)
    mass: float = 0.06
    # box, ball, cylinder (upright), capsule (along x) or ellipsoid, as large as fits into `half`
    shape: str = "box"
    mechanisms: tuple[str, ...] = ()

    def part(self) -> Part:
        return block(self)


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

    def compile(self):
        things = [thing.part() for thing in self.objects + self.clutter]
        return compile_scene([room(), table(), head_camera(whole_table=bool(things)), arm(), *things, *self.scenery])

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The joints inside the objects, by name."""
        return tuple(name for thing in self.objects for name in thing.mechanisms)


def load_mujoco():
    """Import mujoco on machines without GL libraries too; drawing here needs none.

    MUJOCO_GL is read once, at import, and only touched when the user left it unset.
    """
    unset = "MUJOCO_GL" not in os.environ
    if unset:
        os.environ["MUJOCO_GL"] = "disable"
    import mujoco
    import mujoco.rollout

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
</mujoco>"""


def room() -> Part:
    return Part(f'<geom name="floor" type="plane" size="0 0 0.1" pos="0 0 {-TABLE_HEIGHT}" rgba="{_FLOOR}" {SCENERY}/>')


def table() -> Part:
    top = f"""
    <geom name="table" type="box" size="0.50 0.55 0.02" pos="0 0 -0.02" rgba="{_WOOD}"
      friction="{_SLIDES} 0.005 0.0001" {SCENERY}/>"""
    half = (TABLE_HEIGHT - 0.04) / 2
    legs = "".join(
        f'<geom type="box" size="0.03 0.03 {half}" pos="{x} {y} {-0.04 - half}" rgba="{_LEG}" {_GHOST}/>'
        for x in (-0.44, 0.44)
        for y in (-0.49, 0.49)
    )
    return Part(top + legs)


def head_camera(whole_table: bool = False) -> Part:
    """In front of the arm, up and to one side: the hand seldom hides its goal.

    Objects may stand wherever the arm reaches; goals in the air are nearer to the middle.
    """
    target, fovy = ((-0.20, -0.10, 0.05), 48) if whole_table else ((-0.13, 0.0, 0.15), 43)
    return Part(f'<camera name="head" fovy="{fovy}" {_look_at(position=(0.62, -0.52, 0.60), target=target)}/>')


def arm() -> Part:
    """Six hinges (yaw, three pitches, roll, yaw) and a gripper. Gravity is compensated, as in most real controllers."""
    links = _link(
        ("base_yaw", "0 0 1", "-2.6 2.6", "0 0 0.08"),
        f'<geom type="cylinder" size="0.052 0.05" pos="0 0 0.05" rgba="{_WHITE}" {_ROBOT}/>'
        # the motor of the shoulder: only to look at
        f'<geom type="cylinder" size="0.046 0.058" pos="0 0 0.1" euler="1.5708 0 0" rgba="{_DARK}" {_GHOST}/>',
        ("shoulder", "0 1 0", "-1.6 1.6", "0 0 0.1"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.28" size="0.037" rgba="{_ORANGE}" {_ROBOT}/>'
        f'<geom type="cylinder" size="0.040 0.046" pos="0 0 0.28" euler="1.5708 0 0" rgba="{_DARK}" {_GHOST}/>',
        ("elbow", "0 1 0", "-0.1 2.8", "0 0 0.28"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.26" size="0.031" rgba="{_WHITE}" {_ROBOT}/>'
        f'<geom type="cylinder" size="0.034 0.038" pos="0 0 0.26" euler="1.5708 0 0" rgba="{_DARK}" {_GHOST}/>',
        ("wrist_pitch", "0 1 0", "-2 2", "0 0 0.26"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.06" size="0.028" rgba="{_ORANGE}" {_ROBOT}/>',
        ("wrist_roll", "1 0 0", "-1.6 1.6", "0 0 0.06"),
        f'<geom type="sphere" size="0.03" rgba="{_DARK}" {_ROBOT}/>',
        ("wrist_yaw", "0 0 1", "-3 3", "0 0 0"),
        _hand(),
    )
    x, y, z = ARM_BASE
    bodies = f"""
    <body name="base" pos="{x} {y} {z}">
      <geom type="cylinder" size="0.075 0.04" pos="0 0 0.04" rgba="{_DARK}" {_GHOST}/>{links}
    </body>"""
    names = ("base_yaw", "shoulder", "elbow", "wrist_pitch", "wrist_roll", "wrist_yaw")
    motors = "".join(f'<position name="{n}" joint="{n}" kp="400" kv="40" inheritrange="1"/>' for n in names)
    fingers = "".join(
        f'<position name="{n}" joint="{n}" kp="200" ctrlrange="0 {FINGER_TRAVEL}" forcerange="-15 15"/>'
        for n in ("left_finger", "right_finger")
    )
    return Part(bodies, motors + fingers)


def block(thing: Block) -> Part:
    """Held by friction alone: elliptic cones and a stiff friction direction keep it from creeping out of the fingers.

    Its joint comes after the arm's, so that the arm's positions are the first ones whatever stands on the table.
    """
    # what is round would roll for ever without friction against rolling
    rubs = f'friction="{_SLIDES} 0.02 0.001" condim="{4 if thing.shape == "box" else 6}"'
    shape = (
        f'<geom name="{thing.name}" {_shape(thing)} mass="{thing.mass}" rgba="{spaced(thing.rgb)} 1" {rubs} {OBJECT}/>'
    )
    return free_body(thing, shape)


def free_body(thing: Thing, inside: str) -> Part:
    """A body that moves freely, standing on the table at first; `inside` are its shapes and the bodies it carries."""
    return Part(
        f"""
    <body name="{thing.name}" pos="0 0 {thing.half[2]}">
      <freejoint name="{thing.name}"/>{inside}
    </body>""",
        options='cone="elliptic" impratio="5"',
    )


def spaced(values: tuple[float, ...]) -> str:
    return " ".join(str(value) for value in values)


def _shape(thing: Block) -> str:
    """Type and size as MuJoCo wants them: a capsule's half length leaves out its round ends."""
    x, _, z = thing.half
    return {
        "box": f'type="box" size="{spaced(thing.half)}"',
        "ball": f'type="sphere" size="{x}"',
        "cylinder": f'type="cylinder" size="{x} {z}"',
        "capsule": f'type="capsule" size="{z}" fromto="{z - x} 0 0 {x - z} 0 0"',
        "ellipsoid": f'type="ellipsoid" size="{spaced(thing.half)}"',
    }[thing.shape]


def _look_at(position: tuple[float, float, float], target: tuple[float, float, float]) -> str:
    """Attributes of an upright camera at `position` that looks at `target`."""
    x, y, z = (t - p for p, t in zip(position, target, strict=True))
    # right = forward x up, and up again = right x forward
    right = (y, -x, 0.0)
    above = (-x * z, -y * z, x * x + y * y)
    numbers = " ".join(f"{value:.6f}" for value in right + above)
    return f'pos="{position[0]} {position[1]} {position[2]}" xyaxes="{numbers}"'


def _link(joint: tuple[str, str, str, str], inside: str, *rest) -> str:
    """A body with one hinge `(name, axis, range, position)`, its shapes, and the links that follow it."""
    name, axis, limits, pos = joint
    child = _link(*rest) if rest else ""
    return f"""
    <body name="{name}" pos="{pos}" gravcomp="1">
      <joint name="{name}" axis="{axis}" range="{limits}"/>{inside}{child}
    </body>"""


def _hand() -> str:
    return f"""
      <geom type="cylinder" size="0.030 0.025" pos="0 0 0.025" rgba="{_WHITE}" {_ROBOT}/>
      <geom type="box" size="0.020 0.056 0.012" pos="0 0 0.060" rgba="{_DARK}" {_ROBOT}/>
      <camera name="wrist" pos="-0.080 0 0.040" euler="0 3.42 -1.5708" fovy="80"/>
      <site name="{HAND_SITE}" pos="0 0 0.125"/>
      {_finger("left", 1)}{_finger("right", -1)}"""


def _finger(side: str, sign: int) -> str:
    # the joint's range is wider than the motor's: an open gripper rests at its target and not against a stop,
    # where every substep would pay for solving a constraint
    return f"""
      <body name="{side}_finger" pos="0 0 0.072" gravcomp="1">
        <joint name="{side}_finger" type="slide" axis="0 {sign} 0" range="-0.001 {FINGER_TRAVEL + 0.001}" damping="10"
          armature="0.01"/>
        <geom type="box" size="0.011 0.006 0.030" pos="0 {sign * 0.006} 0.030" rgba="{_STEEL}" friction="2 0.05 0.001"
          condim="4" {_ROBOT}/>
      </body>"""
