"""The layout of `observation/state`, every entry scaled to be about 1.

==================  ====  =======================================================
block               size  what
==================  ====  =======================================================
joints              6     joint angles, rad
fingers             2     opening of each finger, 0 closed to 1 open
joint_speeds        6     rad/s x 0.3
finger_speeds       2     m/s x 5
commanded_joints    6     where the motors pull to, rad
commanded_fingers   1     0 closed to 1 open
hand                3     hand position from the table's centre, m x 4
hand_axis           3     where the fingers point, unit vector
time_left           1     1 at the start of an episode, 0 at its end
goal                3     goal from the table's centre, m x 4 (object_state)
goal_from_hand      3     goal - hand, m x 10 (object_state)
object<k>           3     position from the table's centre, m x 4 (object_state)
object<k>_from_hand 3     position - hand, m x 10 (object_state)
object<k>_rotation  6     first two columns of its rotation matrix (object_state)
object<k>_velocity  3     m/s x 2 (object_state)
==================  ====  =======================================================

The four object blocks repeat for each object k of the task, in the order of its scene. Where tasks are mixed there are
as many as the largest needs, zero for a robot that has fewer.

A robot with two arms has the blocks up to `hand_axis` twice, first all `left_`, then all `right_`, and instead of
`goal_from_hand` and `object<k>_from_hand` two blocks each: `goal_from_left_hand`, `goal_from_right_hand`, and so on.
"""

import numpy as np

from sparring.envs.tabletop.arm import ARM_JOINTS, FINGER_TRAVEL, FINGERS

# block -> (size, scale)
_ARM_BLOCKS = {
    "joints": (ARM_JOINTS, 1.0),
    "fingers": (FINGERS, 1 / FINGER_TRAVEL),
    "joint_speeds": (ARM_JOINTS, 0.3),
    "finger_speeds": (FINGERS, 5.0),
    "commanded_joints": (ARM_JOINTS, 1.0),
    "commanded_fingers": (1, 1 / FINGER_TRAVEL),
    "hand": (3, 4.0),
    "hand_axis": (3, 1.0),
}
_TIME, _PLACE, _FROM_HAND = (1, 1.0), (3, 4.0), (3, 10.0)


def _blocks(object_state: bool, objects: int, arms: int) -> dict[str, tuple[int, float]]:
    prefixes = ("",) if arms == 1 else ("left_", "right_")
    robot = {f"{prefix}{name}": block for prefix in prefixes for name, block in _ARM_BLOCKS.items()}
    robot["time_left"] = _TIME
    if not object_state:
        return robot
    from_hands = {f"_from_{prefix}hand": _FROM_HAND for prefix in prefixes}
    goal = {"": _PLACE} | from_hands
    thing = {"": _PLACE} | from_hands | {"_rotation": (6, 1.0), "_velocity": (3, 2.0)}
    each = {f"object{k}{name}": block for k in range(objects) for name, block in thing.items()}
    return robot | {f"goal{name}": block for name, block in goal.items()} | each


def layout(object_state: bool = True, objects: int = 0, arms: int = 1) -> dict[str, slice]:
    """block -> its place in `observation/state`, in order."""
    places, start = {}, 0
    for name, (size, _) in _blocks(object_state, objects, arms).items():
        places[name] = slice(start, start + size)
        start += size
    return places


def scales(object_state: bool = True, objects: int = 0, arms: int = 1) -> np.ndarray:
    """`[S]`: what each entry was multiplied by; divide by it to get metres, radians and seconds back."""
    return np.concatenate([np.full(size, scale) for size, scale in _blocks(object_state, objects, arms).values()])


def object_blocks(pos: np.ndarray, quat: np.ndarray, velocity: np.ndarray, hands: np.ndarray) -> np.ndarray:
    """Objects `[n, K, 3]`, `[n, K, 4]`, `[n, K, 3]`, hands `[n, R, 3]` to blocks `[n, (12 + 3 R) K]`, unscaled."""
    # an object that is not there has a zero quaternion, and all its entries are zero
    there = quat.any(axis=2, keepdims=True)
    # [n, K, 3 R]
    from_hands = (pos[:, :, None] - hands[:, None]).reshape(*pos.shape[:2], -1)
    blocks = np.concatenate([pos, from_hands, two_columns(quat), velocity], axis=2) * there
    return blocks.reshape(len(pos), -1)


def two_columns(quat: np.ndarray) -> np.ndarray:
    """`[..., 4]` unit quaternions to the first two columns of their rotation matrices, `[..., 6]`."""
    w, x, y, z = np.moveaxis(quat, -1, 0)
    first = [1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)]
    second = [2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)]
    return np.stack(first + second, axis=-1)
