"""Domain randomization. A robot's domain depends only on the seed of its episode and has its own random stream: the
switches do not change the start of a task, and a restored state has the same domain."""

import colorsys
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sparring.envs.tabletop.tasks.base import Task
from sparring.envs.tabletop.tasks.explore import with_clutter
from sparring.envs.tabletop.world import World

_CLUTTER = 3  # number of clutter objects
_FRICTION = (0.7, 1.4)  # range of the factor of the sliding friction
_STREAM = 1  # key of a second random stream of each episode

# light = ambient + sky * (normal . up) + sun * max(0, normal . direction of the sun)
AMBIENT, SKY, SUN = 0.48, 0.12, 0.46
TO_SUN = np.array([0.35, -0.45, 0.82]) / np.linalg.norm([0.35, -0.45, 0.82])
BACKGROUND = np.array([0.80, 0.85, 0.90])
_LEAST_CONTRAST = 0.35  # least distance in RGB of a random colour from the goal's


class Domain:
    """Randomizes the friction and appearance of each robot; clutter is part of the task's scene."""

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
    """The look of n robots, with G shapes (the goal marker last, if any) and M cameras; a row has no leading n."""

    rgb: np.ndarray  # [n, G, 3]
    background: np.ndarray  # [n, 3]
    sun: np.ndarray  # [n, 3] unit vector
    light: np.ndarray  # [n, 3]: ambient, sky, sun
    camera_pos: np.ndarray  # [n, M, 3] offsets in metres, in each camera's own axes
    camera_turn: np.ndarray  # [n, M, 3] rotation vectors, in the same axes
    noise: np.ndarray  # [n] int64: seed of the noise on the screen; below 0: no noise

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
        """Randomize a standard row. Shapes in `keep [G]` keep roughly their colour, all others differ in colour from
        `goal [G]`, `floor [G]` also belongs to the background, `wrist [M]` cameras move less. Every value is drawn,
        colours last, whichever switches are on."""
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
    """Rotation vectors `[..., 3]` -> matrices `[..., 3, 3]`; the zero vector gives exactly the identity."""
    angle = np.linalg.norm(turn, axis=-1)[..., None, None]
    x, y, z = np.moveaxis(turn, -1, 0)
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(*turn.shape, 3)
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * np.sinc(angle / (2 * np.pi)) ** 2 * (cross @ cross)


def _repaint(rng: np.random.Generator, rgb: np.ndarray, keep: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Draw one new colour per old colour, so that an object of several shapes keeps one colour."""
    colours, which = np.unique(rgb, axis=0, return_inverse=True)
    broad = np.array([colorsys.hsv_to_rgb(*rng.uniform([0, 0, 0.2], [1, 0.55, 0.95])) for _ in colours])
    slight = np.array([_nudge(rng, colour) for colour in colours])
    which = which.ravel()
    for marker in slight[which[goal]]:
        broad = np.array([_distinct(marker, colour) for colour in broad])
    return np.where(keep[:, None], slight[which], broad[which])


def _distinct(marker: np.ndarray, rgb: np.ndarray) -> np.ndarray:
    """The colour, or the opposite hue if it is too close to the marker's."""
    if np.linalg.norm(rgb - marker) >= _LEAST_CONTRAST:
        return rgb
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    return np.array(colorsys.hsv_to_rgb((hue + 0.5) % 1.0, saturation, value))


def _nudge(rng: np.random.Generator, rgb: np.ndarray) -> tuple[float, float, float]:
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    hue, saturation = hue + rng.uniform(-0.02, 0.02), saturation * rng.uniform(0.9, 1.1)
    value *= rng.uniform(0.85, 1.1)
    return colorsys.hsv_to_rgb(hue % 1.0, np.clip(saturation, 0, 1), np.clip(value, 0, 1))


def _random_light(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Direction of a sun 25 to 80 degrees above the horizon, and strengths that keep about the standard brightness."""
    height, around = np.deg2rad(rng.uniform(25, 80)), rng.uniform(0, 2 * np.pi)
    sun = np.array([np.cos(height) * np.cos(around), np.cos(height) * np.sin(around), np.sin(height)])
    ambient = rng.uniform(0.35, 0.65)
    return sun, np.array([ambient, rng.uniform(0.05, 0.20), rng.uniform(0.85, 1.0) - ambient])
