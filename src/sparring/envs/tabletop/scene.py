"""The scene as MJCF text: one or two arms with two-finger grippers at a table, made of analytic shapes only.

The world's origin is the centre of the table top, z up, in metres and radians; arms look along +x. A scene is a list of
`Part`s, so another task adds a cube, or a second arm, by adding a part.
"""

import os
from dataclasses import dataclass
from math import pi

TIMESTEP = 0.004
SUBSTEPS = 10
CONTROL_HZ = 1 / (TIMESTEP * SUBSTEPS)

ARM_JOINTS = 6
FINGERS = 2
FINGER_TRAVEL = 0.04
ARM_BASE = (-0.38, 0.0, 0.0)
# shoulder, elbow and wrist add up to pi: the hand points straight down
HOME = (0.0, 0.12028, 1.77534, 1.24597, 0.0, 0.0)
# names that the rest of the package looks up; a `Mount` may put a prefix before "hand" and "wrist"
HAND_SITE = "hand"
CAMERAS = ("head", "wrist")

TABLE_HEIGHT = 0.72
CUBE_HALF = 0.022
RED, BLUE, GREEN = (0.86, 0.18, 0.16), (0.15, 0.35, 0.85), (0.16, 0.80, 0.45)

# Collision groups: a geom touches another when one's contype meets the other's conaffinity. An arm never touches
# itself, which halves the candidate pairs; table and arm do touch, and objects touch everything. See also `Mount`.
_SCENERY = 'contype="1" conaffinity="2"'
_OBJECT = 'contype="3" conaffinity="3"'
_GHOST = 'contype="0" conaffinity="0"'

# Two geoms rub with the larger of their frictions: the fingers (2) grip a cube well, and a cube slides on the table. At
# 1 or more it would tip over when pushed at half its height.
_SLIDES = 0.6

_WHITE, _ORANGE, _DARK, _STEEL = "0.93 0.93 0.95 1", "0.96 0.52 0.16 1", "0.20 0.22 0.27 1", "0.55 0.58 0.64 1"
_WOOD, _LEG, _FLOOR = "0.82 0.68 0.52 1", "0.50 0.41 0.33 1", "0.62 0.66 0.72 1"


@dataclass(frozen=True)
class Mount:
    """Where an arm stands and how it holds its hand; its names begin with `prefix`."""

    prefix: str = ""
    base: tuple[float, float, float] = ARM_BASE
    # radians about z that the hand is turned by at home and kept at in delta_ee_pos; at 0 the fingers open along y
    hand_yaw: float = 0.0
    # which side of the hand the camera is on: at yaw 0, the one away from the base, or (-1) the one towards it
    camera_side: int = 1
    # collision bits: scenery has 1 and 2, objects have both
    contype: int = 2
    conaffinity: int = 1

    @property
    def home(self) -> tuple[float, ...]:
        # the hand points down, so its own yaw goes the other way round
        return (*HOME[:-1], HOME[-1] - self.hand_yaw)


SINGLE = (Mount(),)
# Fingers that open along x, cameras that look towards the other hand. The hands are turned outwards, which leaves their
# wrists the most room to turn where an arm reaches out to its own side. The bit 4 lets the two arms touch each other.
DUAL = (
    Mount("left_", (-0.38, 0.28, 0.0), hand_yaw=pi / 2, camera_side=-1, contype=2, conaffinity=1 | 4),
    Mount("right_", (-0.38, -0.28, 0.0), hand_yaw=-pi / 2, camera_side=-1, contype=2 | 4, conaffinity=1),
)


@dataclass(frozen=True)
class Part:
    """One thing in the scene: what it adds to the world, the motors that drive it, what it asks of the solver."""

    bodies: str
    actuators: str = ""
    options: str = ""


@dataclass(frozen=True)
class Block:
    """A free box to be pushed, grasped or put upon; a cube unless it says otherwise."""

    name: str
    rgb: tuple[float, float, float]
    # half lengths, metres
    half: tuple[float, float, float] = (CUBE_HALF, CUBE_HALF, CUBE_HALF)
    mass: float = 0.06
    # boxes that are part of it: (centre, half lengths), from its own centre
    handles: tuple[tuple[tuple[float, float, float], tuple[float, float, float]], ...] = ()


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

    objects: tuple[Block, ...] = ()
    # None: the goal is not drawn
    marker: Marker | None = BALL
    # their joints come first, in this order
    arms: tuple[Mount, ...] = SINGLE

    @property
    def cameras(self) -> tuple[str, ...]:
        return ("head", *(f"{mount.prefix}wrist" for mount in self.arms))

    def compile(self):
        things = [block(thing) for thing in self.objects]
        head = head_camera(whole_table=bool(things), arms=len(self.arms))
        return compile_scene([room(), table(), head, *(arm(mount) for mount in self.arms), *things])


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
    return Part(
        f'<geom name="floor" type="plane" size="0 0 0.1" pos="0 0 {-TABLE_HEIGHT}" rgba="{_FLOOR}" {_SCENERY}/>'
    )


def table() -> Part:
    top = f"""
    <geom name="table" type="box" size="0.50 0.55 0.02" pos="0 0 -0.02" rgba="{_WOOD}"
      friction="{_SLIDES} 0.005 0.0001" {_SCENERY}/>"""
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
        position, target, fovy = (0.62, 0.0, 0.74), (-0.22, 0.0, 0.08), 52
    return Part(f'<camera name="head" fovy="{fovy}" {_look_at(position, target)}/>')


def arm(mount: Mount = SINGLE[0]) -> Part:
    """Six hinges (yaw, three pitches, roll, yaw) and a gripper. Gravity is compensated, as in most real controllers."""
    prefix, solid = mount.prefix, _solid(mount)
    links = _link(
        prefix,
        ("base_yaw", "0 0 1", "-2.6 2.6", "0 0 0.08"),
        f'<geom type="cylinder" size="0.052 0.05" pos="0 0 0.05" rgba="{_WHITE}" {solid}/>'
        # the motor of the shoulder: only to look at
        f'<geom type="cylinder" size="0.046 0.058" pos="0 0 0.1" euler="1.5708 0 0" rgba="{_DARK}" {_GHOST}/>',
        ("shoulder", "0 1 0", "-1.6 1.6", "0 0 0.1"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.28" size="0.037" rgba="{_ORANGE}" {solid}/>'
        f'<geom type="cylinder" size="0.040 0.046" pos="0 0 0.28" euler="1.5708 0 0" rgba="{_DARK}" {_GHOST}/>',
        ("elbow", "0 1 0", "-0.1 2.8", "0 0 0.28"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.26" size="0.031" rgba="{_WHITE}" {solid}/>'
        f'<geom type="cylinder" size="0.034 0.038" pos="0 0 0.26" euler="1.5708 0 0" rgba="{_DARK}" {_GHOST}/>',
        ("wrist_pitch", "0 1 0", "-2 2", "0 0 0.26"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.06" size="0.028" rgba="{_ORANGE}" {solid}/>',
        ("wrist_roll", "1 0 0", "-1.6 1.6", "0 0 0.06"),
        f'<geom type="sphere" size="0.03" rgba="{_DARK}" {solid}/>',
        ("wrist_yaw", "0 0 1", "-3 3", "0 0 0"),
        _hand(mount),
    )
    x, y, z = mount.base
    bodies = f"""
    <body name="{prefix}base" pos="{x} {y} {z}">
      <geom type="cylinder" size="0.075 0.04" pos="0 0 0.04" rgba="{_DARK}" {_GHOST}/>{links}
    </body>"""
    names = ("base_yaw", "shoulder", "elbow", "wrist_pitch", "wrist_roll", "wrist_yaw")
    motors = "".join(
        f'<position name="{prefix}{n}" joint="{prefix}{n}" kp="400" kv="40" inheritrange="1"/>' for n in names
    )
    fingers = "".join(
        f'<position name="{prefix}{n}" joint="{prefix}{n}" kp="200" ctrlrange="0 {FINGER_TRAVEL}" forcerange="-15 15"/>'
        for n in ("left_finger", "right_finger")
    )
    return Part(bodies, motors + fingers)


def block(thing: Block) -> Part:
    """Held by friction alone: elliptic cones and a stiff friction direction keep it from creeping out of the fingers.

    Its joint comes after the arm's, so that the arm's positions are the first ones whatever stands on the table.
    """
    rgba, size = _numbers(thing.rgb), _numbers(thing.half)
    surface = f'friction="{_SLIDES} 0.02 0.001" condim="4" {_OBJECT}'
    handles = "".join(
        f'<geom type="box" pos="{_numbers(pos)}" size="{_numbers(half)}" mass="0.02" rgba="{_DARK}" {surface}/>'
        for pos, half in thing.handles
    )
    return Part(
        f"""
    <body name="{thing.name}" pos="0 0 {thing.half[2]}">
      <freejoint name="{thing.name}"/>
      <geom name="{thing.name}" type="box" size="{size}" mass="{thing.mass}" rgba="{rgba} 1" {surface}/>{handles}
    </body>""",
        options='cone="elliptic" impratio="5"',
    )


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(str(value) for value in values)


def _look_at(position: tuple[float, float, float], target: tuple[float, float, float]) -> str:
    """Attributes of an upright camera at `position` that looks at `target`."""
    x, y, z = (t - p for p, t in zip(position, target, strict=True))
    # right = forward x up, and up again = right x forward
    right = (y, -x, 0.0)
    above = (-x * z, -y * z, x * x + y * y)
    numbers = " ".join(f"{value:.6f}" for value in right + above)
    return f'pos="{position[0]} {position[1]} {position[2]}" xyaxes="{numbers}"'


def _solid(mount: Mount) -> str:
    return f'contype="{mount.contype}" conaffinity="{mount.conaffinity}"'


def _link(prefix: str, joint: tuple[str, str, str, str], inside: str, *rest) -> str:
    """A body with one hinge `(name, axis, range, position)`, its shapes, and the links that follow it."""
    name, axis, limits, pos = joint
    child = _link(prefix, *rest) if rest else ""
    return f"""
    <body name="{prefix}{name}" pos="{pos}" gravcomp="1">
      <joint name="{prefix}{name}" axis="{axis}" range="{limits}"/>{inside}{child}
    </body>"""


def _hand(mount: Mount) -> str:
    prefix, solid = mount.prefix, _solid(mount)
    outside, inside = 'pos="-0.080 0 0.040" euler="0 3.42 -1.5708"', 'pos="0.080 0 0.040" euler="0 -3.42 1.5708"'
    camera = outside if mount.camera_side > 0 else inside
    return f"""
      <geom type="cylinder" size="0.030 0.025" pos="0 0 0.025" rgba="{_WHITE}" {solid}/>
      <geom type="box" size="0.020 0.056 0.012" pos="0 0 0.060" rgba="{_DARK}" {solid}/>
      <camera name="{prefix}wrist" {camera} fovy="80"/>
      <site name="{prefix}{HAND_SITE}" pos="0 0 0.125"/>
      {_finger(mount, "left", 1)}{_finger(mount, "right", -1)}"""


def _finger(mount: Mount, side: str, sign: int) -> str:
    name = f"{mount.prefix}{side}_finger"
    # the joint's range is wider than the motor's: an open gripper rests at its target and not against a stop,
    # where every substep would pay for solving a constraint
    return f"""
      <body name="{name}" pos="0 0 0.072" gravcomp="1">
        <joint name="{name}" type="slide" axis="0 {sign} 0" range="-0.001 {FINGER_TRAVEL + 0.001}" damping="10"
          armature="0.01"/>
        <geom type="box" size="0.011 0.006 0.030" pos="0 {sign * 0.006} 0.030" rgba="{_STEEL}" friction="2 0.05 0.001"
          condim="4" {_solid(mount)}/>
      </body>"""
