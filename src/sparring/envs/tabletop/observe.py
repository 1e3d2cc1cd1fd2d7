"""Observations: robot state and camera images."""

import numpy as np

from sparring.envs.backend import Arrays
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.arm import ARM_JOINTS, FINGER_TRAVEL, FINGERS
from sparring.envs.tabletop.objects import two_columns
from sparring.envs.tabletop.world import World
from sparring.errors import UserError

# ---- What the robots see, as observations: images, depth, segmentation and points of the cameras that are asked for.


# what a view is called in observations
_NAMES = {"rgb": "image", "depth": "depth", "segmentation": "segmentation"}


class Sight:
    def __init__(self, config: TabletopConfig, world: World):
        self._config, self._world = config, world
        asked = {"env.depth": config.depth, "env.segmentation": config.segmentation, "env.points": config.points}
        blind = [key for key, value in asked.items() if value and not config.cameras]
        if blind:
            raise UserError(f"no camera to look through for {' and '.join(blind)}; set e.g. env.cameras=[head]")
        if config.noise_screen and not world.has_screen:
            raise UserError("env.noise_screen=true, but only the task explore has a screen; set env.task=explore")
        self._wants = tuple(
            name for name, on in (("rgb", True), ("depth", config.depth), ("segmentation", config.segmentation)) if on
        )

    def spec(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """name -> (shape, dtype) of each observation."""
        size = self._config.image_size
        types = {"rgb": ((3, size, size), "uint8"), "depth": ((1, size, size), "float32")}
        types["segmentation"] = ((1, size, size), "uint8")
        spec = {f"{_NAMES[kind]}/{name}": types[kind] for kind in self._wants for name in self._config.cameras}
        return spec | ({"points": ((self._config.points, 6), "float32")} if self._config.points else {})

    def observe(self, rows: np.ndarray, goal: np.ndarray) -> Arrays:
        """Of these robots with their goals `[n, 3]`."""
        config = self._config
        if not config.cameras:
            return {}
        views = self._world.views(rows, goal, config.cameras, config.image_size, self._wants, config.points)
        seen = {f"{_NAMES[kind]}/{name}": views[f"{kind}/{name}"] for kind in self._wants for name in config.cameras}
        return seen | ({"points": views["points"]} if config.points else {})


# ---- The layout of `observation/state` and `observation/privileged`, every entry scaled to be about 1.
#
# ==================  ====  =======================================================
# block               size  what
# ==================  ====  =======================================================
# joints              6     joint angles, rad
# fingers             2     opening of each finger, 0 closed to 1 open
# joint_speeds        6     rad/s x 0.3
# finger_speeds       2     m/s x 5
# commanded_joints    6     where the motors pull to, rad
# commanded_fingers   1     0 closed to 1 open
# hand                3     hand position from the table's centre, m x 4
# hand_axis           3     where the fingers point, unit vector
# time_left           1     1 at the start of an episode, 0 at its end
# goal                3     goal from the table's centre, m x 4 *
# goal_from_hand      3     goal - hand, m x 10 *
# object<k>           3     position from the table's centre, m x 4 *
# object<k>_from_hand 3     position - hand, m x 10 *
# object<k>_rotation  6     first two columns of its rotation matrix *
# object<k>_velocity  3     m/s x 2 *
# mechanism<k>        1     0 closed to 1 as far as it goes *
# mechanism<k>_speed  1     of that, per second x 0.2 *
# ==================  ====  =======================================================
#
# Blocks with a star are about the world: with `env.object_state=state` they follow the others, with `privileged` they
# are
# a vector of their own, with `hidden` nobody is shown them.
#
# The four object blocks repeat for each object k of the task, in the order of its scene. Where tasks are mixed there
# are
# as many as the largest needs, zero for a robot that has fewer. The same goes for mechanisms: the joints inside
# objects,
# such as a drawer or a button.
#
# A robot with two arms has the blocks up to `hand_axis` twice, first all `left_`, then all `right_`, and instead of
# `goal_from_hand` and `object<k>_from_hand` two blocks each: `goal_from_left_hand`, `goal_from_right_hand`, and so on.


HAND_SCALE = 4.0
# block -> (size, scale)
_ARM_BLOCKS = {
    "joints": (ARM_JOINTS, 1.0),
    "fingers": (FINGERS, 1 / FINGER_TRAVEL),
    "joint_speeds": (ARM_JOINTS, 0.3),
    "finger_speeds": (FINGERS, 5.0),
    "commanded_joints": (ARM_JOINTS, 1.0),
    "commanded_fingers": (1, 1 / FINGER_TRAVEL),
    "hand": (3, HAND_SCALE),
    "hand_axis": (3, 1.0),
}
_TIME, _PLACE, _FROM_HAND = (1, 1.0), (3, 4.0), (3, 10.0)
_MECHANISM_BLOCKS = {"": (1, 1.0), "_speed": (1, 0.2)}


def _blocks(objects: int, mechanisms: int, arms: int, robot: bool, world: bool) -> dict[str, tuple[int, float]]:
    prefixes = ("",) if arms == 1 else ("left_", "right_")
    body = {f"{prefix}{name}": block for prefix in prefixes for name, block in _ARM_BLOCKS.items()}
    body["time_left"] = _TIME
    from_hands = {f"_from_{prefix}hand": _FROM_HAND for prefix in prefixes}
    goal = {"": _PLACE} | from_hands
    thing = {"": _PLACE} | from_hands | {"_rotation": (6, 1.0), "_velocity": (3, 2.0)}
    things = {f"goal{name}": block for name, block in goal.items()}
    things |= {f"object{k}{name}": block for k in range(objects) for name, block in thing.items()}
    things |= {f"mechanism{k}{name}": block for k in range(mechanisms) for name, block in _MECHANISM_BLOCKS.items()}
    return (body if robot else {}) | (things if world else {})


def layout(
    objects: int = 0, mechanisms: int = 0, arms: int = 1, robot: bool = True, world: bool = True
) -> dict[str, slice]:
    """block -> its place in the vector, in order; of what the robot feels of itself, of the world about it, or both."""
    places, start = {}, 0
    for name, (size, _) in _blocks(objects, mechanisms, arms, robot, world).items():
        places[name] = slice(start, start + size)
        start += size
    return places


def scales(objects: int = 0, mechanisms: int = 0, arms: int = 1, robot: bool = True, world: bool = True) -> np.ndarray:
    """`[S]`: what each entry was multiplied by; divide by it to get metres, radians and seconds back."""
    blocks = _blocks(objects, mechanisms, arms, robot, world)
    return np.concatenate([np.full(size, scale) for size, scale in blocks.values()])


def hand_entries(arms: int) -> tuple[int, ...]:
    """Where the positions of the hands are in `observation/state`, hand after hand."""
    places = layout(arms=arms, world=False)
    names = ("hand",) if arms == 1 else ("left_hand", "right_hand")
    return tuple(entry for name in names for entry in range(places[name].start, places[name].stop))


def object_entries(objects: int, mechanisms: int, arms: int) -> tuple[int, ...]:
    """Where the positions of the objects are in `observation/privileged`, object after object."""
    places = layout(objects, mechanisms, arms, robot=False)
    return tuple(
        entry for k in range(objects) for entry in range(places[f"object{k}"].start, places[f"object{k}"].stop)
    )


def object_blocks(pos: np.ndarray, quat: np.ndarray, velocity: np.ndarray, hands: np.ndarray) -> np.ndarray:
    """Objects `[n, K, 3]`, `[n, K, 4]`, `[n, K, 3]`, hands `[n, R, 3]` to blocks `[n, (12 + 3 R) K]`, unscaled."""
    # an object that is not there has a zero quaternion, and all its entries are zero
    there = quat.any(axis=2, keepdims=True)
    # [n, K, 3 R]
    from_hands = (pos[:, :, None] - hands[:, None]).reshape(*pos.shape[:2], -1)
    blocks = np.concatenate([pos, from_hands, two_columns(quat), velocity], axis=2) * there
    return blocks.reshape(len(pos), -1)


def mechanism_blocks(position: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """`[n, m]` each to their blocks `[n, 2 m]`, not yet scaled."""
    return np.stack([position, speed], axis=2).reshape(len(position), -1)
