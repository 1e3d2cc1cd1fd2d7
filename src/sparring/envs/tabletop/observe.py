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
mechanism<k>        1     0 closed to 1 as far as it goes (object_state)
mechanism<k>_speed  1     of that, per second x 0.2 (object_state)
==================  ====  =======================================================

The four object blocks repeat for each object k of the task, in the order of its scene. Where tasks are mixed there are
as many as the largest needs, zero for a robot that has fewer. The same goes for mechanisms: the joints inside objects,
such as a drawer or a button.
"""

import numpy as np

from sparring.envs.tabletop.scene import ARM_JOINTS, FINGER_TRAVEL, FINGERS

# block -> (size, scale)
_ROBOT_BLOCKS = {
    "joints": (ARM_JOINTS, 1.0),
    "fingers": (FINGERS, 1 / FINGER_TRAVEL),
    "joint_speeds": (ARM_JOINTS, 0.3),
    "finger_speeds": (FINGERS, 5.0),
    "commanded_joints": (ARM_JOINTS, 1.0),
    "commanded_fingers": (1, 1 / FINGER_TRAVEL),
    "hand": (3, 4.0),
    "hand_axis": (3, 1.0),
    "time_left": (1, 1.0),
}
_GOAL_BLOCKS = {"goal": (3, 4.0), "goal_from_hand": (3, 10.0)}
_OBJECT_BLOCKS = {"": (3, 4.0), "_from_hand": (3, 10.0), "_rotation": (6, 1.0), "_velocity": (3, 2.0)}
_MECHANISM_BLOCKS = {"": (1, 1.0), "_speed": (1, 0.2)}


def _blocks(object_state: bool, objects: int, mechanisms: int) -> dict[str, tuple[int, float]]:
    if not object_state:
        return _ROBOT_BLOCKS
    each = {f"object{k}{name}": block for k in range(objects) for name, block in _OBJECT_BLOCKS.items()}
    moving = {f"mechanism{k}{name}": block for k in range(mechanisms) for name, block in _MECHANISM_BLOCKS.items()}
    return _ROBOT_BLOCKS | _GOAL_BLOCKS | each | moving


def layout(object_state: bool = True, objects: int = 0, mechanisms: int = 0) -> dict[str, slice]:
    """block -> its place in `observation/state`, in order."""
    places, start = {}, 0
    for name, (size, _) in _blocks(object_state, objects, mechanisms).items():
        places[name] = slice(start, start + size)
        start += size
    return places


def scales(object_state: bool = True, objects: int = 0, mechanisms: int = 0) -> np.ndarray:
    """`[S]`: what each entry was multiplied by; divide by it to get metres, radians and seconds back."""
    blocks = _blocks(object_state, objects, mechanisms)
    return np.concatenate([np.full(size, scale) for size, scale in blocks.values()])


def object_blocks(pos: np.ndarray, quat: np.ndarray, velocity: np.ndarray, hand: np.ndarray) -> np.ndarray:
    """Objects `[n, K, 3]`, `[n, K, 4]`, `[n, K, 3]` and hands `[n, 3]` to their blocks `[n, 15 K]`, not yet scaled."""
    # an object that is not there has a zero quaternion, and all its entries are zero
    there = quat.any(axis=2, keepdims=True)
    blocks = np.concatenate([pos, pos - hand[:, None], two_columns(quat), velocity], axis=2) * there
    return blocks.reshape(len(pos), -1)


def mechanism_blocks(position: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """`[n, m]` each to their blocks `[n, 2 m]`, not yet scaled."""
    return np.stack([position, speed], axis=2).reshape(len(position), -1)


def two_columns(quat: np.ndarray) -> np.ndarray:
    """`[..., 4]` unit quaternions to the first two columns of their rotation matrices, `[..., 6]`."""
    w, x, y, z = np.moveaxis(quat, -1, 0)
    first = [1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)]
    second = [2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)]
    return np.stack(first + second, axis=-1)
