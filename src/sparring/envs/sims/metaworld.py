"""Meta-World: 50 tasks of one Sawyer arm with scripted experts, e.g. `env.name=metaworld:reach-v3`.

`metaworld:mt10` and `metaworld:mt50` draw one of 10 or 50 tasks for each episode; the instruction names it."""

import warnings
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.envs.sims.arguments import choice
from sparring.envs.sims.mujoco import Views, pose, restore_state, saved_state
from sparring.errors import UserError

INSTRUCTIONS = {
    "assembly-v3": "put the ring onto the peg",
    "basketball-v3": "drop the ball into the basket",
    "bin-picking-v3": "move the block to the other bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the cup away from the coffee machine",
    "coffee-push-v3": "push the cup under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "close the faucet",
    "faucet-open-v3": "open the faucet",
    "hammer-v3": "hammer the nail into the wall",
    "hand-insert-v3": "put the hand with the block into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole from the side",
    "peg-unplug-side-v3": "pull the peg out of the hole",
    "pick-out-of-hole-v3": "take the puck out of the hole",
    "pick-place-v3": "put the puck at the goal",
    "pick-place-wall-v3": "lift the puck over the wall to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet sideways",
    "plate-slide-back-v3": "slide the plate out of the cabinet",
    "plate-slide-side-v3": "slide the plate into the cabinet sideways",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the hand to the goal",
    "reach-wall-v3": "move the hand around the wall to the goal",
    "shelf-place-v3": "put the block on the shelf",
    "soccer-v3": "push the ball into the net",
    "stick-pull-v3": "pull the box with the stick",
    "stick-push-v3": "push the box with the stick",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}
_MT10 = [
    "reach",
    "push",
    "pick-place",
    "door-open",
    "drawer-open",
    "drawer-close",
    "button-press-topdown",
    "peg-insert-side",
]
_MT10 += ["window-open", "window-close"]
SETS = {"mt10": tuple(f"{name}-v3" for name in _MT10), "mt50": tuple(INSTRUCTIONS)}
CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
_UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
_ROBOT = [0, 1, 2, 3, 18, 19, 20, 21]  # hand position and gripper opening, of this step and of the one before
_PICTURE = 256  # side of a video frame, pixels
_NO_LIMIT = 2**31  # Meta-World raises an exception after its own limit


def make(
    name: str,
    cameras: list[str] | str = (),  # type: ignore[assignment]
    image_size: int = 64,
    state: Literal["full", "robot"] = "full",
    reward: Literal["dense", "sparse"] = "dense",
    depth: bool = False,
) -> "MetaWorld":
    tasks = SETS.get(name, (name,))
    if unknown := [task for task in tasks if task not in INSTRUCTIONS]:
        raise UserError(f"env.name=metaworld:{unknown[0]} is unknown; expected mt10, mt50 or {', '.join(INSTRUCTIONS)}")
    choice("state", state, ("full", "robot"))
    choice("reward", reward, ("dense", "sparse"))
    return MetaWorld(tasks, cameras, image_size, state == "full", reward == "sparse", depth)


class MetaWorld(gymnasium.Env):
    """Success: the task was solved at some step of the episode, as in Meta-World's own evaluation. With a sparse reward
    the episode ends there."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}
    max_episode_steps = 500
    render_mode = "rgb_array"

    def __init__(
        self, tasks: tuple[str, ...], cameras: list[str] | str, size: int, full: bool, sparse: bool, depth: bool
    ):
        try:
            from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        except ModuleNotFoundError as error:
            install = 'pip install "sparring[sims]", then pip install --no-deps metaworld==3.1.1'
            raise UserError(f"Meta-World needs the package {error.name}; {install}") from None
        # its experts answer with actions above 1, which the env clips
        warnings.filterwarnings("ignore", message="Constant", module="metaworld")
        self._classes: Any = ALL_V3_ENVIRONMENTS
        self._tasks, self._full, self._sparse = tasks, full, sparse
        self._envs: dict[str, Any] = {}  # task -> its env, made when it is first drawn
        self.task, self._succeeded = tasks[0], False
        self.action_space = self._env.action_space
        shown: dict[str, spaces.Space] = {"instruction": spaces.Text(64)}
        shown["state"] = spaces.Box(-np.inf, np.inf, (39 if full else len(_ROBOT),), np.float64)
        names, turns = {camera: camera for camera in CAMERAS}, {camera: (-1, -1) for camera in _UPSIDE_DOWN}
        self._views = Views(lambda: (self.model, self.data), cameras, size, depth, names=names, turns=turns)
        self.observation_space = spaces.Dict(shown | self._views.spaces())

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.task = self._tasks[int(self.np_random.integers(len(self._tasks)))]
        self._env.seed(int(self.np_random.integers(2**31)))
        state, _ = self._env.reset()
        self._succeeded = False
        return self._observed(state), {"task": self.task}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        state, reward, _, _, info = self._env.step(action)
        self._succeeded |= bool(info["success"])
        ends = self._sparse and self._succeeded
        reward = float(ends) if self._sparse else float(reward)
        return self._observed(state), reward, ends, False, {"success": self._succeeded}

    def expert_action(self) -> np.ndarray:
        """The action of Meta-World's scripted policy in the current state, clipped to [-1, 1]."""
        from metaworld.policies import ENV_POLICY_MAP

        experts: Any = ENV_POLICY_MAP
        return np.clip(experts[self.task]().get_action(self._state), -1.0, 1.0).astype(np.float32)

    def render(self) -> np.ndarray:
        return self._views.draw("corner2", _PICTURE)[0]

    def camera_model(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        intrinsics, matrix = self._views.camera_model(name)
        # a camera that is turned by half a turn has x and y reversed
        return intrinsics, matrix * [-1, -1, 1, 1] if name in _UPSIDE_DOWN else matrix

    def gripper_pose(self) -> np.ndarray:
        """The point between the fingers, with the axes of the hand."""
        return pose(self._env.tcp_center, self._env.data.body("hand").xmat.reshape(3, 3))

    def close(self) -> None:
        self._views.close()

    def get_state(self) -> dict[str, Any]:
        inner = saved_state(self._env.model, self._env.data, [self._env])
        return {"task": self.task, "succeeded": self._succeeded, "state": self._state, "inner": inner}

    def set_state(self, saved: dict[str, Any]) -> None:
        self.task, self._succeeded, self._state = saved["task"], saved["succeeded"], saved["state"]
        self._env.seed(0)
        self._env.reset()  # creates what its step needs
        restore_state(self._env.model, self._env.data, [self._env], saved["inner"])

    @property
    def model(self) -> Any:
        """The MuJoCo model of the current task; `sparring check` compares its cameras with the images."""
        return self._env.model

    @property
    def data(self) -> Any:
        return self._env.data

    @property
    def _env(self) -> Any:
        """The env of the current task. Its goal is part of the state, and each reset draws a new start."""
        if self.task not in self._envs:
            env = self._classes[self.task]()
            env._partially_observable, env._freeze_rand_vec, env.seeded_rand_vec = False, False, True
            env._set_task_called, env.max_path_length = True, _NO_LIMIT
            vars(env).pop("sawyer_observation_space", None)  # cached with the goal hidden
            self._envs[self.task] = env
        return self._envs[self.task]

    def _observed(self, state: np.ndarray) -> dict[str, Any]:
        self._state = state
        state = state if self._full else state[_ROBOT]
        return {"instruction": INSTRUCTIONS[self.task], "state": state, **self._views.observed()}
