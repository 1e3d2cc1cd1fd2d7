"""The scene as MJCF text: arms with two-finger grippers at a table, and objects. The origin is the centre of the table
top, z up, metres and radians; arms face +x. A scene is a list of `Part`s."""

import os
from dataclasses import dataclass
from math import pi
from typing import Protocol

from sparring.errors import UserError

TIMESTEP = 0.004
SUBSTEPS = 10
CONTROL_HZ = 1 / (TIMESTEP * SUBSTEPS)

ARM_JOINTS = 6
FINGERS = 2
FINGER_TRAVEL = 0.04
ARM_BASE = (-0.38, 0.0, 0.0)
HOME = (0.0, 0.12028, 1.77534, 1.24597, 0.0, 0.0)
HAND_SITE = "hand"  # the name of the hand's site, after a mount's prefix
CUBE_HALF = 0.022
SCREEN = "screen"  # the geom that can show noise
RED, BLUE, GREEN = (0.86, 0.18, 0.16), (0.15, 0.35, 0.85), (0.16, 0.80, 0.45)

# geoms collide if a bit of one's contype is set in the other's conaffinity; an arm does not collide with itself
SCENERY = 'contype="1" conaffinity="2"'
OBJECT = 'contype="3" conaffinity="3"'
_NO_COLLISION = 'contype="0" conaffinity="0"'

_SLIDING = 0.6  # sliding friction; MuJoCo uses the larger of two: fingers have 2; at 1 or more a pushed cube tips over
_TABLE_HEIGHT = 0.72
_WOOD, _LEG, _FLOOR = "0.82 0.68 0.52 1", "0.50 0.41 0.33 1", "0.62 0.66 0.72 1"
_WHITE, _ORANGE, _DARK, _STEEL = "0.93 0.93 0.95 1", "0.96 0.52 0.16 1", "0.20 0.22 0.27 1", "0.55 0.58 0.64 1"


@dataclass(frozen=True)
class Mount:
    """The base of an arm and the orientation of its hand; the names of its parts start with `prefix`."""

    prefix: str = ""
    base: tuple[float, float, float] = ARM_BASE
    # yaw of the hand in radians, at home and in delta_ee_pos; at 0 the fingers open along y
    hand_yaw: float = 0.0
    # side of the hand with the camera: at yaw 0, 1 is away from the base and -1 towards it
    camera_side: int = 1
    contype: int = 2  # collision bits: scenery has 1 and 2, objects have both
    conaffinity: int = 1


SINGLE = (Mount(),)
# fingers open along x, cameras point to the other hand; bit 4 enables collisions between the two arms
DUAL = (
    Mount("left_", (-0.38, 0.28, 0.0), hand_yaw=pi / 2, camera_side=-1, contype=2, conaffinity=1 | 4),
    Mount("right_", (-0.38, -0.28, 0.0), hand_yaw=-pi / 2, camera_side=-1, contype=2 | 4, conaffinity=1),
)


@dataclass(frozen=True)
class Part:
    """MJCF of one component."""

    bodies: str
    actuators: str = ""
    options: str = ""
    sensors: str = ""

    @classmethod
    def free_body(cls, thing: "TableObject", inside: str) -> "Part":
        """A free body that stands on the table; `inside` has its shapes and inner bodies. Elliptic cones and stiff
        friction keep it from slowly slipping out of the fingers. Its joint comes after those of the arms in qpos."""
        return cls(
            f"""
    <body name="{thing.name}" pos="0 0 {thing.half[2]}">
      <freejoint name="{thing.name}"/>{inside}
    </body>""",
            options='cone="elliptic" impratio="5"',
        )


class TableObject(Protocol):
    """A free body on the table, of one or several shapes."""

    @property
    def name(self) -> str: ...  # also of the body and of its free joint
    @property
    def half(self) -> tuple[float, float, float]: ...  # half lengths of its bounding box, metres
    @property
    def mechanisms(self) -> tuple[str, ...]: ...  # names of its inner joints (a drawer, a button)
    def part(self) -> Part: ...


@dataclass(frozen=True)
class Solid:
    """A `TableObject` of one shape, by default a cube."""

    name: str
    rgb: tuple[float, float, float]
    half: tuple[float, float, float] = (CUBE_HALF, CUBE_HALF, CUBE_HALF)  # half lengths, metres
    mass: float = 0.06
    shape: str = "box"  # box, ball, cylinder (upright), capsule (along x) or ellipsoid, as large as fits into `half`
    mechanisms: tuple[str, ...] = ()
    # boxes that are part of it: (centre relative to its own centre, half lengths)
    handles: tuple[tuple[tuple[float, float, float], tuple[float, float, float]], ...] = ()

    def part(self) -> Part:
        x, _, z = self.half
        shape = {
            "box": f'type="box" size="{spaced(self.half)}"',
            "ball": f'type="sphere" size="{x}"',
            "cylinder": f'type="cylinder" size="{x} {z}"',
            # MuJoCo's half length of a capsule excludes the round ends
            "capsule": f'type="capsule" size="{z}" fromto="{z - x} 0 0 {x - z} 0 0"',
            "ellipsoid": f'type="ellipsoid" size="{spaced(self.half)}"',
        }[self.shape]
        # round objects need rolling friction
        surface = f'friction="{_SLIDING} 0.02 0.001" condim="{4 if self.shape == "box" else 6}" {OBJECT}'
        solid = f'<geom name="{self.name}" {shape} mass="{self.mass}" rgba="{spaced(self.rgb)} 1" {surface}/>'
        handles = "".join(
            f'<geom type="box" pos="{spaced(pos)}" size="{spaced(half)}" mass="0.02" rgba="{_DARK}" {surface}/>'
            for pos, half in self.handles
        )
        return Part.free_body(self, solid + handles)


def spaced(values: tuple[float, ...]) -> str:
    return " ".join(str(value) for value in values)


@dataclass(frozen=True)
class Marker:
    """How the goal is drawn: a ball or a flat disc of this radius, without collisions."""

    kind: str = "ball"
    radius: float = 0.02
    rgb: tuple[float, float, float] = GREEN


BALL = Marker()


@dataclass(frozen=True)
class Scene:
    """The objects, scenery and arms of a task. Tasks with equal scenes share one model."""

    objects: tuple[TableObject, ...] = ()
    marker: Marker | None = BALL  # None: the goal is not drawn
    clutter: tuple[TableObject, ...] = ()  # objects that tasks, experts and observations ignore
    scenery: tuple[Part, ...] = ()  # other parts, which never move
    arms: tuple[Mount, ...] = SINGLE  # their joints come first, in this order

    @property
    def cameras(self) -> tuple[str, ...]:
        return ("head", *(f"{mount.prefix}wrist" for mount in self.arms))

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return tuple(name for thing in self.objects for name in thing.mechanisms)

    def compile(self):
        things = self.objects + self.clutter
        # a sensor is above 0 while any shape of an arm touches any shape of an object; it does not affect the physics
        touch = "".join(
            f'<contact subtree1="{mount.prefix}base" subtree2="{thing.name}" num="1" data="found"/>'
            for mount in self.arms
            for thing in things
        )
        floor = f'<geom name="floor" type="plane" size="0 0 0.1" pos="0 0 {-_TABLE_HEIGHT}" rgba="{_FLOOR}" {SCENERY}/>'
        parts = [
            Part(floor),
            Part(_table()),
            Part(_head_camera(whole_table=bool(self.objects), arms=len(self.arms))),
            *(Part(_arm(mount), _motors(mount.prefix)) for mount in self.arms),
            *(thing.part() for thing in things),
            *self.scenery,
        ]
        bodies, actuators = "".join(part.bodies for part in parts), "".join(part.actuators for part in parts)
        options = " ".join(dict.fromkeys(part.options for part in parts if part.options))
        sensors = "".join(part.sensors for part in parts) + touch
        return load_mujoco().MjModel.from_xml_string(f"""
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
</mujoco>""")


def load_mujoco():
    """Import mujoco without GL. MUJOCO_GL is read once, at import; it is changed only if the user has not set it."""
    unset = "MUJOCO_GL" not in os.environ
    if unset:
        os.environ["MUJOCO_GL"] = "disable"
    try:
        import mujoco
        import mujoco.rollout
    except (AttributeError, ImportError, RuntimeError) as error:
        # PyOpenGL raises AttributeError
        if unset or (isinstance(error, ModuleNotFoundError) and error.name == "mujoco"):
            raise
        advice = "unset it, or install EGL and set MUJOCO_GL=egl"
        raise UserError(f"MUJOCO_GL={os.environ['MUJOCO_GL']} does not work here ({error}); {advice}") from None

    if unset:
        del os.environ["MUJOCO_GL"]
    return mujoco


def _table() -> str:
    half = (_TABLE_HEIGHT - 0.04) / 2
    legs = "".join(
        f'<geom type="box" size="0.03 0.03 {half}" pos="{x} {y} {-0.04 - half}" rgba="{_LEG}" {_NO_COLLISION}/>'
        for x in (-0.44, 0.44)
        for y in (-0.49, 0.49)
    )
    return f"""
    <geom name="table" type="box" size="0.50 0.55 0.02" pos="0 0 -0.02" rgba="{_WOOD}"
      friction="{_SLIDING} 0.005 0.0001" {SCENERY}/>{legs}"""


def _head_camera(whole_table: bool, arms: int) -> str:
    """In front of the arm, above and to one side, so that the hand rarely hides its goal; central for two arms."""
    position = (0.62, -0.52, 0.60)
    target, fovy = ((-0.20, -0.10, 0.05), 48) if whole_table else ((-0.13, 0.0, 0.15), 43)
    if arms > 1:
        position, target, fovy = (0.62, 0.0, 0.95), (-0.15, 0.0, 0.08), 58
    x, y, z = (t - p for p, t in zip(position, target, strict=True))
    axes = (y, -x, 0.0, -x * z, -y * z, x * x + y * y)
    numbers = " ".join(f"{value:.6f}" for value in axes)
    return f'<camera name="head" fovy="{fovy}" pos="{spaced(position)}" xyaxes="{numbers}"/>'


def _arm(mount: Mount) -> str:
    """Six hinges (yaw, three pitches, roll, yaw) and a gripper. Gravity is compensated, as in most real controllers."""
    prefix, solid = mount.prefix, f'contype="{mount.contype}" conaffinity="{mount.conaffinity}"'
    camera = 'pos="-0.080 0 0.040" euler="0 3.42 -1.5708"'
    if mount.camera_side < 0:
        camera = 'pos="0.080 0 0.040" euler="0 -3.42 1.5708"'
    hand = f"""
      <geom type="cylinder" size="0.030 0.025" pos="0 0 0.025" rgba="{_WHITE}" {solid}/>
      <geom type="box" size="0.020 0.056 0.012" pos="0 0 0.060" rgba="{_DARK}" {solid}/>
      <camera name="{prefix}wrist" {camera} fovy="80"/>
      <site name="{prefix}{HAND_SITE}" pos="0 0 0.125"/>
      {_finger(f"{prefix}left_finger", 1, solid)}{_finger(f"{prefix}right_finger", -1, solid)}"""
    links = _link(
        prefix,
        ("base_yaw", "0 0 1", "-2.6 2.6", "0 0 0.08"),
        f'<geom type="cylinder" size="0.052 0.05" pos="0 0 0.05" rgba="{_WHITE}" {solid}/>'
        f'<geom type="cylinder" size="0.046 0.058" pos="0 0 0.1" euler="1.5708 0 0" rgba="{_DARK}" {_NO_COLLISION}/>',
        ("shoulder", "0 1 0", "-1.6 1.6", "0 0 0.1"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.28" size="0.037" rgba="{_ORANGE}" {solid}/>'
        f'<geom type="cylinder" size="0.040 0.046" pos="0 0 0.28" euler="1.5708 0 0" rgba="{_DARK}" {_NO_COLLISION}/>',
        ("elbow", "0 1 0", "-0.1 2.8", "0 0 0.28"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.26" size="0.031" rgba="{_WHITE}" {solid}/>'
        f'<geom type="cylinder" size="0.034 0.038" pos="0 0 0.26" euler="1.5708 0 0" rgba="{_DARK}" {_NO_COLLISION}/>',
        ("wrist_pitch", "0 1 0", "-2 2", "0 0 0.26"),
        f'<geom type="capsule" fromto="0 0 0 0 0 0.06" size="0.028" rgba="{_ORANGE}" {solid}/>',
        ("wrist_roll", "1 0 0", "-1.6 1.6", "0 0 0.06"),
        f'<geom type="sphere" size="0.03" rgba="{_DARK}" {solid}/>',
        ("wrist_yaw", "0 0 1", "-3 3", "0 0 0"),
        hand,
    )
    return f"""
    <body name="{prefix}base" pos="{spaced(mount.base)}">
      <geom type="cylinder" size="0.075 0.04" pos="0 0 0.04" rgba="{_DARK}" {_NO_COLLISION}/>{links}
    </body>"""


def _link(prefix: str, joint: tuple[str, str, str, str], inside: str, *rest) -> str:
    name, axis, limits, pos = joint
    return f"""
    <body name="{prefix}{name}" pos="{pos}" gravcomp="1">
      <joint name="{prefix}{name}" axis="{axis}" range="{limits}"/>{inside}{_link(prefix, *rest) if rest else ""}
    </body>"""


def _finger(name: str, sign: int, solid: str) -> str:
    # the joint's range is wider than the motor's: resting against a stop costs solver time
    return f"""
      <body name="{name}" pos="0 0 0.072" gravcomp="1">
        <joint name="{name}" type="slide" axis="0 {sign} 0" range="-0.001 {FINGER_TRAVEL + 0.001}" damping="10"
          armature="0.01"/>
        <geom type="box" size="0.011 0.006 0.030" pos="0 {sign * 0.006} 0.030" rgba="{_STEEL}" friction="2 0.05 0.001"
          condim="4" {solid}/>
      </body>"""


def _motors(prefix: str) -> str:
    names = ("base_yaw", "shoulder", "elbow", "wrist_pitch", "wrist_roll", "wrist_yaw")
    joints = (f'<position name="{prefix}{n}" joint="{prefix}{n}" kp="400" kv="40" inheritrange="1"/>' for n in names)
    fingers = (
        f'<position name="{prefix}{n}" joint="{prefix}{n}" kp="200" ctrlrange="0 {FINGER_TRAVEL}" forcerange="-15 15"/>'
        for n in ("left_finger", "right_finger")
    )
    return "".join((*joints, *fingers))
