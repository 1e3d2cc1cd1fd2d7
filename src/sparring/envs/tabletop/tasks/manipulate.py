"""Tasks with cubes: push one, lift it, put it on something."""

from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from sparring.envs.tabletop.scene import BLUE, CUBE_HALF, FINGER_TRAVEL, GREEN, RED, Marker, Scene, Solid, TableObject
from sparring.envs.tabletop.tasks import base

_RED_CUBE = Solid("red_cube", RED)
_BLUE_CUBE = Solid("blue_cube", BLUE)
COLOURS = {"red": _RED_CUBE, "blue": _BLUE_CUBE, "green": Solid("green_cube", GREEN)}
_BLUE_PLATE = Solid("blue_plate", BLUE, half=(0.045, 0.045, 0.008), mass=0.5)  # too high to push a cube onto
REACHABLE = base.Sector(0.12, 0.515, 120)  # where a hand that points down can touch the table, with a margin
_PRESSED = 0.012  # metres; an opening that a cube prevents: a finger commanded below it presses on the cube


@dataclass(frozen=True)
class Push(base.TabletopTask):
    """Push the cube onto a disc on the table and leave it there. The gripper starts closed."""

    cube: base.Sector
    goal: base.Sector
    travel: tuple[float, float]  # metres from the cube's start to the disc
    yaw: float  # degrees to either side; a cube looks the same every 90 degrees, so 45 is any yaw
    scene: Scene = Scene((_RED_CUBE,), Marker("disc", 0.05, GREEN))
    instructions: tuple[str, ...] = (
        "push the red cube onto the green disc",
        "slide the red cube to the green circle",
        "move the red block onto the green spot by pushing it",
        "shove the cube over to the green disc",
    )
    max_episode_steps: int = 60
    radius: float = 0.04

    def start(self, rng: np.random.Generator) -> base.Start:
        arm = base.arm_near_home(rng, self.joint_noise, opening=0.0)
        while True:
            cube, goal = _points_apart(rng, (self.cube, self.goal), *self.travel)
            # the arm must reach behind the cube
            if REACHABLE.holds(cube - 0.06 * (goal - cube) / np.hypot(*(goal - cube))):
                break
        return base.Start(arm, np.array([*goal, 0.0]), resting(_RED_CUBE, cube, rng, self.yaw)[None])

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        cube = now.objects[:, 0]
        away = base.distance(cube[:, :2], now.goal[:, :2])
        satisfied = away < self.radius
        # where the hand touches the side of the cube away from the goal: [n, 3]
        towards = now.goal[:, :2] - cube[:, :2]
        towards = towards / np.maximum(np.linalg.norm(towards, axis=1, keepdims=True), 1e-3)
        behind = np.concatenate([cube[:, :2] - 0.035 * towards, np.full((len(cube), 1), 0.03)], axis=1)
        near = 1 - np.tanh(8 * base.distance(now.hand, behind))
        return (0.2 * near + 0.8 * (1 - np.tanh(8 * away)) + 0.5 * satisfied) / 1.5, satisfied

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        cube, n = now.objects[:, 0], len(now.hand)
        way = now.goal[:, :2] - cube[:, :2]
        left = np.linalg.norm(way, axis=1, keepdims=True)
        way = way / np.maximum(left, 1e-3)
        hand = now.hand[:, :2] - cube[:, :2]
        along, aside = np.einsum("ni,ni->n", hand, way), hand[:, 0] * way[:, 1] - hand[:, 1] * way[:, 0]
        behind = cube[:, :2] - 0.052 * way
        low, off = now.hand[:, 2] < 0.05, base.distance(now.hand[:, :2], behind)

        high = now.hand[:, 2] > 0.06  # first up, then over to the side behind the cube, then down
        xy = np.where(high[:, None], behind, now.hand[:, :2])
        z = np.where(off < 0.015, 0.022, 0.08)
        ready = low & (along < -0.02) & (np.abs(aside) < 0.016)
        pushing = cube[:, :2] + (np.minimum(left, 0.04) - 0.034) * way
        xy, z = np.where(ready[:, None], pushing, xy), np.where(ready, 0.022, z)
        done = left[:, 0] < 0.012
        xy = np.where(done[:, None], now.hand[:, :2], xy)
        return base.HandTarget(np.concatenate([xy, z[:, None]], axis=1), np.zeros(n), -np.ones(n), np.ones(n))

    def describe(self) -> dict[str, str]:
        low, high = self.travel
        return {"cube": str(self.cube), "yaw": yaw_range(self.yaw), "disc": f"{low:.2f}..{high:.2f} m from the cube"}


@dataclass(frozen=True)
class Lift(base.TabletopTask):
    """Grasp the first cube and hold it 6 cm or more above its start; other objects may stand nearby."""

    cube: base.Sector
    yaw: float
    scene: Scene = Scene((_RED_CUBE,), marker=None)
    instructions: tuple[str, ...] = (
        "lift the red cube",
        "pick up the red cube",
        "grasp the red block and raise it",
        "take the cube off the table",
    )
    max_episode_steps: int = 50
    height: float = 0.06
    # where the scene's other objects stand, and least metres between all objects: the open fingers fit in between
    others: tuple[base.Sector, ...] = ()
    apart: float = 0.10

    def start(self, rng: np.random.Generator) -> base.Start:
        arm = base.arm_near_home(rng, self.joint_noise)
        points = _points_apart(rng, (self.cube, *self.others), self.apart, np.inf)
        cubes = np.stack([resting(_RED_CUBE, point, rng, self.yaw) for point in points])
        return base.Start(arm, cubes[0, :3] + [0.0, 0.0, self.height + 0.02], cubes)

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        cube = now.objects[:, 0]
        risen = cube[:, 2] - CUBE_HALF
        held, satisfied = _holding(now), risen > self.height
        near = 1 - np.tanh(8 * base.distance(now.hand, cube))
        reward = 0.3 * near + held * (0.2 + np.clip(risen / (self.height + 0.02), 0, 1) + 0.5 * satisfied)
        return reward / 2, satisfied

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        cube = now.objects[:, 0]
        point, grip, held = base.grasp(now.hand, now.grip, cube, pressed=_PRESSED)
        point[held] = np.stack([now.hand[held, 0], now.hand[held, 1], now.goal[held, 2] + 0.02], axis=1)
        return base.HandTarget(point, _face(now.quats[:, 0]), grip, np.ones(len(cube)))

    def describe(self) -> dict[str, str]:
        return {"cube": str(self.cube), "yaw": yaw_range(self.yaw), "height": f"{self.height:.2f} m"}

    @classmethod
    def pick(cls, name: str, cubes: dict[str, base.Sector], yaw: float, noise: float) -> "Lift":
        """Lift the cube whose colour is in `name`; only the instruction identifies it. `cubes`: colour -> start."""
        colour = name.split("_")[1]
        instructions = (
            f"lift the {colour} cube",
            f"pick up the {colour} cube",
            f"grasp the {colour} block and raise it",
            f"take the {colour} one off the table",
        )
        others = [other for other in cubes if other != colour]
        scene = Scene((COLOURS[colour], *(COLOURS[other] for other in others)), marker=None)
        where = tuple(cubes[other] for other in others)
        return cls(name, cubes[colour], yaw, scene, instructions, others=where, joint_noise=noise)


@dataclass(frozen=True)
class _PutOn(base.TabletopTask):
    """Grasp the cube, put it on the second object, release it and move the hand away."""

    cube: base.Sector
    support: base.Sector
    apart: tuple[float, float]  # metres between the two at the start
    yaw: float
    scene: Scene
    instructions: tuple[str, ...]
    tolerance: float  # largest horizontal distance of the cube from the middle, metres
    max_episode_steps: int = 80

    def start(self, rng: np.random.Generator) -> base.Start:
        arm = base.arm_near_home(rng, self.joint_noise)
        cube, support = _points_apart(rng, (self.cube, self.support), *self.apart)
        below = resting(self.scene.objects[1], support, rng, self.yaw)
        objects = np.stack([resting(_RED_CUBE, cube, rng, self.yaw), below])
        return base.Start(arm, _resting_place(objects[None, :, :3], self.scene)[0], objects)

    def score(self, now: base.Situation) -> tuple[np.ndarray, np.ndarray]:
        cube, target = now.objects[:, 0], _resting_place(now.objects, self.scene)
        from_hand, held = base.distance(now.hand, cube), _holding(now)
        on = (base.distance(cube[:, :2], target[:, :2]) < self.tolerance) & (np.abs(cube[:, 2] - target[:, 2]) < 0.006)
        satisfied = on & ~held & (from_hand > 0.04)
        near, there = 1 - np.tanh(8 * from_hand), 1 - np.tanh(8 * base.distance(cube, target))
        carried = 0.15 * near + held * (0.1 + 0.35 * there)
        # each stage has a higher reward than the one before
        opened, drawn_back = np.clip(now.width / (2 * FINGER_TRAVEL), 0, 1), np.clip(from_hand / 0.04, 0, 1)
        reward = np.where(on, 0.65 + 0.2 * opened + 0.1 * drawn_back, carried)
        return np.where(satisfied, 1.0, reward), satisfied

    @staticmethod
    def expert(now: base.Situation) -> base.HandTarget:
        cube, target, offset = now.objects[:, 0], now.goal.copy(), now.hand - now.objects[:, 0]
        target[:, :2] = now.objects[:, 1, :2]
        point, grip, held = base.grasp(now.hand, now.grip, cube, pressed=_PRESSED)
        aside, height = base.distance(cube[:, :2], target[:, :2]), cube[:, 2] - target[:, 2]
        clear = height > 0.015  # straight up until it clears the second object, then over, then down
        carry = np.where(clear[:, None], target, cube)
        carry[:, 2] = target[:, 2] + np.where(aside < 0.008, 0.0, 0.035)
        point = np.where(held[:, None], carry + offset, point)

        there = (aside < 0.015) & (np.abs(height) < 0.005)
        let_go = now.width > 0.07
        away = now.hand.copy()
        away[:, 2] = np.where(let_go, target[:, 2] + 0.08, away[:, 2])
        point, grip = np.where(there[:, None], away, point), np.where(there, 1.0, grip)
        speed = np.where(held & (aside < 0.02), 0.5, 1.0)
        return base.HandTarget(point, _face(now.quats[:, 0]), grip, speed)

    def describe(self) -> dict[str, str]:
        low, high = self.apart
        below = f"{low:.2f}..{high:.2f} m from the cube"
        return {"cube": str(self.cube), "yaw": yaw_range(self.yaw), self.scene.objects[1].name: below}


PLACE = partial(
    _PutOn,
    scene=Scene((_RED_CUBE, _BLUE_PLATE), marker=None),
    instructions=(
        "put the red cube on the blue plate",
        "place the red cube onto the blue plate",
        "pick up the red block and set it down on the plate",
        "move the cube to the blue plate and let go",
    ),
    tolerance=0.03,
)
STACK = partial(
    _PutOn,
    scene=Scene((_RED_CUBE, _BLUE_CUBE), marker=None),
    instructions=(
        "stack the red cube on the blue cube",
        "put the red cube on top of the blue one",
        "build a tower: red on blue",
        "place the red block onto the blue block",
    ),
    tolerance=0.02,
)


def _face(quat: np.ndarray) -> np.ndarray:
    yaw = 2 * np.arctan2(quat[:, 3], quat[:, 0])
    return (yaw + np.pi / 4) % (np.pi / 2) - np.pi / 4


def _points_apart(rng: np.random.Generator, sectors: tuple[base.Sector, ...], low: float, high: float) -> np.ndarray:
    """Draw a point in each sector; all distances between points are `low` to `high` metres."""
    while True:
        points = np.stack([sector.draw(rng) for sector in sectors])
        if all(low <= np.hypot(*(other - one)) <= high for one, other in combinations(points, 2)):
            return points


def resting(thing: TableObject, point: np.ndarray, rng: np.random.Generator, yaw: float) -> np.ndarray:
    return base.standing(point, thing.half[2], np.deg2rad(rng.uniform(-yaw, yaw)))


def _resting_place(objects: np.ndarray, scene: Scene) -> np.ndarray:
    return objects[:, 1] + [0.0, 0.0, scene.objects[1].half[2] + scene.objects[0].half[2]]


def _holding(now: base.Situation) -> np.ndarray:
    """`[n]` bool: the hand is at the first object, and a cube's side, up to its diagonal, keeps the fingers open."""
    close = base.distance(now.hand, now.objects[:, 0]) < 0.025
    held_open = (now.width > 2 * CUBE_HALF - 0.01) & (now.width < 2 * CUBE_HALF * np.sqrt(2) + 0.004)
    return close & held_open & (2 * now.grip < now.width - 0.008)


def yaw_range(degrees: float) -> str:
    return "any" if degrees == 45 else f"+-{degrees:g} deg"
