"""What each entry of a recorded state and action is called."""

from sparring.envs.tabletop import observe
from sparring.envs.tabletop.backend import Tabletop

_HAND = ["hand_x", "hand_y", "hand_z"]
_TURN = ["turn_x", "turn_y", "turn_z"]
_ACTIONS = {
    "delta_qpos": [f"joint_step.{k}" for k in range(6)] + ["finger_step"],
    "delta_ee_pos": [*_HAND, "finger_step"],
    "delta_ee": [*_HAND, *_TURN, "finger_step"],
    "qpos": [f"joint.{k}" for k in range(6)] + ["fingers"],
}


def state_names(env: Tabletop) -> list[str]:
    return _entries(env, robot=True, world=env.config.object_state == "state")


def privileged_names(env: Tabletop) -> list[str]:
    return _entries(env, robot=False, world=True)


def action_names(env: Tabletop) -> list[str]:
    names = _ACTIONS[env.config.control_mode]
    return names if len(env.mounts) == 1 else [f"{side}_{name}" for side in ("left", "right") for name in names]


def _entries(env: Tabletop, robot: bool, world: bool) -> list[str]:
    now = env.situation()
    blocks = observe.layout(now.objects.shape[1], now.mechanisms.shape[1], len(env.mounts), robot, world)
    names = []
    for name, place in blocks.items():
        size = place.stop - place.start
        names += [name] if size == 1 else [f"{name}.{k}" for k in range(size)]
    return names
