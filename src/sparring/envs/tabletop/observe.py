"""Observation vectors `state` and `privileged`, and camera views; docs/suite.md has the layout. Entries are scaled to
about 1. Objects that a robot of mixed tasks lacks are zero."""

import numpy as np

from sparring.envs.backend import Arrays
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.scene import ARM_JOINTS, FINGER_TRAVEL, FINGERS
from sparring.envs.tabletop.tasks.base import rotation_columns
from sparring.envs.tabletop.world import World
from sparring.errors import UserError

HAND_SCALE = 4.0
_ARM_BLOCKS = {"joints": (ARM_JOINTS, 1.0), "fingers": (FINGERS, 1 / FINGER_TRAVEL)}  # block -> (size, scale)
_ARM_BLOCKS |= {"joint_speeds": (ARM_JOINTS, 0.3), "finger_speeds": (FINGERS, 5.0)}
_ARM_BLOCKS |= {"commanded_joints": (ARM_JOINTS, 1.0), "commanded_fingers": (1, 1 / FINGER_TRAVEL)}
_ARM_BLOCKS |= {"hand": (3, HAND_SCALE), "hand_axis": (3, 1.0)}
_MECHANISM_BLOCKS = {"": (1, 1.0), "_speed": (1, 0.2)}


def _blocks(objects: int, mechanisms: int, arms: int, robot: bool, world: bool) -> dict[str, tuple[int, float]]:
    prefixes = ("",) if arms == 1 else ("left_", "right_")
    of_robot = {f"{prefix}{name}": block for prefix in prefixes for name, block in _ARM_BLOCKS.items()}
    of_robot["time_left"] = (1, 1.0)
    goal = {"": (3, 4.0)} | {f"_from_{prefix}hand": (3, 10.0) for prefix in prefixes}
    of_object = goal | {"_rotation": (6, 1.0), "_velocity": (3, 2.0)}
    of_world = {f"goal{name}": block for name, block in goal.items()}
    of_world |= {f"object{k}{name}": block for k in range(objects) for name, block in of_object.items()}
    of_world |= {f"mechanism{k}{name}": block for k in range(mechanisms) for name, block in _MECHANISM_BLOCKS.items()}
    return (of_robot if robot else {}) | (of_world if world else {})


def layout(
    objects: int = 0, mechanisms: int = 0, arms: int = 1, robot: bool = True, world: bool = True
) -> dict[str, slice]:
    """block -> its slice of the vector, in order: the robot's own state, goal and objects (`world`), or both."""
    places, start = {}, 0
    for name, (size, _) in _blocks(objects, mechanisms, arms, robot, world).items():
        places[name] = slice(start, start + size)
        start += size
    return places


def scales(objects: int = 0, mechanisms: int = 0, arms: int = 1, robot: bool = True, world: bool = True) -> np.ndarray:
    """`[S]`: the factor of each entry; divide by it to get metres, radians and seconds."""
    blocks = _blocks(objects, mechanisms, arms, robot, world)
    return np.concatenate([np.full(size, scale) for size, scale in blocks.values()])


class Observations:
    """Computes the observations that the config selects. `spec`: observation -> (shape, dtype)."""

    def __init__(self, config: TabletopConfig, world: World, arms: int):
        self._config, self._world = config, world
        views = {"env.depth": config.depth, "env.segmentation": config.segmentation, "env.points": config.points}
        without = [key for key, value in views.items() if value and not config.cameras]
        if without:
            raise UserError(f"env.cameras=[], but {' and '.join(without)} need a camera; set e.g. env.cameras=[head]")
        if config.noise_screen and not world.has_screen:
            raise UserError("env.noise_screen=true, but only the task explore has a screen; set env.task=explore")
        counts, size = (world.num_objects, world.num_mechanisms, arms), config.image_size
        self._robot_scale, self._world_scale = scales(*counts, world=False), scales(*counts, robot=False)
        entries = len(self._robot_scale) + (len(self._world_scale) if config.object_state == "state" else 0)
        length = padded("env.pad_state", config.pad_state, entries)
        self._padding = length - entries
        self.spec: dict[str, tuple[tuple[int, ...], str]] = {"state": ((length,), "float32")}
        objects = []
        if config.object_state == "privileged":
            self.spec["privileged"] = ((len(self._world_scale),), "float32")
            objects = [f"object{k}" for k in range(world.num_objects)]
        hands = ["hand"] if arms == 1 else ["left_hand", "right_hand"]
        self.hand_entries = _entries(layout(arms=arms, world=False), hands)
        self.object_entries = _entries(layout(*counts, robot=False), objects)
        kinds = {"rgb": ("image", 3, "uint8")}  # kind of a view -> its name in observations, channels and dtype
        kinds |= {"depth": ("depth", 1, "float32")} if config.depth else {}
        kinds |= {"segmentation": ("segmentation", 1, "uint8")} if config.segmentation else {}
        self._kinds, self._views = tuple(kinds), {}  # observation -> view
        for kind, (name, channels, dtype) in kinds.items():
            for camera in config.cameras:
                self.spec[f"{name}/{camera}"] = ((channels, size, size), dtype)
                self._views[f"{name}/{camera}"] = f"{kind}/{camera}"
        if config.points:
            self.spec["points"], self._views["points"] = ((config.points, 6), "float32"), "points"

    def observe(
        self, rows: np.ndarray, command: np.ndarray, hands: np.ndarray, axes: np.ndarray, goal: np.ndarray, time_left
    ) -> Arrays:
        n = len(rows)
        arms = [self._world.arms(rows), self._world.arms(rows, speeds=True), command, hands, axes]
        robot = [np.concatenate(arms, axis=2).reshape(n, -1), time_left[:, None]]  # [n, R, 29] -> [n, 29 R]
        state, others = (np.concatenate(robot, axis=1) * self._robot_scale).astype(np.float32), {}
        config = self._config
        if config.object_state != "hidden":
            blocks = [goal, (goal[:, None] - hands).reshape(n, -1), *self._object_blocks(rows, hands)]
            world = (np.concatenate(blocks, axis=1) * self._world_scale).astype(np.float32)
            if config.object_state == "state":
                state = np.concatenate([state, world], axis=1)
            else:
                others["privileged"] = world
        if config.cameras:
            views = self._world.views(rows, goal, config.cameras, config.image_size, self._kinds, config.points)
            others |= {name: views[view] for name, view in self._views.items()}
        return {"state": np.pad(state, ((0, 0), (0, self._padding))) if self._padding else state, **others}

    def _object_blocks(self, rows: np.ndarray, hands: np.ndarray) -> list[np.ndarray]:
        """Unscaled blocks of the objects `[n, (12 + 3 R) K]` and of the mechanisms `[n, 2 m]`."""
        n, blocks = len(rows), []
        if self._world.num_objects:
            pos, quat, velocity = self._world.objects(rows)
            exists = quat.any(axis=2, keepdims=True)  # a missing object has a zero quaternion
            from_hands = (pos[:, :, None] - hands[:, None]).reshape(*pos.shape[:2], -1)  # [n, K, 3 R]
            block = np.concatenate([pos, from_hands, rotation_columns(quat), velocity], axis=2) * exists
            blocks.append(block.reshape(n, -1))
        if self._world.num_mechanisms:
            blocks.append(np.stack(self._world.mechanisms(rows), axis=2).reshape(n, -1))
        return blocks


def padded(key: str, length: int, size: int) -> int:
    if length and length < size:
        raise UserError(f"{key}={length} is less than the {size} entries without padding; set at least {size}, or 0")
    return length or size


def _entries(places: dict[str, slice], names: list[str]) -> tuple[int, ...]:
    return tuple(entry for name in names for entry in range(places[name].start, places[name].stop))
