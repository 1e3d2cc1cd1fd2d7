"""The layout of `observation/state`, every entry scaled to be about 1.

=================  ====  ==================================================
block              size  what
=================  ====  ==================================================
joints             6     joint angles, rad
fingers            2     opening of each finger, 0 closed to 1 open
joint_speeds       6     rad/s x 0.3
finger_speeds      2     m/s x 5
commanded_joints   6     where the motors pull to, rad
commanded_fingers  1     0 closed to 1 open
hand               3     hand position from the table's centre, m x 4
hand_axis          3     where the fingers point, unit vector
time_left          1     1 at the start of an episode, 0 at its end
goal               3     goal from the table's centre, m x 4 (object_state)
goal_from_hand     3     goal - hand, m x 10 (object_state)
=================  ====  ==================================================
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
_OBJECT_BLOCKS = {"goal": (3, 4.0), "goal_from_hand": (3, 10.0)}


def _blocks(object_state: bool) -> dict[str, tuple[int, float]]:
    return _ROBOT_BLOCKS | _OBJECT_BLOCKS if object_state else _ROBOT_BLOCKS


def layout(object_state: bool = True) -> dict[str, slice]:
    """block -> its place in `observation/state`, in order."""
    places, start = {}, 0
    for name, (size, _) in _blocks(object_state).items():
        places[name] = slice(start, start + size)
        start += size
    return places


def scales(object_state: bool = True) -> np.ndarray:
    """`[S]`: what each entry was multiplied by; divide by it to get metres, radians and seconds back."""
    return np.concatenate([np.full(size, scale) for size, scale in _blocks(object_state).values()])
