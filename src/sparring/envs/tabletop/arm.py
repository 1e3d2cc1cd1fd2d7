"""An arm as MJCF text: six joints and a gripper with two fingers, and where the arms of a robot stand."""

from dataclasses import dataclass
from math import pi

ARM_JOINTS = 6
FINGERS = 2
FINGER_TRAVEL = 0.04
ARM_BASE = (-0.38, 0.0, 0.0)
# shoulder, elbow and wrist add up to pi: the hand points straight down
HOME = (0.0, 0.12028, 1.77534, 1.24597, 0.0, 0.0)
# the name of the hand's site, after a mount's prefix
HAND_SITE = "hand"

_GHOST = 'contype="0" conaffinity="0"'
_WHITE, _ORANGE, _DARK, _STEEL = "0.93 0.93 0.95 1", "0.96 0.52 0.16 1", "0.20 0.22 0.27 1", "0.55 0.58 0.64 1"


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


def arm_bodies(mount: Mount) -> str:
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
    return f"""
    <body name="{prefix}base" pos="{x} {y} {z}">
      <geom type="cylinder" size="0.075 0.04" pos="0 0 0.04" rgba="{_DARK}" {_GHOST}/>{links}
    </body>"""


def arm_motors(mount: Mount) -> str:
    """One for each joint and finger, in the order of the joints."""
    prefix = mount.prefix
    names = ("base_yaw", "shoulder", "elbow", "wrist_pitch", "wrist_roll", "wrist_yaw")
    joints = "".join(
        f'<position name="{prefix}{n}" joint="{prefix}{n}" kp="400" kv="40" inheritrange="1"/>' for n in names
    )
    fingers = "".join(
        f'<position name="{prefix}{n}" joint="{prefix}{n}" kp="200" ctrlrange="0 {FINGER_TRAVEL}" forcerange="-15 15"/>'
        for n in ("left_finger", "right_finger")
    )
    return joints + fingers


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
