"""Objects on the table: their bodies, and the loose ones."""

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from sparring.envs.tabletop.scene import SLIDES, Part, Scene, Thing
from sparring.envs.tabletop.tasks.base import WIDE, Start, standing

# ---- Free bodies as MJCF text: solids to be pushed, grasped or put upon. Held by friction alone.


CUBE_HALF = 0.022
OBJECT = 'contype="3" conaffinity="3"'
_HANDLE = "0.20 0.22 0.27 1"


@dataclass(frozen=True)
class Block:
    """One solid; a cube unless it says otherwise."""

    name: str
    rgb: tuple[float, float, float]
    # half lengths, metres
    half: tuple[float, float, float] = (CUBE_HALF, CUBE_HALF, CUBE_HALF)
    mass: float = 0.06
    # box, ball, cylinder (upright), capsule (along x) or ellipsoid, as large as fits into `half`
    shape: str = "box"
    mechanisms: tuple[str, ...] = ()
    # boxes that are part of it: (centre, half lengths), from its own centre
    handles: tuple[tuple[tuple[float, float, float], tuple[float, float, float]], ...] = ()

    def part(self) -> Part:
        # what is round would roll for ever without friction against rolling
        surface = f'friction="{SLIDES} 0.02 0.001" condim="{4 if self.shape == "box" else 6}" {OBJECT}'
        solid = f'<geom name="{self.name}" {_shape(self)} mass="{self.mass}" rgba="{spaced(self.rgb)} 1" {surface}/>'
        handles = "".join(
            f'<geom type="box" pos="{spaced(pos)}" size="{spaced(half)}" mass="0.02" rgba="{_HANDLE}" {surface}/>'
            for pos, half in self.handles
        )
        return free_body(self, solid + handles)


def free_body(thing: Thing, inside: str) -> Part:
    """A body that moves freely, standing on the table at first; `inside` are its shapes and the bodies it carries.

    Elliptic cones and a stiff friction direction keep it from creeping out of the fingers. Its joint comes after the
    arm's, so that the arm's positions are the first ones whatever stands on the table.
    """
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


# ---- Loose things of many shapes, to play with or to be distracted by, and where on the table they lie.


# one of each shape; not red, blue or green, which the tasks speak of
TOYS = (
    Block("ball", (0.95, 0.58, 0.72), (0.023, 0.023, 0.023), 0.05, "ball"),
    Block("cylinder", (0.95, 0.78, 0.16), (0.020, 0.020, 0.030), 0.06, "cylinder"),
    Block("capsule", (0.56, 0.32, 0.72), (0.042, 0.017, 0.017), 0.05, "capsule"),
    Block("ellipsoid", (0.93, 0.92, 0.86), (0.032, 0.022, 0.018), 0.05, "ellipsoid"),
    Block("box", (0.45, 0.30, 0.20), (0.020, 0.028, 0.024), 0.07),
    Block("tile", (0.28, 0.30, 0.34), (0.035, 0.022, 0.009), 0.06),
)
# metres above the table that things begin: MuJoCo 3.8 finds an ellipsoid that exactly touches it to be deep inside
_DROP = 1e-4
_GAP = 0.01
_AWAY = 0.09
# around the foot of an arm
_BASE = 0.12
_TRIES = 100


class Zone(NamedTuple):
    """What is nearer than `radius` to the line from one point (x, y) to another, which may be the same."""

    one: np.ndarray
    other: np.ndarray
    radius: float

    def room(self, point: np.ndarray) -> float:
        """Metres from its border; negative inside."""
        line, offset = self.other - self.one, point - self.one
        along = np.clip(offset @ line / max(line @ line, 1e-12), 0, 1)
        return np.hypot(*(offset - along * line)) - self.radius


def scatter(rng: np.random.Generator, things: tuple[Thing, ...], zones: list[Zone]) -> np.ndarray:
    """`[k, 7]`: the things on the table at any yaw, apart from each other and, if possible, from the zones."""
    taken, poses = list(zones), np.zeros((len(things), 7))
    for pose, thing in zip(poses, things, strict=True):
        radius = footprint(thing) + _GAP
        point, yaw = _roomy(rng, taken, radius), rng.uniform(-np.pi, np.pi)
        taken.append(Zone(point, point, radius))
        pose[:] = standing(point, thing.half[2] + _DROP, yaw)
    return poses


def with_clutter(scene: Scene, count: int) -> Scene:
    """The same scene with so many things that have nothing to do with the task."""
    toys = (TOYS[k % len(TOYS)] for k in range(count))
    return replace(scene, clutter=tuple(replace(toy, name=f"clutter{k}") for k, toy in enumerate(toys)))


def place_clutter(rng: np.random.Generator, scene: Scene, start: Start) -> np.ndarray:
    """`[c, 7]`: the scene's clutter, away from its objects, from the goal and from the ways between them."""
    if not scene.clutter:
        return np.empty((0, 7))
    points = [*start.objects[:, :2], start.goal[:2]]
    ways = [Zone(one, other, _AWAY) for one, other in combinations_with_replacement(points, 2)]
    objects = [Zone(point, point, footprint(thing)) for thing, point in zip(scene.objects, points, strict=False)]
    arms = [Zone(base, base, _BASE) for base in (np.array(mount.base[:2]) for mount in scene.arms)]
    return scatter(rng, scene.clutter, ways + objects + arms)


def footprint(thing: Thing) -> float:
    """Radius of a circle on the table that it stays inside of at any yaw."""
    return float(np.hypot(*thing.half[:2]))


def _roomy(rng: np.random.Generator, zones: list[Zone], radius: float) -> np.ndarray:
    """The first point with so much room around it, or the best of many."""
    best, most = None, -np.inf
    for _ in range(_TRIES):
        point = WIDE.draw(rng)
        room = min((zone.room(point) for zone in zones), default=np.inf)
        if room > most:
            best, most = point, room
        if room >= radius:
            break
    return best


def two_columns(quat: np.ndarray) -> np.ndarray:
    """`[..., 4]` unit quaternions to the first two columns of their rotation matrices, `[..., 6]`."""
    w, x, y, z = np.moveaxis(quat, -1, 0)
    first = [1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)]
    second = [2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)]
    return np.stack(first + second, axis=-1)
