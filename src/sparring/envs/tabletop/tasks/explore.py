"""Loose objects of many shapes: the task `explore`, and clutter for other tasks."""

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from sparring.envs.tabletop.scene import SCENERY, SCREEN, Part, Scene, Solid, TableObject
from sparring.envs.tabletop.tasks.base import WIDE, Situation, Start, TabletopTask, arm_near_home, standing

# one of each shape; not red, blue or green, because instructions name these colours
TOYS = (
    Solid("ball", (0.95, 0.58, 0.72), (0.023, 0.023, 0.023), 0.05, "ball"),
    Solid("cylinder", (0.95, 0.78, 0.16), (0.020, 0.020, 0.030), 0.06, "cylinder"),
    Solid("capsule", (0.56, 0.32, 0.72), (0.042, 0.017, 0.017), 0.05, "capsule"),
    Solid("ellipsoid", (0.93, 0.92, 0.86), (0.032, 0.022, 0.018), 0.05, "ellipsoid"),
    Solid("box", (0.45, 0.30, 0.20), (0.020, 0.028, 0.024), 0.07),
    Solid("tile", (0.28, 0.30, 0.34), (0.035, 0.022, 0.009), 0.06),
)
_DROP = 1e-4  # metres above the table: MuJoCo 3.8 computes a deep penetration for an ellipsoid that just touches
_GAP, _AWAY, _BASE = 0.01, 0.09, 0.12  # metres: between objects, from the paths to the goal, around an arm's base
_TRIES = 100


class _Zone(NamedTuple):
    """All points within `radius` of the segment from one point (x, y) to another."""

    one: np.ndarray
    other: np.ndarray
    radius: float

    def room(self, point: np.ndarray) -> float:
        """Distance to its border in metres; negative inside."""
        line, offset = self.other - self.one, point - self.one
        along = np.clip(offset @ line / max(line @ line, 1e-12), 0, 1)
        return np.hypot(*(offset - along * line)) - self.radius


def _scatter(rng: np.random.Generator, things: tuple[TableObject, ...], zones: list[_Zone]) -> np.ndarray:
    taken, poses = list(zones), np.zeros((len(things), 7))
    for pose, thing in zip(poses, things, strict=True):
        radius, best, most = _footprint(thing) + _GAP, np.zeros(2), -np.inf
        for _ in range(_TRIES):  # the first point with enough room around it, or the best of many
            point = WIDE.draw(rng)
            room = min((zone.room(point) for zone in taken), default=np.inf)
            if room > most:
                best, most = point, room
            if room >= radius:
                break
        taken.append(_Zone(best, best, radius))
        pose[:] = standing(best, thing.half[2] + _DROP, yaw=rng.uniform(-np.pi, np.pi))
    return poses


def with_clutter(scene: Scene, count: int) -> Scene:
    toys = (TOYS[k % len(TOYS)] for k in range(count))
    return replace(scene, clutter=tuple(replace(toy, name=f"clutter{k}") for k, toy in enumerate(toys)))


def place_clutter(rng: np.random.Generator, scene: Scene, start: Start) -> np.ndarray:
    points = [*start.objects[:, :2], start.goal[:2]]
    paths = [_Zone(one, other, _AWAY) for one, other in combinations_with_replacement(points, 2)]
    objects = [_Zone(point, point, _footprint(thing)) for thing, point in zip(scene.objects, points, strict=False)]
    arms = [_Zone(base, base, _BASE) for base in (np.array(mount.base[:2]) for mount in scene.arms)]
    return _scatter(rng, scene.clutter, paths + objects + arms)


def _footprint(thing: TableObject) -> float:
    return float(np.hypot(*thing.half[:2]))


_STAND = Part(f"""
    <geom name="{SCREEN}" type="box" size="0.006 0.16 0.11" pos="-0.47 0.37 0.125" rgba="0.10 0.11 0.13 1" {SCENERY}/>
    <geom type="box" size="0.02 0.05 0.008" pos="-0.475 0.37 0.008" rgba="0.55 0.58 0.64 1" {SCENERY}/>""")


@dataclass(frozen=True)
class Explore(TabletopTask):
    """No reward and no success. The screen shows noise if env.noise_screen is true."""

    scene: Scene = Scene(TOYS, marker=None, scenery=(_STAND,))
    instructions: tuple[str, ...] = (
        "look around and play with the things on the table",
        "explore the table",
        "try out what the things on the table do",
        "do whatever is interesting",
    )
    max_episode_steps: int = 100
    reports_success: bool = False

    def start(self, rng: np.random.Generator) -> Start:
        arm = arm_near_home(rng, self.joint_noise)
        return Start(arm, np.zeros(3), _scatter(rng, self.scene.objects, zones=[]))

    def score(self, now: Situation) -> tuple[np.ndarray, np.ndarray]:
        n = len(now.hand)
        return np.zeros(n), np.zeros(n, bool)

    def describe(self) -> dict[str, str]:
        return {f"{len(TOYS)} objects": str(WIDE), "yaw": "any"}
