"""Domain randomization. A robot's domain is a function of its episode's seed, drawn apart from the task's start: a
switch changes no start, and a restored state finds its domain again."""

import colorsys
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sparring.envs.tabletop.tasks.base import Task
from sparring.envs.tabletop.tasks.explore import with_clutter
from sparring.envs.tabletop.world import World

_CLUTTER = 3  # of a task's scene when clutter is switched on
_FRICTION = (0.7, 1.4)  # sliding friction is multiplied by a number between these
_STREAM = 1  # a second stream of random numbers for the same episode

# light = ambient + sky * (how much a face looks up) + sun * (how much it looks to the sun)
AMBIENT, SKY, SUN = 0.48, 0.12, 0.46
TO_SUN = np.array([0.35, -0.45, 0.82]) / np.linalg.norm([0.35, -0.45, 0.82])
BACKGROUND = np.array([0.80, 0.85, 0.90])
_APART = 0.35  # least distance of random colours to the goal's


class Domain:
    """Friction and appearance of each robot's world; clutter is part of the task's scene."""

    def __init__(self, switches: tuple[str, ...], world: World):
        self._world = world
        self._friction = "friction" in switches
        self._appearance = {"appearance", "background", "light", "camera_pose"}.intersection(switches)

    @staticmethod
    def cluttered(task: Task) -> Task:
        return replace(task, scene=with_clutter(task.scene, _CLUTTER))  # type: ignore[type-var]

    def begin(self, row: int, seed: int) -> None:
        rng = np.random.default_rng([seed, _STREAM])
        friction = rng.uniform(*_FRICTION)
        if self._friction:
            self._world.set_friction(row, friction)
        if self._appearance:
            self._world.set_appearance(row, rng, self._appearance)


class Appearance(NamedTuple):
    """Of n robots, G shapes (the goal marker last, if there is one) and M cameras; one row has no leading n."""

    rgb: np.ndarray  # [n, G, 3]
    background: np.ndarray  # [n, 3]
    sun: np.ndarray  # [n, 3] unit vector
    light: np.ndarray  # [n, 3]: ambient, sky, sun
    camera_pos: np.ndarray  # [n, M, 3] metres, in each camera's own axes
    camera_turn: np.ndarray  # [n, M, 3] rotation vectors, likewise
    noise: np.ndarray  # [n] int64: which static the screen shows; below 0 it is off

    @classmethod
    def standard(cls, rgb: np.ndarray, cameras: int, n: int) -> "Appearance":
        return cls(
            rgb=np.tile(rgb, (n, 1, 1)),
            background=np.tile(BACKGROUND, (n, 1)),
            sun=np.tile(TO_SUN, (n, 1)),
            light=np.tile([AMBIENT, SKY, SUN], (n, 1)),
            camera_pos=np.zeros((n, cameras, 3)),
            camera_turn=np.zeros((n, cameras, 3)),
            noise=np.full(n, -1),
        )

    def rows(self, index) -> "Appearance":
        return Appearance(*(field[index] for field in self))

    def randomized(
        self,
        rng: np.random.Generator,
        switches: Collection[str],
        keep: np.ndarray,
        goal: np.ndarray,
        floor: np.ndarray,
        wrist: np.ndarray,
    ) -> "Appearance":
        """From one robot's standard row. Shapes in `keep [G]` stay recognisable, `goal [G]` has a colour of its own,
        `floor [G]` is background too, `wrist [M]` cameras move less. All is drawn for any switches, colours last."""
        sky = rng.uniform(0.15, 0.95, 3)
        sun, strengths = _random_light(rng)
        metres = np.where(wrist, 0.005, 0.02)[:, None]
        radians = np.deg2rad(np.where(wrist, 1.0, 2.0))[:, None]
        camera_pos = rng.uniform(-metres, metres, self.camera_pos.shape)
        camera_turn = rng.uniform(-radians, radians, self.camera_turn.shape)
        painted = _repaint(rng, self.rgb, keep, goal)
        repainted = (floor & ("background" in switches)) | ("appearance" in switches)
        changes = {"rgb": np.where(repainted[:, None], painted, self.rgb)}
        if "background" in switches:
            changes["background"] = sky
        if "light" in switches:
            changes |= {"sun": sun, "light": strengths}
        if "camera_pose" in switches:
            changes |= {"camera_pos": camera_pos, "camera_turn": camera_turn}
        return self._replace(**changes)


def rotations(turn: np.ndarray) -> np.ndarray:
    """Rotation vectors `[..., 3]` to matrices `[..., 3, 3]`; the zero vector gives exactly the identity."""
    angle = np.linalg.norm(turn, axis=-1)[..., None, None]
    x, y, z = np.moveaxis(turn, -1, 0)
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(*turn.shape, 3)
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * np.sinc(angle / (2 * np.pi)) ** 2 * (cross @ cross)


def _repaint(rng: np.random.Generator, rgb: np.ndarray, keep: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """One new colour per old one: a thing of several shapes keeps one colour."""
    colours, which = np.unique(rgb, axis=0, return_inverse=True)
    broad = np.array([colorsys.hsv_to_rgb(*rng.uniform([0, 0, 0.2], [1, 0.55, 0.95])) for _ in colours])
    slight = np.array([_nudge(rng, colour) for colour in colours])
    which = which.ravel()
    for marker in slight[which[goal]]:
        broad = np.array([_unlike(marker, colour) for colour in broad])
    return np.where(keep[:, None], slight[which], broad[which])


def _unlike(marker: np.ndarray, rgb: np.ndarray) -> np.ndarray:
    """The colour, or its opposite where it is too near to the marker's."""
    if np.linalg.norm(rgb - marker) >= _APART:
        return rgb
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    return np.array(colorsys.hsv_to_rgb((hue + 0.5) % 1.0, saturation, value))


def _nudge(rng: np.random.Generator, rgb: np.ndarray) -> tuple[float, float, float]:
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    hue, saturation = hue + rng.uniform(-0.02, 0.02), saturation * rng.uniform(0.9, 1.1)
    value *= rng.uniform(0.85, 1.1)
    return colorsys.hsv_to_rgb(hue % 1.0, np.clip(saturation, 0, 1), np.clip(value, 0, 1))


def _random_light(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A sun 25 to 80 degrees high, with about the usual brightness."""
    height, around = np.deg2rad(rng.uniform(25, 80)), rng.uniform(0, 2 * np.pi)
    sun = np.array([np.cos(height) * np.cos(around), np.cos(height) * np.sin(around), np.sin(height)])
    ambient = rng.uniform(0.35, 0.65)
    return sun, np.array([ambient, rng.uniform(0.05, 0.20), rng.uniform(0.85, 1.0) - ambient])
